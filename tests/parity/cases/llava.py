"""llava: a tower read below its last layer, its class token left out or kept, projectors with and without biases."""

from __future__ import annotations

from functools import partial
from random import Random

from drawn import draw as text
from harness import Draw, ParityCase
from seeing import Seeing
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from cases.vit import ACTIVATIONS, tower


def draw(rng: Random, **more: object) -> LlavaConfig:
    """A config of a small tower and a small text; `more` overrides."""
    inner = text(rng, LlamaConfig)
    return LlavaConfig(
        text_config=inner,
        vision_config=CLIPVisionConfig(**tower(rng)),
        image_token_index=rng.randrange(inner.vocab_size),
        projector_hidden_act=rng.choice(ACTIVATIONS),
        tie_word_embeddings=inner.tie_word_embeddings,
        **more,  # type: ignore[arg-type]  # pyright: ignore
    )


CONFIGS: dict[str, Draw] = {
    "below": partial(draw, vision_feature_layer=-2, multimodal_projector_bias=True),
    "full": partial(
        draw, vision_feature_layer=1, vision_feature_select_strategy="full", multimodal_projector_bias=False
    ),
}
CASE = ParityCase(
    family="llava",
    configs=CONFIGS,
    kind=Seeing(),
    idle=("vision.tower.blocks.1.", "vision.tower.norm"),  # above the layer that is read
    inert_weights={"k.bias": "adds the same number to every score of a query, which softmax does not see"},
)
