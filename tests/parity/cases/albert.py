"""albert: one set of weights for all layers, one for every group, or one for each layer."""

from __future__ import annotations

from functools import partial
from random import Random

from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import AlbertConfig, PreTrainedConfig

from cases import bert


def draw(rng: Random, name: str = "AlbertForMaskedLM", wide: bool = False, **more: object) -> PreTrainedConfig:
    """A config of the class, with narrow embeddings unless `wide`, as wide as the stream; `more` overrides."""
    config = bert.draw(rng, AlbertConfig, name, TOKENS, **{"num_hidden_layers": 3} | more)
    config.embedding_size = config.hidden_size if wide else rng.randrange(4, 9)
    return config


CASE = ParityCase(
    family="albert",
    kind=ENCODER,
    configs={
        "masked": draw,
        "groups": partial(draw, name="AlbertModel", num_hidden_groups=2),
        "apart": partial(draw, num_hidden_layers=2, num_hidden_groups=2, wide=True),
        "texts": partial(draw, name="AlbertForSequenceClassification", num_labels=3),
    },
    inert_weights=bert.INERT,
)
