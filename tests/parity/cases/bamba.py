"""bamba: attention in some layers, groups, biases, tied and not, chunks shorter than the text."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import draw as llama_like
from harness import Draw, ParityCase
from transformers import BambaConfig, PreTrainedConfig

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_act": "silu",
    "attn_layer_indices": [1],
    "mamba_n_heads": 16,
    "mamba_d_state": 6,
    "mamba_chunk_size": 16,
}


def draw(rng: Random, **more: object) -> PreTrainedConfig:
    """A llama-like config with Mamba-2 in most layers."""
    groups, kernel = rng.choice([1, 2, 4]), rng.choice([3, 4])
    return llama_like(rng, BambaConfig, **{**SIZES, "mamba_n_groups": groups, "mamba_d_conv": kernel, **more})


CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, mamba_proj_bias=True),
    "untied": partial(draw, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, mamba_conv_bias=False),
}

CASE = ParityCase(family="bamba", configs=CONFIGS)
