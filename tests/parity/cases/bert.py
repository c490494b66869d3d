"""bert: the masked language model's head, the bare encoder with and without its pooler, labels of texts and tokens."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import ACTIVATIONS
from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import BertConfig, PreTrainedConfig

INERT = {"k.bias": "adds the same number to every score of a query, which softmax does not see"}


def draw(
    rng: Random,
    kind: type[PreTrainedConfig] = BertConfig,
    name: str = "BertForMaskedLM",
    rows: int = TOKENS,
    **more: object,
) -> PreTrainedConfig:
    """A config of the class whose position table has `rows`; `more` overrides."""
    heads = rng.choice([2, 3, 5])
    sizes: dict[str, Any] = {
        "architectures": [name],
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * rng.choice([6, 10, 14]),
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "hidden_act": rng.choice(ACTIVATIONS),
        "max_position_embeddings": rows,
        "type_vocab_size": rng.choice([2, 3]),
        "layer_norm_eps": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        **more,
    }
    return kind(**sizes)


CASE = ParityCase(
    family="bert",
    kind=ENCODER,
    configs={
        "masked": draw,
        "pooled": partial(draw, name="BertModel"),
        "bare": partial(draw, name="BertModel", add_pooling_layer=False),
        "texts": partial(draw, name="BertForSequenceClassification", num_labels=3),
        "tokens": partial(draw, name="BertForTokenClassification", num_labels=4),
        "answers": partial(draw, name="BertForQuestionAnswering"),
    },
    inert_weights=INERT,
)
