"""dinov3_vit: registers and centres of patches; plain or gated, with and without each bias that the spec can say."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import Draw, ParityCase
from transformers import DINOv3ViTConfig

from cases.dinov2 import Unpooled
from cases.vit import tower


def draw(rng: Random, **more: object) -> DINOv3ViTConfig:
    """A config of a tower, whose RoPE turns by a few radians; `more` overrides."""
    sizes: dict[str, Any] = tower(rng)
    heads = sizes["num_attention_heads"]
    sizes |= {"hidden_size": heads * rng.choice([8, 12]), "rope_theta": rng.uniform(2.0, 9.0)}
    return DINOv3ViTConfig(**{**sizes, "num_register_tokens": rng.randrange(1, 4), **more})


CONFIGS: dict[str, Draw] = {
    "plain": draw,
    "gated": partial(draw, use_gated_mlp=True, key_bias=True, proj_bias=False, num_register_tokens=0),
    "unbiased": partial(draw, query_bias=False, value_bias=False, mlp_bias=False),
}

CASE = ParityCase(
    family="dinov3_vit",
    configs=CONFIGS,
    kind=Unpooled("DINOv3ViTModel"),
    inert_weights={"mask_token": "stands for patches that training masks"},
)
