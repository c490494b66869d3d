"""dinov2: learned factors on branches, plain or SwiGLU, with and without biases and the token of masked patches."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import Draw, Inputs, ParityCase, Trace
from images import Images
from transformers import Dinov2Config, PreTrainedModel

from cases.vit import tower


class Unpooled(Images):
    """Models that call the stream's first token pooled, which is compared with the stream."""

    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """What is compared, but for that token."""
        return {path: found for path, found in super().theirs(model, inputs).items() if path != "pooler"}


def draw(rng: Random, **more: object) -> Dinov2Config:
    """A config of a tower; `more` overrides."""
    sizes: dict[str, Any] = {"mlp_ratio": rng.randrange(2, 5), **tower(rng), **more}
    del sizes["intermediate_size"]
    return Dinov2Config(**sizes)


CONFIGS: dict[str, Draw] = {
    "plain": draw,
    "swiglu": partial(draw, use_swiglu_ffn=True, qkv_bias=False, use_mask_token=False),
}

CASE = ParityCase(
    family="dinov2",
    configs=CONFIGS,
    kind=Unpooled("Dinov2Model"),
    inert_weights={
        "k.bias": "adds the same number to every score of a query, which softmax does not see",
        "mask_token": "stands for patches that training masks",
    },
)
