"""olmo2: norms after each branch and over all heads together, biases or none."""

from __future__ import annotations

from functools import partial

from drawn import common, draw
from harness import Draw, ParityCase
from transformers import Olmo2Config

CONFIGS: dict[str, Draw] = common(Olmo2Config)
CONFIGS["biased"] = partial(draw, kind=Olmo2Config, attention_bias=True)

CASE = ParityCase(family="olmo2", configs=CONFIGS)
