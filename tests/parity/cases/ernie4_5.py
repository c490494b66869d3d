"""ernie4_5: biases everywhere or nowhere, adjacent pairs turned."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, draw, wide
from harness import Draw, ParityCase
from transformers import Ernie4_5Config

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=Ernie4_5Config, head_dim=D_HEAD, tie_word_embeddings=True),
    "biased": partial(wide, kind=Ernie4_5Config, use_bias=True, tie_word_embeddings=False),
}

CASE = ParityCase(family="ernie4_5", configs=CONFIGS)
