"""ministral3: queries that grow with each original context, under YaRN and without; one window or none."""

from __future__ import annotations

from functools import partial
from random import Random

from drawn import D_HEAD, ORIGINAL, WINDOW, YARN, draw
from harness import Draw, ParityCase
from transformers import Ministral3Config, PreTrainedConfig


def tempered(rng: Random, *, kind: str, beta: float, **more: object) -> PreTrainedConfig:
    """A RoPE object that says by how much queries grow, and after how many tokens."""
    rope = {"rope_theta": rng.uniform(50, 200), "llama_4_scaling_beta": beta}
    rope |= YARN | {"factor": rng.uniform(2, 6)} if kind == "yarn" else {"rope_type": kind}
    rope["original_max_position_embeddings"] = ORIGINAL
    return draw(rng, Ministral3Config, "rms_norm_eps", head_dim=D_HEAD, rope_parameters=rope, **more)


CONFIGS: dict[str, Draw] = {
    "yarn_tied": partial(tempered, kind="yarn", beta=0.8, tie_word_embeddings=True, sliding_window=None),
    "wide_window": partial(tempered, kind="default", beta=0.4, sliding_window=WINDOW, hidden_size=72),
    "steady": partial(tempered, kind="yarn", beta=0.0, sliding_window=None),
}

CASE = ParityCase(family="ministral3", configs=CONFIGS)
