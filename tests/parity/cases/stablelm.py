"""stablelm: one norm for both branches or one each; a quarter of each head turned or all; biases or none."""

from __future__ import annotations

from functools import partial

from drawn import draw, yarn
from harness import Draw, ParityCase
from transformers import StableLmConfig

CONFIGS: dict[str, Draw] = {
    "sequential": partial(draw, kind=StableLmConfig, eps="layer_norm_eps", use_qkv_bias=True),
    "parallel": partial(
        yarn, kind=StableLmConfig, eps="layer_norm_eps", use_parallel_residual=True, partial_rotary_factor=1.0
    ),
    "norms": partial(draw, kind=StableLmConfig, eps="layer_norm_eps", qk_layernorm=True),
    "parallel_norms": partial(
        draw, kind=StableLmConfig, eps="layer_norm_eps", qk_layernorm=True, use_parallel_residual=True
    ),
}

CASE = ParityCase(family="stablelm", configs=CONFIGS)
