"""vit: images that patches do not fill, with and without biases of queries, keys and values."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import Draw, ParityCase
from images import Images
from transformers import ViTConfig

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "quick_gelu")


def tower(rng: Random, **more: object) -> dict[str, Any]:
    """Sizes of a tower whose patches leave a rest of the image; `more` overrides."""
    heads, patch = rng.choice([2, 3]), rng.randrange(2, 5)
    return {
        "hidden_size": heads * rng.choice([6, 10]),
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_channels": rng.randrange(1, 4),
        "image_size": 3 * patch + rng.randrange(1, patch),
        "patch_size": patch,
        "hidden_act": rng.choice(ACTIVATIONS),
        "layer_norm_eps": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        **more,
    }


def draw(rng: Random, **more: object) -> ViTConfig:
    """A config of a classifier; `more` overrides."""
    sizes: dict[str, Any] = {**tower(rng), "num_labels": rng.randrange(3, 9), **more}
    return ViTConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "biased": partial(draw, qkv_bias=True),
    "unbiased": partial(draw, qkv_bias=False),
    "pooled": partial(draw, architectures=["ViTModel"]),
}

CASE = ParityCase(
    family="vit",
    configs=CONFIGS,
    kind=Images("ViTForImageClassification"),
    inert_weights={"k.bias": "adds the same number to every score of a query, which softmax does not see"},
)
