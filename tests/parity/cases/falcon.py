"""falcon: both generations, one and two norms, one, several and as many key heads, biases, rotary scalings."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import FalconConfig

ORIGINAL = TOKENS // 3
D_HEAD = 16
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")


def draw(rng: Random, **more: object) -> FalconConfig:
    """A config of the older generation unless `more` says otherwise."""
    heads = rng.choice([4, 6])
    rope = {"rope_type": "default", "rope_theta": rng.uniform(50, 200)}
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * D_HEAD,
        "ffn_hidden_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "activation": rng.choice(ACTIVATIONS),
        "bias": rng.random() < 0.5,
        "max_position_embeddings": TOKENS,
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    rope |= sizes.pop("rope", {})
    return FalconConfig(**sizes, rope_parameters=rope)


NEWER = {"new_decoder_architecture": True, "num_kv_heads": 2}
# pairs fall on both sides of each beta and between them
YARN = {"rope_type": "yarn", "factor": 3.0, "beta_fast": 1.0, "beta_slow": 0.25}
CONFIGS: dict[str, Draw] = {
    "multi_query": partial(draw, bias=False, tie_word_embeddings=True),
    "multi_query_biased": partial(draw, bias=True, num_kv_heads=2),
    "all_key_heads": partial(draw, multi_query=False),
    "sequential": partial(draw, parallel_attn=False, bias=True),
    "sequential_all": partial(draw, parallel_attn=False, multi_query=False),
    "newer": partial(draw, **NEWER, bias=True),
    "newer_unbiased": partial(draw, **NEWER, bias=False, tie_word_embeddings=False),
    "newer_one_norm": partial(draw, **NEWER, num_ln_in_parallel_attn=1),
    "linear": partial(draw, rope={"rope_type": "linear", "factor": 3.0}),
    "yarn": partial(draw, **NEWER, rope={**YARN, "original_max_position_embeddings": ORIGINAL}),
}

CASE = ParityCase(family="falcon", configs=CONFIGS)
