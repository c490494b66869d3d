"""zamba2: transformers of one use and of several, one or two in turns, RoPE or none, biases, groups, all adapters."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import draw as llama_like
from harness import EXACT, Draw, ParityCase
from transformers import PreTrainedConfig, Zamba2Config

SIZES: dict[str, Any] = {
    "n_mamba_heads": 16,
    "mamba_expand": 4,  # wide groups: the norm within Mamba-2 has a small epsilon, and so brings rounding to light
    "mamba_d_state": 6,
    "adapter_rank": 5,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # a limit that transformers has when it reads a prompt, and not when it decodes
    "tie_word_embeddings": True,  # else transformers ties the transformers of different layers neither
}


def draw(rng: Random, layers: str = "mhh", **more: object) -> PreTrainedConfig:
    """A llama-like config, its layers one letter each: h for those with a transformer."""
    kinds = ["hybrid" if letter == "h" else "linear_attention" for letter in layers]
    groups, kernel = rng.choice([1, 2]), rng.choice([3, 4])
    # heads are twice as wide as in other families: with a larger epsilon their scores spread as little
    own = {"rms_norm_eps": rng.uniform(0.8, 1.0), **SIZES, "mamba_ngroups": groups, "mamba_d_conv": kernel}
    own |= {"num_hidden_layers": len(kinds), "layers_block_type": kinds}
    return llama_like(rng, Zamba2Config, **{**own, **more})


WHOLE_HEADS: dict[str, int] = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}

CONFIGS: dict[str, Draw] = {
    "one_use": partial(draw, layers="hm", use_mem_rope=True),
    "twice": partial(draw, layers="mhh", use_mem_rope=True, add_bias_linear=True),
    "in_turns": partial(draw, layers="hhh", num_mem_blocks=2),
    "as_many_as_uses": partial(draw, layers="hh", num_mem_blocks=2),
    "adapted": partial(draw, layers="hh", use_shared_attention_adapter=True, **WHOLE_HEADS),
}

# Scores of two maps' sum spread widely, and a scan multiplies five numbers: rounding either side in float32 moved a
# position by up to 9e-5 (tests/parity/test_zamba2_rounding.py has float32).
CASE = ParityCase(family="zamba2", configs=CONFIGS, kind=EXACT)
