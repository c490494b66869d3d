"""mbart: norms before, and a norm of the embedding."""

from __future__ import annotations

from harness import ParityCase
from transformers import MBartConfig
from translating import TRANSLATING

from cases.bart import INERT, both

CASE = ParityCase(family="mbart", kind=TRANSLATING, configs=both(MBartConfig), inert_weights=INERT)
