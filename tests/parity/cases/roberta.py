"""roberta: bert with other padding tokens, and so other first positions."""

from __future__ import annotations

from random import Random

from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import PreTrainedConfig, RobertaConfig

from cases import bert


def draw(
    rng: Random, name: str = "RobertaForMaskedLM", kind: type[PreTrainedConfig] = RobertaConfig
) -> PreTrainedConfig:
    """A config of any padding token."""
    padding = rng.choice([0, 1, 4])
    return bert.draw(rng, kind, name, rows=TOKENS + padding + 1, pad_token_id=padding)


CASE = ParityCase(
    family="roberta",
    kind=ENCODER,
    configs={
        "masked": draw,
        "pooled": lambda rng: draw(rng, "RobertaModel"),
        "texts": lambda rng: draw(rng, "RobertaForSequenceClassification"),
    },
    inert_weights=bert.INERT,
)
