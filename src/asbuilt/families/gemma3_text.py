"""The gemma3_text family: gemma2 with normed heads instead of soft-capped scores, another RoPE on layers with windows.

Gemma Team 2025 (arXiv 2503.19786); the language model alone, as `Gemma3ForCausalLM` stores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from asbuilt.families import gemma
from asbuilt.families.gemma2 import ACTIVATION, OLDER_SIZE, SANDWICH, SCALE, cap
from asbuilt.families.shared.ends import decoder_ends
from asbuilt.families.shared.key import Only, Values
from asbuilt.families.shared.names import QK_NORMS, Names
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import KINDS, TwoRopes
from asbuilt.families.shared.sizes import FULL, SLIDING, HeadWidth, LayerWindows, every_but_last, sizes

SCALINGS = {kind: KINDS[kind] for kind in ("default", "linear", "yarn", "llama3")}


def _by_pattern(reader: ConfigReader, values: Values) -> Sequence[bool]:
    """Returns which layers the older `sliding_window_pattern` gives a window; `layer_types` may only agree."""
    key = "sliding_window_pattern"
    windowed = every_but_last(values["n_layers"], reader.size(key, default=6))
    if reader.given(key) and reader.given("layer_types"):
        types = [SLIDING if one else FULL for one in windowed]
        reader.require(key, reader.config["layer_types"] == types, "in agreement with layer_types")
    reader.overruled(key, "layer_types")
    for one in (key, f"_{key}"):
        reader.irrelevant(one, "layer_types, as it is written, says it")
    return windowed


FAMILY = replace(
    gemma.FAMILY,
    name="gemma3_text",
    heads=("Gemma3ForCausalLM",),
    ends=lambda name: decoder_ends("Gemma3Text"),
    padding=0,
    keys=(  # defaults as in transformers' Gemma3TextConfig
        *gemma.keys(
            sizes(n_vocab=262208, d_model=2304, d_ff=9216, n_layers=26, n_heads=8, n_kv_heads=4, context=131072),
            d_head=HeadWidth(256),
            activation=ACTIVATION,
            rotary=TwoRopes(("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0), kinds=SCALINGS),
        ),
        LayerWindows(default=4096, usual=_by_pattern, required=True),
        OLDER_SIZE,
        SCALE,
        Only("attn_logit_softcapping", None, reason="heads are normed here instead, and transformers never caps"),
        cap("final_logit_softcapping", "logit_softcap", None),
    ),
    build=partial(gemma.build, sandwich=True, head_norms=True),
    names=Names(stems=SANDWICH | QK_NORMS),
)
