"""pixtral: the tower alone, on images that are no squares, where patches of several images stand in one row."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from harness import BATCH, Draw, Inputs, ParityCase, Trace
from images import Images
from transformers import PixtralVisionConfig, PreTrainedModel

from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import PatchEmbedding

SIDES = (3, 5)  # rows and columns of patches


class Rows(Images):
    """Towers of images of any size, all of one here, whose patches theirs has one image after the other."""

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns pixels (B, C, H, W)."""
        embedding, generator = spec.embedding, torch.Generator().manual_seed(rng.randrange(2**32))
        assert isinstance(embedding, PatchEmbedding)
        height, width = (embedding.patch_size * side for side in SIDES)
        return {"pixel_values": torch.randn(BATCH, embedding.channels, height, width, generator=generator)}

    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The stream before the blocks, after each, and what comes out, image by image."""
        found = super().theirs(model, inputs)
        return {path: x.unflatten(1, (BATCH, -1))[0] for path, x in found.items()}


def draw(rng: Random, **more: object) -> PixtralVisionConfig:
    """A config of a small tower; `more` overrides."""
    heads, patch = rng.choice([2, 3]), rng.randrange(2, 4)
    sizes: dict[str, Any] = {
        "hidden_size": heads * rng.choice([8, 12]),
        "intermediate_size": rng.randrange(20, 40),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_channels": rng.randrange(1, 4),
        "image_size": patch * rng.randrange(2, 6),
        "patch_size": patch,
        "hidden_act": rng.choice(["silu", "gelu", "relu"]),
        "rope_parameters": {"rope_type": "axial", "rope_theta": rng.uniform(5.0, 50.0)},
        **more,
    }
    return PixtralVisionConfig(**sizes)


CONFIGS: dict[str, Draw] = {"plain": draw, "gelu_new": partial(draw, hidden_act="gelu_new")}

CASE = ParityCase(
    family="pixtral",
    configs=CONFIGS,
    kind=Rows("PixtralVisionModel"),
    inert_fields={"embedding.image_size": "says of which images the costs are declared"},
)
