"""electra: generator, discriminator, the trunk alone, labels of texts; embeddings narrower or wider than the stream."""

from __future__ import annotations

from functools import partial
from random import Random

from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import ElectraConfig, PreTrainedConfig

from cases import bert


def draw(rng: Random, name: str = "ElectraForMaskedLM", width: int | None = None, **more: object) -> PreTrainedConfig:
    """A config of the class, with embeddings of `width`, None for one that is not the stream's; `more` overrides."""
    config = bert.draw(rng, ElectraConfig, name, TOKENS, **more)
    config.embedding_size = width or config.hidden_size + rng.choice([-3, 4])
    return config


def alike(rng: Random) -> PreTrainedConfig:
    """A generator whose embeddings are as wide as the stream."""
    config = draw(rng)
    config.embedding_size = config.hidden_size
    return config


CASE = ParityCase(
    family="electra",
    kind=ENCODER,
    configs={
        "masked": draw,
        "alike": alike,
        "bare": partial(draw, name="ElectraModel"),
        "replaced": partial(draw, name="ElectraForPreTraining"),
        "texts": partial(draw, name="ElectraForSequenceClassification", num_labels=3),
    },
    inert_weights=bert.INERT,
)
