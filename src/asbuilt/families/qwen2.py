"""The qwen2 family: llama's blocks with biases on q, k and v, and windows on the layers from some number on.

Qwen 1.5, 2 and 2.5 publish under `model_type: qwen2`. Yang et al. 2024 (arXiv 2407.10671, 2412.15115).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only, Values
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import RMS_EPS, DualChunks, LayerWindows, sizes
from asbuilt.spec import Model, RMSNorm


def build(dimensions: Dimensions, *, eps: float = 1e-6, windows: tuple[int | None, ...] = ()) -> Model:
    """Returns the model of these dimensions; `windows` has one for each layer, or is empty where none has any."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    ffn = dimensions.gated()
    attentions = [dimensions.attention(bias=True, window=w) for w in windows or (None,) * dimensions.n_layers]
    return dimensions.model(tuple(pre_norm(attention, ffn, norm) for attention in attentions), norm)


def _from_a_layer_on(reader: ConfigReader, values: Values) -> list[bool]:
    first = reader.size("max_window_layers", default=28, least=0)
    reader.irrelevant("max_window_layers", "told by layer_types as it is written")
    reader.overruled("max_window_layers", "layer_types")
    return [i >= first for i in range(values["dimensions"].n_layers)]


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


SIZES = sizes(n_vocab=151936, d_model=4096, d_ff=22016, n_layers=32, n_heads=32, n_kv_heads=32, context=32768)
WINDOWS = _LaterWindows(default=4096, usual=_from_a_layer_on)

FAMILY = Family(
    name="qwen2",
    heads=("Qwen2ForCausalLM",),
    keys=(  # defaults as in transformers' Qwen2Config
        SIZES,
        RMS_EPS,
        WINDOWS,
        DualChunks(),
        *(
            Only(key, True, reason="q, k and v have biases in this family, whatever a config says")
            for key in ("attention_bias", "qkv_bias")
        ),
        Only("mlp_bias", False, reason="the feed-forward part has no biases in this family"),
        Only("use_mrope", False, reason="positions of images are not read in this family"),
    ),
    build=build,
    names=Names(stems=STEMS),
)
