"""gpt_neox: side by side and one after the other, heads turned in part, rotary scalings, with and without biases."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import GPTNeoXConfig

ORIGINAL = TOKENS // 3
ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "relu")


def draw(rng: Random, d_head: int | None = None, **more: object) -> GPTNeoXConfig:
    """A config whose heads are turned in part; `more` overrides."""
    heads = rng.choice([3, 4, 5])
    d_head = d_head or rng.choice([12, 20, 28])
    rope = {
        "rope_type": "default",
        "rope_theta": rng.uniform(50, 200),
        "partial_rotary_factor": rng.choice([4, 6, 8]) / d_head + 1e-3,
    }
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * d_head,
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "hidden_act": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "layer_norm_eps": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "attention_bias": rng.random() < 0.5,
        "use_parallel_residual": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    rope |= sizes.pop("rope", {})
    return GPTNeoXConfig(**sizes, rope_parameters=rope)


# pairs fall on both sides of each beta and between them
YARN = {"rope_type": "yarn", "factor": 3.0, "beta_fast": 1.0, "beta_slow": 0.25, "partial_rotary_factor": 0.8}
CONFIGS: dict[str, Draw] = {
    "parallel": partial(draw, use_parallel_residual=True, attention_bias=True, tie_word_embeddings=False),
    "sequential": partial(draw, use_parallel_residual=False, attention_bias=True, tie_word_embeddings=True),
    "unbiased": partial(draw, attention_bias=False),
    "whole_heads": partial(draw, rope={"partial_rotary_factor": 1.0}),
    "linear": partial(draw, rope={"rope_type": "linear", "factor": 3.0}),
    "dynamic": partial(draw, rope={"rope_type": "dynamic", "factor": 3.0}, max_position_embeddings=ORIGINAL),
    "yarn": partial(draw, d_head=20, rope={**YARN, "original_max_position_embeddings": ORIGINAL}),
}

CASE = ParityCase(family="gpt_neox", configs=CONFIGS)
