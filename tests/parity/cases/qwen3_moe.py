"""qwen3_moe: experts in all layers, in every second, in all but those listed; renormalised or not; windows."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, WINDOW, draw, wide, yarn
from harness import Draw, ParityCase
from transformers import Qwen3MoeConfig

USUAL: dict[str, Any] = {
    "kind": Qwen3MoeConfig,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 23,
    "head_dim": D_HEAD,
}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW}
CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, **USUAL),
    "renormalised": partial(wide, norm_topk_prob=True, **USUAL),
    "every_second": partial(draw, decoder_sparse_step=2, num_hidden_layers=3, **USUAL),
    "listed": partial(draw, mlp_only_layers=[1], attention_bias=True, **USUAL),
    "windows": partial(yarn, norm_topk_prob=True, **WINDOWS, **USUAL),
}

CASE = ParityCase(family="qwen3_moe", configs=CONFIGS)
