"""distilbert: the masked language model's head, the trunk alone, labels of texts and tokens."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import ACTIVATIONS
from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import DistilBertConfig

from cases import bert


def draw(rng: Random, name: str = "DistilBertForMaskedLM", **more: object) -> DistilBertConfig:
    """A config of the class; `more` overrides."""
    heads = rng.choice([2, 3, 5])
    sizes: dict[str, Any] = {
        "architectures": [name],
        "vocab_size": rng.randrange(60, 100),
        "dim": heads * rng.choice([6, 10, 14]),
        "hidden_dim": rng.randrange(30, 60),
        "n_layers": 2,
        "n_heads": heads,
        "activation": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        **more,
    }
    return DistilBertConfig(**sizes)


CASE = ParityCase(
    family="distilbert",
    kind=ENCODER,
    configs={
        "masked": draw,
        "bare": partial(draw, name="DistilBertModel"),
        "texts": partial(draw, name="DistilBertForSequenceClassification", num_labels=3),
        "answers": partial(draw, name="DistilBertForQuestionAnswering"),
    },
    inert_weights=bert.INERT,
)
