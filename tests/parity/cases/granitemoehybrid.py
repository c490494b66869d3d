"""granitemoehybrid: experts or none beside a feed-forward, RoPE or none, groups, biases, factors."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import draw as llama_like
from harness import Draw, ParityCase
from transformers import GraniteMoeHybridConfig, PreTrainedConfig

from cases import bamba, granitemoe

USUAL: dict[str, Any] = {
    **{key: value for key, value in bamba.SIZES.items() if key != "attn_layer_indices"},
    **granitemoe.USUAL,
    "kind": GraniteMoeHybridConfig,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 19,
}


def draw(rng: Random, **more: object) -> PreTrainedConfig:
    """Granite's factors, with Mamba-2 in most layers."""
    groups, kernel = rng.choice([1, 2, 4]), rng.choice([3, 4])
    return llama_like(rng, **{**USUAL, "mamba_n_groups": groups, "mamba_d_conv": kernel, **more})


DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
CONFIGS: dict[str, Draw] = {
    "experts": partial(draw, tie_word_embeddings=True, mamba_proj_bias=True),
    "dense_rope": partial(
        draw,
        tie_word_embeddings=False,
        attention_bias=True,
        mamba_conv_bias=False,
        position_embedding_type="rope",
        **DENSE,
    ),
}

CASE = ParityCase(family="granitemoehybrid", configs=CONFIGS)
