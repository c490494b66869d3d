"""qwen2_moe: a gated shared expert, experts in all layers or in those not listed; windows as listed; biases or none."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import WINDOW, draw, yarn
from harness import Draw, ParityCase
from transformers import Qwen2MoeConfig

USUAL: dict[str, Any] = {
    "kind": Qwen2MoeConfig,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 23,
    "shared_expert_intermediate_size": 17,
}
CONFIGS: dict[str, Draw] = {
    "listed_tied": partial(draw, mlp_only_layers=[1], tie_word_embeddings=True, **USUAL),
    "windows": partial(
        yarn,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
        norm_topk_prob=True,
        qkv_bias=False,
        tie_word_embeddings=False,
        **USUAL,
    ),
}

CASE = ParityCase(family="qwen2_moe", configs=CONFIGS)
