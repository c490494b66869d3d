"""ernie4_5_moe: experts in the layers from one on, in every second; shared experts or none."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import draw, yarn
from harness import Draw, ParityCase
from transformers import Ernie4_5_MoeConfig

USUAL: dict[str, Any] = {
    "kind": Ernie4_5_MoeConfig,
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_intermediate_size": 23,
    "moe_num_shared_experts": 2,
}

CONFIGS: dict[str, Draw] = {
    "from_one_tied": partial(draw, num_hidden_layers=3, tie_word_embeddings=True, **USUAL),
    "every_second": partial(
        yarn,
        num_hidden_layers=3,
        moe_layer_start_index=0,
        moe_layer_end_index=1,
        moe_layer_interval=2,
        tie_word_embeddings=False,
        **USUAL | {"moe_num_shared_experts": 0},
    ),
}

CASE = ParityCase(family="ernie4_5_moe", configs=CONFIGS)
