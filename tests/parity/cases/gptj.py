"""gptj: part of each head turned or all of it, tables tied or not."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import ACTIVATIONS
from harness import TOKENS, Draw, ParityCase
from transformers import GPTJConfig, PreTrainedConfig


def drawn(rng: Random, **more: object) -> PreTrainedConfig:
    """A small config with heads of twelve numbers."""
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "n_positions": TOKENS,
        "n_embd": 36,
        "n_layer": 2,
        "n_head": 3,
        "activation_function": rng.choice(ACTIVATIONS),
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return GPTJConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "tied": partial(drawn, rotary_dim=8, tie_word_embeddings=True),
    "whole_wide": partial(drawn, rotary_dim=12, n_inner=50, tie_word_embeddings=False),
}

CASE = ParityCase(family="gptj", configs=CONFIGS)
