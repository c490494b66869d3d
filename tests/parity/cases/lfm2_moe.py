"""lfm2_moe: a dense layer first, then experts with the correction and without, renormalised or not."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import Draw, ParityCase
from transformers import Lfm2MoeConfig

from cases.lfm2 import hybrid

USUAL: dict[str, Any] = {
    "kind": Lfm2MoeConfig,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 13,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.7,
}
CONFIGS: dict[str, Draw] = {
    "corrected": partial(hybrid, **USUAL),
    "plain": partial(
        hybrid, conv_bias=True, use_expert_bias=False, norm_topk_prob=False, **USUAL | {"num_dense_layers": 0}
    ),
}

CASE = ParityCase(family="lfm2_moe", configs=CONFIGS)
