"""bloom: ALiBi for head counts that are powers of two and others, both heads."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import Draw, ParityCase
from transformers import BloomConfig


def draw(rng: Random, heads: int, **more: object) -> BloomConfig:
    """A config of so many heads; `more` overrides."""
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * rng.choice([6, 10]),
        "n_layer": 2,
        "n_head": heads,
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return BloomConfig(**sizes)


CONFIGS: dict[str, Draw] = {f"heads_{n}": partial(draw, heads=n) for n in (1, 4, 7, 12)}
CONFIGS |= {
    "tied": partial(draw, heads=3, tie_word_embeddings=True),
    "untied": partial(draw, heads=6, tie_word_embeddings=False),
}

CASE = ParityCase(
    family="bloom",
    configs=CONFIGS,
    inert_weights={"k.bias": "adds the same number to every score of a query, which softmax does not see"},
    attentions=("eager",),
)
