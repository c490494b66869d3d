"""jamba: attention and experts in few and many layers, biases, tied and not."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import draw as llama_like
from harness import Draw, ParityCase
from transformers import JambaConfig, PreTrainedConfig

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_act": "silu",
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_d_state": 6,
    "mamba_dt_rank": 3,
}


def draw(rng: Random, **more: object) -> PreTrainedConfig:
    """A llama-like config without RoPE, with few Mamba layers."""
    return llama_like(rng, without_rope, **{**SIZES, "mamba_d_conv": rng.choice([3, 4]), **more})  # type: ignore[arg-type]  # pyright: ignore


def without_rope(rope_parameters: object, **sizes: Any) -> PreTrainedConfig:  # noqa: ANN401
    """A config of a class that has no positions."""
    return JambaConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, mamba_proj_bias=True),
    "experts": partial(draw, tie_word_embeddings=False, expert_layer_period=1, expert_layer_offset=0),
}

CASE = ParityCase(family="jamba", configs=CONFIGS)
