"""The olmo3 family: olmo2 with windows in three of four layers, and a RoPE scaling that these do not have.

Olmo Team 2025, the model cards and published code of Olmo 3.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import olmo2
from asbuilt.families.olmo import SIZES
from asbuilt.families.shared.key import but
from asbuilt.families.shared.rotary import TwoRopes
from asbuilt.families.shared.sizes import ATTENTION_BIAS, LayerWindows, every_but_last

THETA = ("rope_theta", 500_000.0)  # one key for both kinds of layers

FAMILY = replace(
    olmo2.FAMILY,
    name="olmo3",
    heads=("Olmo3ForCausalLM",),
    padding=1,
    keys=(  # defaults as in transformers' Olmo3Config
        *but(SIZES, rotary=TwoRopes(THETA, THETA)),
        olmo2.EPS,
        ATTENTION_BIAS,
        LayerWindows(default=4096, usual=lambda _, values: every_but_last(values["n_layers"], 4), required=True),
    ),
)
