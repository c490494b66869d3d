"""falcon_h1: attention beside Mamba-2, every factor, with and without a norm after the gate or before it."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import draw as llama_like
from drawn import wide
from harness import Draw, ParityCase
from transformers import FalconH1Config, PreTrainedConfig

SIZES: dict[str, Any] = {
    "hidden_act": "silu",
    "mamba_n_heads": 8,
    "mamba_d_ssm": 40,
    "mamba_d_state": 6,
    "mamba_chunk_size": 16,
}
FACTORS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "key_multiplier",
    "embedding_multiplier",
    "lm_head_multiplier",
)


def draw(rng: Random, made: Any = llama_like, **more: object) -> PreTrainedConfig:  # noqa: ANN401
    """A llama-like config with Mamba-2 beside attention, all factors from 0.5 to 1.5."""
    few = lambda count: [rng.uniform(0.5, 1.5) for _ in range(count)]  # noqa: E731
    factors: dict[str, Any] = dict(zip(FACTORS, few(len(FACTORS)), strict=True))
    factors |= {"mlp_multipliers": few(2), "ssm_multipliers": few(5)}
    groups, kernel = rng.choice([1, 2, 4]), rng.choice([3, 4])
    own = {**SIZES, **factors, "mamba_n_groups": groups, "mamba_d_conv": kernel}
    return made(rng, FalconH1Config, **{**own, **more})


CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, mamba_proj_bias=True),
    "norm_after_gate": partial(draw, tie_word_embeddings=False, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "gate_after_norm": partial(
        draw, mamba_rms_norm=True, attention_bias=True, mlp_bias=True, mamba_conv_bias=False, projectors_bias=True
    ),
    "wide_no_factors": partial(
        draw, made=wide, mamba_d_ssm=None, mlp_multipliers=None, ssm_multipliers=None, **dict.fromkeys(FACTORS, 1.0)
    ),
}

CASE = ParityCase(family="falcon_h1", configs=CONFIGS)
