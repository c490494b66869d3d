"""seed_oss: biases on queries, keys and values, or on every matrix."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, draw, wide
from harness import Draw, ParityCase
from transformers import SeedOssConfig

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=SeedOssConfig, head_dim=D_HEAD, tie_word_embeddings=True),
    "biased": partial(
        wide,
        kind=SeedOssConfig,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
}

CASE = ParityCase(family="seed_oss", configs=CONFIGS)
