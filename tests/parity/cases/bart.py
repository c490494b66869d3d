"""bart: encoder and decoder of unlike depths, heads and widths, embeddings scaled or not."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, ParityCase
from transformers import BartConfig, PreTrainedConfig
from translating import TRANSLATING

ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
INERT = {"k.bias": "adds the same number to every score of a query, which softmax does not see"}


def draw(rng: Random, kind: type[PreTrainedConfig] = BartConfig, **more: object) -> PreTrainedConfig:
    """A config whose context is the text; `more` overrides."""
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "d_model": rng.choice([24, 36]),
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": rng.choice([2, 4]),
        "decoder_attention_heads": rng.choice([3, 6]),
        "encoder_ffn_dim": rng.randrange(30, 60),
        "decoder_ffn_dim": rng.randrange(30, 60),
        "activation_function": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "scale_embedding": rng.random() < 0.5,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        **more,
    }
    return kind(**sizes)


def both(kind: type[PreTrainedConfig], **more: object) -> dict[str, Any]:
    """The deeper stack on either side, embeddings scaled and not."""
    return {
        "plain": partial(draw, kind=kind, scale_embedding=False, **more),
        "scaled": partial(draw, kind=kind, scale_embedding=True, encoder_layers=1, decoder_layers=2, **more),
    }


CASE = ParityCase(family="bart", kind=TRANSLATING, configs=both(BartConfig), inert_weights=INERT)
