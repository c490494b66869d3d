"""modernbert: local and global layers, every bias and none, either decoder, and the bare encoder."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import ACTIVATIONS, D_HEAD
from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import ModernBertConfig

BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "decoder_bias")


def draw(
    rng: Random, name: str = "ModernBertForMaskedLM", scaling: str = "default", biases: bool = False, **more: object
) -> ModernBertConfig:
    """A config whose windows are shorter than half the text; `more` overrides."""
    heads = rng.choice([2, 3, 5])
    factor = {} if scaling == "default" else {"factor": rng.uniform(2, 4)}
    rope = {
        kind: {"rope_type": scaling, "rope_theta": rng.uniform(50, 200), **factor}
        for kind in ("full_attention", "sliding_attention")
    }
    sizes: dict[str, Any] = {
        "architectures": [name],
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * D_HEAD,
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "hidden_activation": rng.choice(ACTIVATIONS),
        "classifier_activation": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "local_attention": rng.choice([6, 10, 20]),
        "layer_types": ["full_attention", *rng.sample(["full_attention", "sliding_attention"], 2)],
        "rope_parameters": rope,
        "norm_eps": rng.uniform(0.05, 0.2),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        **dict.fromkeys(BIASES, biases),
        **more,
    }
    return ModernBertConfig(**sizes)


CASE = ParityCase(
    family="modernbert",
    kind=ENCODER,
    configs={
        "plain": draw,
        "biases": partial(draw, biases=True, tie_word_embeddings=False),
        "texts": partial(
            draw, name="ModernBertForSequenceClassification", classifier_pooling="cls", classifier_bias=True
        ),
        "means": partial(draw, name="ModernBertForSequenceClassification", classifier_pooling="mean", num_labels=3),
        "bare": partial(draw, name="ModernBertModel", scaling="linear"),
    },
)
