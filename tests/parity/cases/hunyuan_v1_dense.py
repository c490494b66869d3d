"""hunyuan_v1_dense: heads normed after RoPE, its base raised by alpha or not; biases or none."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, draw, wide
from harness import Draw, ParityCase
from transformers import HunYuanDenseV1Config

CONFIGS: dict[str, Draw] = {
    "raised_tied": partial(
        draw,
        kind=HunYuanDenseV1Config,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 3.0, "factor": 1.0},
        head_dim=D_HEAD,
        tie_word_embeddings=True,
    ),
    "wide_biased": partial(wide, kind=HunYuanDenseV1Config, attention_bias=True, tie_word_embeddings=False),
}

CASE = ParityCase(family="hunyuan_v1_dense", configs=CONFIGS)
