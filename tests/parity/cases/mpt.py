"""mpt: ALiBi for head counts that are powers of two and others, a scale of its own, both heads."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import MptConfig


def draw(rng: Random, heads: int, scale: bool = False, **more: object) -> MptConfig:
    """A config of so many heads, with a scale of the scores' own if asked; `more` overrides."""
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "d_model": heads * rng.choice([6, 10]),
        "n_layers": 2,
        "n_heads": heads,
        "max_seq_len": TOKENS,
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "attn_config": {"softmax_scale": rng.uniform(0.2, 0.8) if scale else None},
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return MptConfig(**sizes)


CONFIGS: dict[str, Draw] = {f"heads_{n}": partial(draw, heads=n) for n in (1, 4, 7, 12)}
CONFIGS |= {
    "scaled": partial(draw, heads=5, scale=True),
    "tied": partial(draw, heads=3, tie_word_embeddings=True),
    "untied": partial(draw, heads=6, tie_word_embeddings=False),
}

CASE = ParityCase(family="mpt", configs=CONFIGS, attentions=("eager",))
