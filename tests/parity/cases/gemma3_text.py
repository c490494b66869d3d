"""gemma3_text: normed heads, a rotation for windows and another, scaled or not, for the rest, in both spellings."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import Gemma3TextConfig

from cases.gemma import sizes
from cases.gemma2 import FULL, SLIDING, SMOOTH
from cases.llama import ROPE


def rope(rng: Random, kind: str = "default") -> dict[str, Any]:
    """A rotary object; the text is three times the original context of its scaling."""
    said = {"rope_type": kind, "rope_theta": rng.uniform(50, 200)}
    if kind == "default":
        return said
    said |= {"factor": rng.uniform(2, 6), **ROPE[kind]}
    return said if kind == "linear" else said | {"original_max_position_embeddings": TOKENS // 3}


def draw(rng: Random, full: str = "default", local: str = "default", **more: object) -> Gemma3TextConfig:
    """A config of one layer with a window and one without, and the scaling of each; `more` overrides."""
    drawn = {
        **sizes(rng),
        "hidden_activation": rng.choice(SMOOTH),
        "rope_parameters": {FULL: rope(rng, full), SLIDING: rope(rng, local)},
        "query_pre_attn_scalar": rng.randrange(60, 120),
        "sliding_window": rng.randrange(6, TOKENS // 3),
        "layer_types": [SLIDING, FULL],
        "final_logit_softcapping": rng.choice([None, rng.uniform(8, 20)]),
        **more,
    }
    return Gemma3TextConfig(**drawn)


def older(rng: Random) -> Gemma3TextConfig:
    """The keys of the first releases."""
    scaling = {"rope_type": "linear", "factor": rng.uniform(2, 6)}
    bases: dict[str, Any] = {"rope_theta": rng.uniform(50, 200), "rope_local_base_freq": rng.uniform(5, 40)}
    return draw(rng, rope_parameters=None, rope_scaling=scaling, layer_types=None, sliding_window_pattern=2, **bases)


CONFIGS: dict[str, Draw] = {
    "bare": partial(draw, attention_bias=False, tie_word_embeddings=True),
    "biased_untied": partial(draw, attention_bias=True, tie_word_embeddings=False),
    "capped": partial(draw, final_logit_softcapping=12.0),
    "older": older,
    "listed": partial(draw, layer_types=[FULL, SLIDING]),
    "local_scaled": partial(draw, local="linear"),
    "linear": partial(draw, full="linear"),
    "yarn": partial(draw, full="yarn"),
    "llama3": partial(draw, full="llama3"),
}

CASE = ParityCase(family="gemma3_text", configs=CONFIGS)
