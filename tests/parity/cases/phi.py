"""phi: side by side, part of each head turned or all of it, normed heads, every activation, both heads with a bias."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import PhiConfig

from cases.llama import ROPE

D_HEAD = 16
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")


def draw(rng: Random, part: float = 0.5, **more: object) -> PhiConfig:
    """A config whose context is the text and of whose heads a `part` is turned; `more` overrides."""
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
        "layer_norm_eps": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "qk_layernorm": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {"rope_theta": rng.uniform(50, 200), "partial_rotary_factor": part},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return PhiConfig(**drawn)


def scaled(rng: Random, kind: str) -> PhiConfig:
    """A config with a rotary scaling; the text is three times its original context."""
    said = {"rope_type": kind, "rope_theta": rng.uniform(50, 200), "factor": rng.uniform(2, 6), **ROPE[kind]}
    if kind != "linear":
        said["original_max_position_embeddings"] = TOKENS // 3
    return draw(rng, rope_parameters=said | {"partial_rotary_factor": 0.75})


CONFIGS: dict[str, Draw] = {
    "usual": partial(draw, qk_layernorm=False, tie_word_embeddings=False),
    "normed_tied": partial(draw, qk_layernorm=True, tie_word_embeddings=True),
    "quarter": partial(draw, part=0.25),
    "whole": partial(draw, part=1.0),
    "linear": partial(scaled, kind="linear"),
    "yarn": partial(scaled, kind="yarn"),
    "llama3": partial(scaled, kind="llama3"),
}
CONFIGS |= {activation: partial(draw, hidden_act=activation) for activation in ACTIVATIONS}

CASE = ParityCase(family="phi", configs=CONFIGS)
