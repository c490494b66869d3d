"""gpt2: every way of scaling scores, a feed-forward width of its own, every activation, both heads."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import GPT2Config

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")


def draw(rng: Random, **more: object) -> GPT2Config:
    """A config whose context is the text; `more` overrides."""
    heads = rng.choice([2, 3, 5])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "n_positions": TOKENS,
        "n_embd": heads * rng.choice([6, 10, 14]),
        "n_layer": 2,
        "n_head": heads,
        "n_inner": rng.choice([None, rng.randrange(30, 60)]),
        "activation_function": rng.choice(ACTIVATIONS),
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "scale_attn_weights": rng.random() < 0.5,
        "scale_attn_by_inverse_layer_idx": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return GPT2Config(**sizes)


CONFIGS: dict[str, Draw] = {
    "usual": partial(draw, n_inner=None, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
    "by_layer": partial(draw, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=True),
    "unscaled": partial(draw, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=False),
    "unscaled_by_layer": partial(draw, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True),
    "upcast": partial(draw, reorder_and_upcast_attn=True),
    "tied": partial(draw, tie_word_embeddings=True),
    "untied": partial(draw, tie_word_embeddings=False, n_inner=37),
}
CONFIGS |= {activation: partial(draw, activation_function=activation) for activation in ACTIVATIONS}

CASE = ParityCase(
    family="gpt2",
    configs=CONFIGS,
    inert_weights={"k.bias": "adds the same number to every score of a query, which softmax does not see"},
)
