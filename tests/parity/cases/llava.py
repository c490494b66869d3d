"""llava: CLIP's tower read below its last layer, its class token left out or kept; SigLIP's; Pixtral's, of any size."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import WINDOW
from drawn import draw as text
from harness import Draw, Inputs, ParityCase, Trace
from seeing import Seeing
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    SiglipVisionConfig,
)

from asbuilt.nn.model import Model
from asbuilt.spec import GridVision, VisionLanguageModel
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel
from cases import mistral3
from cases.vit import ACTIVATIONS
from cases.vit import tower as clip


class EitherTower(Seeing):
    """Images of one size, or of any as mistral3's tower reads them."""

    any_size = mistral3.Seeing()

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns what the tower of this text reads."""
        assert isinstance(spec, VisionLanguageModel)
        found = isinstance(spec.vision, GridVision)
        return self.any_size.inputs(rng, spec) if found else super().inputs(rng, spec)

    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The stream and the logits, with images and without."""
        return self.any_size.theirs(model, inputs) if "squares" in inputs else super().theirs(model, inputs)

    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        sees = self.any_size if "squares" in inputs else super()
        return sees.ours(model, inputs, kernel)


def around(rng: Random, inner: Any, tower: Any, **more: object) -> LlavaConfig:  # noqa: ANN401  # of two families each
    """A config of a tower and a text; `more` overrides."""
    return LlavaConfig(
        text_config=inner,
        vision_config=tower,
        image_token_index=rng.randrange(inner.vocab_size),
        projector_hidden_act=rng.choice(ACTIVATIONS),
        tie_word_embeddings=inner.tie_word_embeddings,
        **more,  # type: ignore[arg-type]  # pyright: ignore
    )


def draw(rng: Random, **more: object) -> LlavaConfig:
    """A config of CLIP's tower before a llama; `more` overrides."""
    return around(rng, text(rng, LlamaConfig), CLIPVisionConfig(**clip(rng, num_hidden_layers=3)), **more)


def siglip(rng: Random, **more: object) -> LlavaConfig:
    """A config of SigLIP's tower, of two layers, before a qwen2; `more` overrides."""
    inner = text(rng, Qwen2Config, use_sliding_window=False)
    tower = SiglipVisionConfig(**clip(rng), vision_use_head=False)
    return around(rng, inner, tower, vision_feature_select_strategy="full", **more)


def pixtral(rng: Random, **more: object) -> LlavaConfig:
    """A config of Pixtral's tower, of two layers, before a mistral with a window; `more` overrides."""
    inner = text(rng, MistralConfig, sliding_window=WINDOW)
    every: dict[str, object] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return around(rng, inner, mistral3.tower(rng, n_layers=2), **every, **more)


CONFIGS: dict[str, Draw] = {
    "below": partial(draw, vision_feature_layer=-2, multimodal_projector_bias=True),
    "full": partial(
        draw, vision_feature_layer=2, vision_feature_select_strategy="full", multimodal_projector_bias=False
    ),
    "siglip": partial(siglip, vision_feature_layer=-1),
    "pixtral": partial(pixtral, multimodal_projector_bias=True),
}
CASE = ParityCase(
    family="llava",
    configs=CONFIGS,
    kind=EitherTower(),
    idle=("vision.tower.blocks.2.", "vision.tower.norm"),  # above the layer that is read
    inert_weights={
        f"vision.tower.blocks.{i}.attention.body.k.bias": "adds the same number to every score of a query"
        for i in range(3)
    },
    inert_fields=mistral3.COSTS,
)
