"""The qwen2 family: llama's blocks with biases on q, k and v, and windows on the layers from some number on.

Qwen 1.5, 2 and 2.5 publish under `model_type: qwen2`. Yang et al. 2024 (arXiv 2407.10671, 2412.15115).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, Model, RMSNorm

FAMILY = "qwen2"
HEADS = ("Qwen2ForCausalLM",)
# of transformers' Qwen2Config
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def build(dimensions: Dimensions, *, eps: float = 1e-6, windows: tuple[int | None, ...] = ()) -> Model:
    """Returns the model of these dimensions; `windows` has one for each layer, or is empty where none has any."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    ffn = dimensions.gated()
    attentions = [dimensions.attention(bias=True, window=w) for w in windows or (None,) * dimensions.n_layers]
    return dimensions.model(tuple(shared.pre_norm(attention, ffn, norm) for attention in attentions), norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    eps = reader.number("rms_norm_eps", default=1e-6, most=1.0)
    for key in ("attention_bias", "qkv_bias"):
        reader.only(key, True, reason="q, k and v have biases in this family, whatever a config says")
    reader.only("mlp_bias", False, reason="the feed-forward part has no biases in this family")
    reader.only("use_mrope", False, reason="positions of images are not read in this family")
    shared.read_chunked(reader)
    windows = read_windows(reader, dimensions.n_layers)
    reader.finish()
    spec = build(dimensions, eps=eps, windows=windows)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def read_windows(reader: ConfigReader, n_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window: the layers from `max_window_layers` on have one, unless `layer_types` says."""
    window = shared.read_window(reader, 4096)
    first = reader.size("max_window_layers", default=28, least=0)
    reader.irrelevant("max_window_layers", "told by layer_types as it is written")
    windows = shared.layer_windows(reader, window, [i >= first for i in range(n_layers)])
    reader.overruled("max_window_layers", "layer_types")
    if not any(windows):
        reader.defaults.pop("max_window_layers", None)  # counts for nothing
    return windows


def write_windows(spec: Model, carried: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that `read_windows` reads; `max_window_layers` as carried, or for readers older than 2025."""
    windowed = [i for i, attention in enumerate(shared.attentions(spec)) if attention.window is not None]
    first = min(windowed, default=spec.n_layers)
    return shared.write_windows(spec, carried) | {"max_window_layers": carried.get("max_window_layers", first)}


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    _, ffn = shared.first_parts(spec, FAMILY, GatedMLP)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        **write_windows(spec, carried),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, shared.STEMS, FAMILY)
