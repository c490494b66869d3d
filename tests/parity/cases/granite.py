"""granite: factors on embedding, scores, branches and logits, all of them or one; biases or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from drawn import D_HEAD, draw, wide, yarn
from harness import Draw, ParityCase
from transformers import GraniteConfig, PreTrainedConfig


def scaled(rng: Random, made: Callable[..., PreTrainedConfig] = draw, **more: object) -> PreTrainedConfig:
    """A config with all four factors; those of the embedding and the branches leave epsilons to be seen."""
    factors = {
        "embedding_multiplier": rng.uniform(0.5, 2.0),
        "attention_multiplier": rng.uniform(0.1, 0.2),
        "residual_multiplier": rng.uniform(0.3, 0.9),
        "logits_scaling": rng.randrange(20, 160) / 10,
    }
    return made(rng, GraniteConfig, **{**factors, **more})


CONFIGS: dict[str, Draw] = {
    "tied": partial(scaled, tie_word_embeddings=True),
    "untied_biased": partial(scaled, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "wide_usual_scale": partial(scaled, made=wide, attention_multiplier=D_HEAD**-0.5),
    "yarn_scores_only": partial(yarn, kind=GraniteConfig, attention_multiplier=0.15),
}

CASE = ParityCase(family="granite", configs=CONFIGS)
