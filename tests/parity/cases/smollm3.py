"""smollm3: layers without positions told in each way, with windows and without, biases or none."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import WINDOW, common, draw
from harness import Draw, ParityCase
from transformers import SmolLM3Config

three = partial(draw, kind=SmolLM3Config, num_hidden_layers=3)
two: dict[str, Any] = {"no_rope_layer_interval": 2}  # so that the second layer has no positions
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Draw] = common(SmolLM3Config, **two)
CONFIGS |= {
    "usual": partial(draw, kind=SmolLM3Config, num_hidden_layers=4),
    "listed": partial(three, no_rope_layers=[0, 1, 0]),
    "all_turned": partial(three, no_rope_layers=[1, 1, 1]),
    "biased": partial(draw, kind=SmolLM3Config, attention_bias=True, mlp_bias=True, **two),
    "windows": partial(three, use_sliding_window=True, sliding_window=WINDOW, **two),
    "layer_types": partial(three, use_sliding_window=True, sliding_window=WINDOW, layer_types=TYPES, **two),
    "unused_window": partial(three, use_sliding_window=False, sliding_window=WINDOW, **two),
}

CASE = ParityCase(
    family="smollm3",
    configs=CONFIGS,
    inert_weights={"blocks.1.attention.body.k.bias": "without positions it adds the same to every score of a query"},
)
