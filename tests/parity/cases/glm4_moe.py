"""glm4_moe: dense layers first, a shared expert or two, groups of experts, half-turned heads with norms and biases."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, draw, wide, yarn
from harness import Draw, ParityCase
from transformers import Glm4MoeConfig

USUAL: dict[str, Any] = {
    "kind": Glm4MoeConfig,
    "head_dim": D_HEAD,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 13,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.7,
}
GROUPS: dict[str, Any] = {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, attention_bias=True, use_qk_norm=True, **USUAL),
    "groups": partial(wide, tie_word_embeddings=False, **USUAL | GROUPS | {"n_shared_experts": 2}),
    "sums_kept": partial(
        yarn,
        partial_rotary_factor=1.0,
        norm_topk_prob=False,
        attention_bias=True,
        **USUAL | {"first_k_dense_replace": 0},
    ),
}


CASE = ParityCase(family="glm4_moe", configs=CONFIGS)
