"""nomic_bert: the masked language model's head, the trunk alone with scaled RoPE, labels of texts and tokens."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import ACTIVATIONS
from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import NomicBertConfig


def draw(rng: Random, name: str = "NomicBertForMaskedLM", **more: object) -> NomicBertConfig:
    """A config of the class; `more` overrides."""
    heads = rng.choice([2, 3, 5])
    sizes: dict[str, Any] = {
        "architectures": [name],
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * 16,
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "hidden_act": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "layer_norm_eps": rng.uniform(0.05, 0.2),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200)},
        **more,
    }
    return NomicBertConfig(**sizes)


CASE = ParityCase(
    family="nomic_bert",
    kind=ENCODER,
    configs={
        "masked": draw,
        "bare": partial(draw, name="NomicBertModel"),
        "texts": partial(draw, name="NomicBertForSequenceClassification", num_labels=3),
        "tokens": partial(draw, name="NomicBertForTokenClassification", num_labels=3),
    },
)
