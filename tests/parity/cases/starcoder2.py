"""starcoder2: biases everywhere or nowhere, one window for all layers or none."""

from __future__ import annotations

from functools import partial

from drawn import WINDOW, common, draw
from harness import Draw, ParityCase
from transformers import Starcoder2Config

CONFIGS: dict[str, Draw] = common(Starcoder2Config, eps="norm_epsilon", sliding_window=WINDOW)
CONFIGS["bare"] = partial(draw, kind=Starcoder2Config, eps="norm_epsilon", use_bias=False)

CASE = ParityCase(family="starcoder2", configs=CONFIGS)
