"""olmo: norms without weights, biases or none."""

from __future__ import annotations

from functools import partial

from drawn import common, draw
from harness import Draw, ParityCase
from transformers import OlmoConfig

CONFIGS: dict[str, Draw] = common(OlmoConfig, eps=None)
CONFIGS["biased"] = partial(draw, kind=OlmoConfig, eps=None, attention_bias=True)

CASE = ParityCase(family="olmo", configs=CONFIGS)
