"""mpnet: distances beyond 8 tokens share buckets."""

from __future__ import annotations

from random import Random

from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import MPNetConfig, PreTrainedConfig

from cases import bert


def draw(rng: Random, name: str = "MPNetForMaskedLM", **more: object) -> PreTrainedConfig:
    """A config without types of tokens; `more` overrides."""
    config = bert.draw(rng, MPNetConfig, name, rows=TOKENS + 2, **more)
    vars(config).pop("type_vocab_size")
    return config


CASE = ParityCase(
    family="mpnet",
    kind=ENCODER,
    configs={
        "masked": draw,
        "pooled": lambda rng: draw(rng, "MPNetModel"),
        "texts": lambda rng: draw(rng, "MPNetForSequenceClassification"),
    },
    inert_weights=bert.INERT,
    attentions=("eager",),
)
