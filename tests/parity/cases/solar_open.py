"""solar_open: experts in every layer beside shared ones, groups open or closed; biases or none."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, draw, yarn
from harness import Draw, ParityCase
from transformers import SolarOpenConfig

USUAL: dict[str, Any] = {
    "kind": SolarOpenConfig,
    "head_dim": D_HEAD,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 23,
    "routed_scaling_factor": 1.7,
}

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, **USUAL),
    "groups": partial(
        yarn, n_group=3, topk_group=2, n_shared_experts=2, attention_bias=True, tie_word_embeddings=False, **USUAL
    ),
}

CASE = ParityCase(family="solar_open", configs=CONFIGS)
