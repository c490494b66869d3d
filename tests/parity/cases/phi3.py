"""phi3: longrope whose short and long lists both come into play, parts of heads turned, windows within the text."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import Phi3Config

D_HEAD, ORIGINAL = 16, TOKENS * 2 // 3
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")


def draw(rng: Random, **more: object) -> Phi3Config:
    """A config whose context is the text; `more` overrides."""
    heads, kv_heads = rng.choice([(4, 2), (6, 2), (6, 3), (3, 1), (3, 3)])
    drawn: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * D_HEAD,
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "sliding_window": rng.choice([None, rng.randrange(6, TOKENS // 3)]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200)},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return Phi3Config(**drawn)


def longrope(rng: Random, part: float = 1.0, **more: object) -> Phi3Config:
    """A text that is beyond the original context, though half of it is not; nor is it with the original doubled."""
    short, long = ([rng.uniform(1, 4) for _ in range(int(D_HEAD * part) // 2)] for _ in range(2))
    rope = {
        "rope_type": "longrope",
        "rope_theta": rng.uniform(50, 200),
        "short_factor": short,
        "long_factor": long,
        "partial_rotary_factor": part,
        **more,
    }
    return draw(rng, rope_parameters=rope, original_max_position_embeddings=ORIGINAL)


CONFIGS: dict[str, Draw] = {
    "bare": partial(draw, sliding_window=None, tie_word_embeddings=False),
    "window_tied": partial(draw, sliding_window=9, tie_word_embeddings=True),
    "partial": partial(
        draw, rope_parameters={"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5}
    ),
    "longrope": longrope,
    "longrope_partial": partial(longrope, part=0.75),
    "longrope_factor": partial(longrope, factor=7.0),
    "longrope_attention_factor": partial(longrope, attention_factor=1.4),
    "longrope_su": partial(longrope, rope_type="su", original_max_position_embeddings=ORIGINAL),
}
CONFIGS |= {activation: partial(draw, hidden_act=activation) for activation in ACTIVATIONS}

CASE = ParityCase(family="phi3", configs=CONFIGS)
