"""dots1: dense layers first, windows from a layer on or as listed; renormalised or not."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import WINDOW, draw, yarn
from harness import Draw, ParityCase
from transformers import Dots1Config

USUAL: dict[str, Any] = {
    "kind": Dots1Config,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 23,
    "routed_scaling_factor": 1.7,
}

CONFIGS: dict[str, Draw] = {
    "later_windows_tied": partial(draw, sliding_window=WINDOW, max_window_layers=1, tie_word_embeddings=True, **USUAL),
    "listed": partial(
        yarn,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        norm_topk_prob=True,
        first_k_dense_replace=1,
        attention_bias=True,
        tie_word_embeddings=False,
        **USUAL,
    ),
}

CASE = ParityCase(family="dots1", configs=CONFIGS)
