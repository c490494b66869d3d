"""apertus: a learned activation or a fixed one, biases or none."""

from __future__ import annotations

from functools import partial

from drawn import draw, yarn
from harness import Draw, ParityCase
from transformers import ApertusConfig

CONFIGS: dict[str, Draw] = {
    "learned_tied": partial(draw, kind=ApertusConfig, hidden_act="xielu", dtype="float32", tie_word_embeddings=True),
    "fixed_biased": partial(
        yarn, kind=ApertusConfig, hidden_act="relu2", attention_bias=True, tie_word_embeddings=False
    ),
}

CASE = ParityCase(family="apertus", configs=CONFIGS)
