"""gemma: heads wider together than the stream, gains beside 1, every activation and rotary scaling, both heads."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import GemmaConfig

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")


def sizes(rng: Random) -> dict[str, Any]:
    """What all gemmas draw alike; hidden_size divides by the heads as transformers asks, the heads' width is apart."""
    heads, kv_heads = rng.choice([(4, 2), (6, 2), (6, 3), (3, 1)])
    return {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * rng.choice([7, 9, 11]),
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "attention_bias": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def draw(rng: Random, **more: object) -> GemmaConfig:
    """A config; `more` overrides."""
    drawn = {
        **sizes(rng),
        "hidden_act": rng.choice(ACTIVATIONS),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200)},
        **more,
    }
    return GemmaConfig(**drawn)


def scaled(rng: Random) -> GemmaConfig:
    """Positions interpolated."""
    rope = {"rope_type": "linear", "rope_theta": rng.uniform(50, 200), "factor": rng.uniform(2, 6)}
    return draw(rng, rope_parameters=rope)


CONFIGS: dict[str, Draw] = {
    "bare": partial(draw, attention_bias=False, tie_word_embeddings=True),
    "biased_untied": partial(draw, attention_bias=True, tie_word_embeddings=False),
    "linear": scaled,
}
CONFIGS |= {activation: partial(draw, hidden_act=activation) for activation in ACTIVATIONS}

CASE = ParityCase(family="gemma", configs=CONFIGS)
