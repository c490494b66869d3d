"""qwen3_5_text: the layers of qwen3_next with a dense feed-forward, and pairs of RoPE in three sections."""

from __future__ import annotations

from functools import partial

from harness import Draw, ParityCase
from transformers import Qwen3_5TextConfig

from cases.qwen3_next import draw

SECTIONS = {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=Qwen3_5TextConfig, tie_word_embeddings=True),
    "sections": partial(draw, kind=Qwen3_5TextConfig, rope_parameters=SECTIONS, attention_bias=True),
}

CASE = ParityCase(family="qwen3_5_text", configs=CONFIGS)
