"""glm: half of each head turned, or all of it; biases or none."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, draw, yarn
from harness import Draw, ParityCase
from transformers import GlmConfig

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=GlmConfig, head_dim=D_HEAD, tie_word_embeddings=True),
    "whole_unbiased": partial(
        yarn,
        kind=GlmConfig,
        head_dim=D_HEAD,
        hidden_size=72,
        partial_rotary_factor=1.0,
        attention_bias=False,
        tie_word_embeddings=False,
    ),
}

CASE = ParityCase(family="glm", configs=CONFIGS)
