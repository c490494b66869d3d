"""arcee: two matrices with the square of ReLU between them, biases or none."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, draw, yarn
from harness import Draw, ParityCase
from transformers import ArceeConfig

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=ArceeConfig, hidden_act="relu2", tie_word_embeddings=True),
    "biased": partial(
        yarn,
        kind=ArceeConfig,
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=D_HEAD,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
}

CASE = ParityCase(family="arcee", configs=CONFIGS)
