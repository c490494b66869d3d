"""granitemoe: factors on embedding, scores, branches and logits; experts in stacks."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import draw, yarn
from harness import Draw, ParityCase
from transformers import GraniteMoeConfig

USUAL: dict[str, Any] = {
    "kind": GraniteMoeConfig,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, **USUAL),
    "biased": partial(yarn, tie_word_embeddings=False, attention_bias=True, **USUAL | {"num_experts_per_tok": 3}),
}

CASE = ParityCase(family="granitemoe", configs=CONFIGS)
