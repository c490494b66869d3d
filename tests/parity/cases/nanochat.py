"""nanochat: RoPE the other way, logits capped or not, biases or none."""

from __future__ import annotations

from functools import partial

from drawn import draw, yarn
from harness import Draw, ParityCase
from transformers import NanoChatConfig

CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, kind=NanoChatConfig, final_logit_softcapping=1.5, tie_word_embeddings=True),
    "biased": partial(
        yarn, kind=NanoChatConfig, final_logit_softcapping=None, attention_bias=True, tie_word_embeddings=False
    ),
}

CASE = ParityCase(family="nanochat", configs=CONFIGS)
