"""mistral: one window for all layers or none."""

from __future__ import annotations

from functools import partial

from drawn import WINDOW, common, draw
from harness import Draw, ParityCase
from transformers import MistralConfig

CONFIGS: dict[str, Draw] = common(MistralConfig, sliding_window=WINDOW)
CONFIGS["no_window"] = partial(draw, kind=MistralConfig, sliding_window=None)

CASE = ParityCase(family="mistral", configs=CONFIGS)
