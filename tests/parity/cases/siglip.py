"""siglip: both towers, the logit of each image with each text; texts as wide as images, and projected to them."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import TOKENS, Draw, ParityCase
from transformers import SiglipConfig, SiglipModel

from cases.clip import Pairs
from cases.vit import tower

# each unlike all others by more than rounding, in the image's vector alone too: gelu and its tanh form are not
ACTIVATIONS = ("silu", "relu", "quick_gelu")
SIDES = ("num_channels", "image_size", "patch_size")


def draw(rng: Random, projected: bool) -> SiglipConfig:
    """A config of two towers; unlike in width if texts are `projected`."""
    images, sizes = tower(rng, hidden_act=rng.choice(ACTIVATIONS)), tower(rng)
    text = {key: value for key, value in sizes.items() if key not in SIDES}
    text |= {"vocab_size": rng.randrange(10, 20), "max_position_embeddings": TOKENS}
    same = {key: images[key] for key in ("hidden_size", "num_attention_heads")}
    text |= {"projection_size": images["hidden_size"]} if projected else same
    return SiglipConfig(text_config=text, vision_config=images)


CONFIGS: dict[str, Draw] = {"plain": partial(draw, projected=False), "projected": partial(draw, projected=True)}

CASE = ParityCase(
    family="siglip",
    configs=CONFIGS,
    kind=Pairs(SiglipModel),
    inert_weights={"k.bias": "adds the same number to every score of a query, which softmax does not see"},
)
