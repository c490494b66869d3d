"""mt5: its own defaults, and a head that is never scaled."""

from __future__ import annotations

from functools import partial

from harness import ParityCase
from transformers import MT5Config
from translating import TRANSLATING

from cases.t5 import gated, plain

CONFIGS = {"gated": partial(gated, kind=MT5Config), "plain": partial(plain, kind=MT5Config)}
CASE = ParityCase(family="mt5", kind=TRANSLATING, configs=CONFIGS)
