"""llama: grouped heads wider together than the stream, every rotary scaling, every activation, biases, both heads."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import LlamaConfig

D_HEAD = 16
ORIGINAL = TOKENS // 3
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")

# What a rope object holds beside rope_type and rope_theta. The betas and frequency factors are such that pairs fall on
# both sides of each and between them, for the bases drawn below.
ROPE: dict[str, dict[str, Any]] = {
    "linear": {},
    "dynamic": {},
    "yarn": {"beta_fast": 1.0, "beta_slow": 0.25},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN: dict[str, dict[str, Any]] = {
    "attention_factor": {"attention_factor": 1.3},
    "mscale": {"mscale": 0.7, "mscale_all_dim": 1.2},
    "untruncated": {"truncate": False},
}


def draw(rng: Random, **more: object) -> LlamaConfig:
    """A config whose sizes divide nothing they need not; `more` overrides."""
    heads, kv_heads = rng.choice([(4, 2), (6, 2), (6, 3), (3, 1)])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * rng.choice([7, 9, 11]),
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": D_HEAD,
        "hidden_act": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200)},
        **more,
    }
    return LlamaConfig(**sizes)


def scaled(rng: Random, kind: str, **more: object) -> LlamaConfig:
    """A config with a rotary scaling; the text is three times its original context."""
    rope = {"rope_type": kind, "rope_theta": rng.uniform(50, 200), "factor": rng.uniform(2, 6), **ROPE[kind], **more}
    if kind == "dynamic":  # which begins at the model's context
        return draw(rng, rope_parameters=rope, max_position_embeddings=ORIGINAL)
    if kind != "linear":
        rope["original_max_position_embeddings"] = ORIGINAL
    return draw(rng, rope_parameters=rope)


def stored_factors(rng: Random) -> LlamaConfig:
    """longrope that does not change with the length: a divisor of its own for each pair."""
    factors = [rng.uniform(1, 4) for _ in range(D_HEAD // 2)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": rng.uniform(50, 200),
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": ORIGINAL,
    }
    return draw(rng, rope_parameters=rope)


def plain_heads(rng: Random) -> LlamaConfig:
    """As many key heads as heads, and their width left to hidden_size / num_attention_heads."""
    heads = rng.choice([3, 4, 5])
    sizes = {"num_attention_heads": heads, "num_key_value_heads": None, "head_dim": None}
    return draw(rng, hidden_size=heads * D_HEAD, **sizes)


BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
CONFIGS: dict[str, Draw] = {
    "bare": partial(draw, **dict.fromkeys(BIASED, False)),
    "biased_tied": partial(draw, **BIASED),
    "plain_heads": plain_heads,
    "longrope": stored_factors,
}
CONFIGS |= {kind: partial(scaled, kind=kind) for kind in ROPE}
CONFIGS |= {f"yarn_{name}": partial(scaled, kind="yarn", **keys) for name, keys in YARN.items()}
CONFIGS |= {activation: partial(draw, hidden_act=activation) for activation in ACTIVATIONS}

CASE = ParityCase(family="llama", configs=CONFIGS)
