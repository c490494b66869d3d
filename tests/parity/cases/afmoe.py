"""afmoe: windows with RoPE beside full attention without, by interval or as listed; embeddings scaled or not."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, WINDOW, draw, yarn
from harness import Draw, ParityCase
from transformers import AfmoeConfig

USUAL: dict[str, Any] = {
    "kind": AfmoeConfig,
    "head_dim": D_HEAD,
    "sliding_window": WINDOW,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 23,
    "route_scale": 1.7,
    "num_shared_experts": 2,
}

CONFIGS: dict[str, Draw] = {
    "interval_tied": partial(draw, global_attn_every_n_layers=2, mup_enabled=True, tie_word_embeddings=True, **USUAL),
    "listed": partial(
        yarn,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        num_dense_layers=1,
        tie_word_embeddings=False,
        **USUAL,
    ),
}

CASE = ParityCase(family="afmoe", configs=CONFIGS)
