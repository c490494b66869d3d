"""The smollm3 family: llama's blocks, of which some, usually every fourth, have no positions.

Bakouch et al. 2025 (the SmolLM3 report); layers without positions: Yang et al. 2025 (arXiv 2501.18795).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared.key import Irrelevant, but
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, RMS_EPS, LayerWindows, RopeLayers, sizes

FAMILY = replace(
    llama.FAMILY,
    name="smollm3",
    heads=("SmolLM3ForCausalLM",),
    padding=128004,
    keys=(  # defaults as in transformers' SmolLM3Config
        *but(
            sizes(n_vocab=128256, d_model=2048, d_ff=11008, n_layers=36, n_heads=16, n_kv_heads=4, context=32768),
            rotary={"theta": 2e6},
            tied={"default": True},
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        MLP_BIAS,
        RopeLayers(),
        LayerWindows(  # of the layers without positions, unless `layer_types` says
            default=None,
            usual=lambda _, values: [not rope for rope in values["rope_layers"]],
            switch="use_sliding_window",
        ),
        Irrelevant("left by the converter; no code of this family reads it", "max_window_layers"),
    ),
)
