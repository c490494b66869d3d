"""qwen3_5_moe_text: the layers of qwen3_5_text, with experts beside a gated shared one in all of them."""

from __future__ import annotations

from functools import partial

from harness import Draw, ParityCase
from transformers import Qwen3_5MoeTextConfig

from cases.qwen3_next import EXPERTS, draw

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=Qwen3_5MoeTextConfig, tie_word_embeddings=True, **EXPERTS),
    "untied": partial(draw, kind=Qwen3_5MoeTextConfig, **EXPERTS),
}

CASE = ParityCase(family="qwen3_5_moe_text", configs=CONFIGS)
