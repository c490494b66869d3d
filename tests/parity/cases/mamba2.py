"""mamba2: few and many groups, biases, tied and not, chunks shorter than the text."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import Draw, ParityCase
from transformers import Mamba2Config, PreTrainedConfig

from cases.mamba import OfStack
from cases.mamba import draw as of_stack


def draw(rng: Random, **more: object) -> PreTrainedConfig:
    """A config with twice as many channels as the stream is wide."""
    groups = rng.choice([1, 2, 3])
    sizes = {"num_heads": 2 * groups, "n_groups": groups, "head_dim": 6, "hidden_size": 6 * groups, "chunk_size": 16}
    return of_stack(rng, Mamba2Config, **sizes, **more)


CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True),
    "untied": partial(draw, tie_word_embeddings=False, use_bias=True),
}

CASE = ParityCase(family="mamba2", configs=CONFIGS, kind=OfStack(), attentions=("eager",))
