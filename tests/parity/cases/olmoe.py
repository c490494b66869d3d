"""olmoe: norms over all heads together, experts renormalised and not, biases, fewer key heads than heads."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import draw, yarn
from harness import Draw, ParityCase
from transformers import OlmoeConfig

USUAL: dict[str, Any] = {"kind": OlmoeConfig, "num_experts": 7, "num_experts_per_tok": 3}
CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, **USUAL),
    "renormalised": partial(draw, norm_topk_prob=True, **USUAL),
    "biased": partial(draw, attention_bias=True, **USUAL),
    "plain_heads": partial(draw, num_attention_heads=3, num_key_value_heads=None, hidden_size=48, **USUAL),
    "yarn": partial(yarn, **USUAL),
}

CASE = ParityCase(family="olmoe", configs=CONFIGS)
