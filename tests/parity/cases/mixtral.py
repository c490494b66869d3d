"""mixtral: two experts of five and other shares of them, a window for all layers or none."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, WINDOW, draw, wide, yarn
from harness import Draw, ParityCase
from transformers import MixtralConfig

USUAL: dict[str, Any] = {"kind": MixtralConfig, "num_local_experts": 5, "num_experts_per_tok": 2}
CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, sliding_window=WINDOW, **USUAL),
    "untied": partial(draw, tie_word_embeddings=False, **USUAL),
    "wide": partial(wide, **USUAL),
    "yarn": partial(yarn, head_dim=D_HEAD, **USUAL | {"num_experts_per_tok": 3}),
}

CASE = ParityCase(family="mixtral", configs=CONFIGS)
