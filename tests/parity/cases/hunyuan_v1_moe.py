"""hunyuan_v1_moe: a shared expert beside those chosen; RoPE raised or not."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, draw
from harness import Draw, ParityCase
from transformers import HunYuanMoEV1Config

USUAL: dict[str, Any] = {"kind": HunYuanMoEV1Config, "num_experts": 5, "head_dim": D_HEAD}

CONFIGS: dict[str, Draw] = {
    "raised_tied": partial(
        draw,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 3.0, "factor": 1.0},
        moe_topk=2,
        tie_word_embeddings=True,
        **USUAL,
    ),
    "biased": partial(draw, moe_topk=3, attention_bias=True, tie_word_embeddings=False, **USUAL),
}

CASE = ParityCase(family="hunyuan_v1_moe", configs=CONFIGS)
