"""cohere: side by side on one norm, adjacent pairs turned, logits scaled; biases or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from drawn import draw, wide, yarn
from harness import Draw, ParityCase
from transformers import CohereConfig, PreTrainedConfig


def scaled(rng: Random, made: Callable[..., PreTrainedConfig], **more: object) -> PreTrainedConfig:
    """A config with a scale of the logits."""
    return made(rng, CohereConfig, "layer_norm_eps", logit_scale=rng.uniform(0.1, 0.9), **more)


CONFIGS: dict[str, Draw] = {
    "tied": partial(scaled, made=draw, tie_word_embeddings=True, attention_bias=False),
    "untied_biased": partial(scaled, made=draw, tie_word_embeddings=False, attention_bias=True),
    "norms": partial(scaled, made=draw, use_qk_norm=True),
    "wide": partial(scaled, made=wide),
    "yarn": partial(scaled, made=yarn),
}

CASE = ParityCase(family="cohere", configs=CONFIGS)
