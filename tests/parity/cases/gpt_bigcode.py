"""gpt_bigcode: one key head or as many as queries have, stored in two ways; scores scaled or not."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import ACTIVATIONS
from harness import TOKENS, Draw, ParityCase
from transformers import GPTBigCodeConfig, PreTrainedConfig


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
    return GPTBigCodeConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "one_key_head": partial(drawn, tie_word_embeddings=True),
    "all_heads": partial(drawn, multi_query=False, n_inner=50, scale_attn_weights=False, tie_word_embeddings=False),
}
INERT = {"k.bias": "adds the same number to every score of a query, which softmax does not see"}

CASE = ParityCase(family="gpt_bigcode", configs=CONFIGS, inert_weights=INERT)
