"""gemma3: images that see both ways, across windows shorter than they are, patches averaged with a rest and without."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import Draw, ParityCase
from seeing import Seeing
from transformers import Gemma3Config, SiglipVisionConfig

from cases.gemma3_text import draw as text
from cases.vit import tower


def draw(rng: Random, side: int, tokens: int, *, beyond: bool = False, **more: object) -> Gemma3Config:
    """A config of a tower of `side` patches on a side, of which each image makes `tokens` tokens.

    The placeholder is a token of the text's, or one `beyond` them all.
    """
    tied = rng.random() < 0.5
    inner = text(rng, tie_word_embeddings=tied, sliding_window=6, final_logit_softcapping=None)
    sizes: dict[str, Any] = tower(rng) | {"patch_size": 2, "image_size": 2 * side}
    return Gemma3Config(
        text_config=inner,
        vision_config=SiglipVisionConfig(**sizes, vision_use_head=False),
        image_token_index=inner.vocab_size if beyond else rng.randrange(inner.vocab_size),
        mm_tokens_per_image=tokens,
        tie_word_embeddings=tied,
        **more,  # type: ignore[arg-type]  # pyright: ignore
    )


CONFIGS: dict[str, Draw] = {
    "whole": partial(draw, side=6, tokens=9),
    "rest": partial(draw, side=7, tokens=9),
    "beyond": partial(draw, side=6, tokens=9, beyond=True),
}

UNSEEN = "adds the same number to every score of a query, which softmax does not see"

CASE = ParityCase(
    family="gemma3",
    configs=CONFIGS,
    kind=Seeing(),
    inert_weights={f"tower.blocks.{i}.attention.body.k.bias": UNSEEN for i in range(2)},  # a text's is normed
)
