"""The qwen2 family: llama with biases on q, k and v, and windows on the layers from some number on.

Qwen 1.5, 2 and 2.5 publish under `model_type: qwen2`. Yang et al. 2024 (arXiv 2407.10671, 2412.15115).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared.key import Only, Values
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import RMS_EPS, DualChunks, LayerWindows, sizes


def _from_a_layer_on(reader: ConfigReader, values: Values) -> list[bool]:
    first = reader.size("max_window_layers", default=28, least=0)
    reader.irrelevant("max_window_layers", "layer_types, as it is written, says it")
    reader.overruled("max_window_layers", "layer_types")
    return [i >= first for i in range(values["n_layers"])]


class _LaterWindows(LayerWindows):
    """Windows of the layers from `max_window_layers` on, unless `layer_types` says."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        super().read(reader, values)
        if not any(values["windows"]):
            reader.defaults.pop("max_window_layers", None)

    def write(self, parts: Parts) -> dict[str, Any]:
        windowed = [i for i, attention in enumerate(parts.attentions) if attention.window is not None]
        first = min(windowed, default=parts.n_layers)
        return super().write(parts) | {"max_window_layers": parts.carried.get("max_window_layers", first)}


WINDOWS = _LaterWindows(default=4096, usual=_from_a_layer_on, switch="use_sliding_window")

FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    heads=("Qwen2ForCausalLM",),
    keys=(  # defaults as in transformers' Qwen2Config
        *sizes(n_vocab=151936, d_model=4096, d_ff=22016, n_layers=32, n_heads=32, n_kv_heads=32, context=32768),
        RMS_EPS,
        WINDOWS,
        DualChunks(),
        Only("attention_bias", True, reason="q, k and v have biases in this family, whatever a config says"),
        Only("qkv_bias", True, reason="q, k and v have biases in this family, whatever a config says"),
        Only("mlp_bias", False, reason="the feed-forward part has no biases in this family"),
        Only("use_mrope", False, reason="positions of images are not read in this family"),
    ),
    build=partial(llama.build, bias=True, output_bias=False),
)
