"""recurrent_gemma: recurrences, one attention with a window, soft-capped logits.

Recurrences are as wide as the stream: for others transformers makes a state of the wrong width where one token comes
first.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import RecurrentGemmaConfig

from cases.gemma2 import SMOOTH

RECURRENT, ATTENTION = "recurrent", "attention"


def draw(rng: Random, **more: object) -> RecurrentGemmaConfig:
    """Three layers, one of them attention; heads divide the recurrence's width too."""
    heads = rng.choice([2, 4])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * 12,
        "intermediate_size": 2 * rng.randrange(20, 40),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "lru_width": rng.choice([None, heads * 12]),
        "attention_window_size": TOKENS // 4,
        "conv1d_width": rng.randrange(2, 6),
        "logits_soft_cap": rng.uniform(5, 20),
        "rms_norm_eps": rng.uniform(0.05, 0.2),
        "hidden_activation": rng.choice(SMOOTH),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200), "partial_rotary_factor": 0.5},
        "block_types": [RECURRENT, ATTENTION, RECURRENT],
        "pad_token_id": None,
        **more,
    }
    return RecurrentGemmaConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "one_table": draw,
    "biased": partial(draw, attention_bias=True, tie_word_embeddings=False, block_types=[ATTENTION, RECURRENT]),
}

CASE = ParityCase(family="recurrent_gemma", configs=CONFIGS)
