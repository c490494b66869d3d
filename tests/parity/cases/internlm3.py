"""internlm3: biases of all matrices or of none."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, draw, wide
from harness import Draw, ParityCase
from transformers import InternLM3Config

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=InternLM3Config, head_dim=D_HEAD, tie_word_embeddings=True),
    "biased": partial(wide, kind=InternLM3Config, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
}

CASE = ParityCase(family="internlm3", configs=CONFIGS)
