"""diffllama: pairs of heads with grouped keys and without.

The learned vectors make one number, which a hundredth of their spread may not move.
"""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, draw, wide
from harness import Draw, ParityCase
from transformers import DiffLlamaConfig

FOUR = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 4 * D_HEAD}
CONFIGS: dict[str, Draw] = {
    "grouped": partial(draw, kind=DiffLlamaConfig, **FOUR),
    "plain_heads": partial(draw, kind=DiffLlamaConfig, **FOUR | {"num_key_value_heads": 4}, attention_bias=True),
    "wide": partial(wide, kind=DiffLlamaConfig, num_attention_heads=8, num_key_value_heads=4),
}

CASE = ParityCase(family="diffllama", configs=CONFIGS, choosing=("differential",))
