"""qwen3: norms over each head's query and key, biases or none, and qwen2's windows."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, common, draw
from harness import Draw, ParityCase
from transformers import Qwen3Config

from cases.qwen2 import windows

CONFIGS: dict[str, Draw] = common(Qwen3Config, head_dim=D_HEAD) | windows(Qwen3Config)
CONFIGS["biased"] = partial(draw, kind=Qwen3Config, head_dim=D_HEAD, attention_bias=True)

CASE = ParityCase(family="qwen3", configs=CONFIGS)
