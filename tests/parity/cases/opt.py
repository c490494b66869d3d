"""opt: norms before, after, without a final one and without gains, biases or none, every activation, narrow tables."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import OPTConfig

ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")


def draw(rng: Random, **more: object) -> OPTConfig:
    """A config whose context is the text; `more` overrides."""
    heads = rng.choice([2, 3, 5])
    d_model = heads * rng.choice([6, 10, 14])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": d_model,
        "word_embed_proj_dim": d_model,
        "ffn_dim": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "activation_function": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "enable_bias": rng.random() < 0.5,
        "do_layer_norm_before": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 1,
        **more,
    }
    return OPTConfig(**sizes)


BIASED = {"enable_bias": True, "layer_norm_elementwise_affine": True}
CONFIGS: dict[str, Draw] = {
    "usual": partial(draw, **BIASED, do_layer_norm_before=True, tie_word_embeddings=True, activation_function="relu"),
    "norm_after": partial(draw, **BIASED, do_layer_norm_before=False),
    "no_final_norm": partial(draw, **BIASED, do_layer_norm_before=True, _remove_final_layer_norm=True),
    "unbiased": partial(draw, enable_bias=False),
    "plain_norms": partial(draw, layer_norm_elementwise_affine=False, do_layer_norm_before=True),
    "untied": partial(draw, tie_word_embeddings=False),
    # OPT-350M's kind; its norms stand after the sums, and there is none at the end
    "narrow_tables": partial(draw, word_embed_proj_dim=7, do_layer_norm_before=False, tie_word_embeddings=True),
    "narrow_untied": partial(draw, word_embed_proj_dim=29, do_layer_norm_before=True, tie_word_embeddings=False),
}
CONFIGS |= {activation: partial(draw, activation_function=activation) for activation in ACTIVATIONS}

CASE = ParityCase(
    family="opt",
    configs=CONFIGS,
    inert_weights={"k.bias": "adds the same number to every score of a query, which softmax does not see"},
)
