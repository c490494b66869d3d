"""lfm2: convolutions beside attention, listed in either way, with biases or without, and the width in its four ways."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import draw
from harness import Draw, ParityCase
from transformers import Lfm2Config, PreTrainedConfig

CONV, FULL = "conv", "full_attention"


def hybrid(rng: Random, kind: type[PreTrainedConfig] = Lfm2Config, **more: object) -> PreTrainedConfig:
    """Three layers, one of which has attention."""
    usual: dict[str, Any] = {"conv_L_cache": rng.randrange(2, 6), "hidden_act": "silu", "num_hidden_layers": 3}
    return draw(rng, kind, "norm_eps", **{"layer_types": [CONV, FULL, CONV], **usual, **more})


WIDTH = {"block_multiple_of": 7, "block_ffn_dim_multiplier": 1.3}
CONFIGS: dict[str, Draw] = {
    "rounded": partial(hybrid, **WIDTH),
    "own_width": partial(hybrid, conv_bias=True, block_auto_adjust_ff_dim=False),
    "listed": partial(hybrid, layer_types=None, full_attn_idxs=[1], block_multiple_of=1),
}

CASE = ParityCase(family="lfm2", configs=CONFIGS)
