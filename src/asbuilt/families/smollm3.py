"""The smollm3 family: llama's blocks, of which some, usually every fourth, have no positions.

Bakouch et al. 2025 (the SmolLM3 report); layers without positions: Yang et al. 2025 (arXiv 2501.18795).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading, is_whole
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, Model, RMSNorm

FAMILY = "smollm3"
HEADS = ("SmolLM3ForCausalLM",)
# of transformers' SmolLM3Config
DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 2000000.0,
}


def build(
    dimensions: Dimensions,
    *,
    turned: tuple[bool, ...],
    eps: float = 1e-6,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    windows: tuple[int | None, ...] = (),
) -> Model:
    """Returns the model of these dimensions; `turned` tells which layers have positions, `windows` each one's."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    ffn = dimensions.gated(mlp_bias)
    attentions = [
        dimensions.attention(turned=turns, bias=attention_bias, output_bias=attention_bias, window=window)
        for turns, window in zip(turned, windows or (None,) * len(turned), strict=True)
    ]
    return dimensions.model(tuple(shared.pre_norm(attention, ffn, norm) for attention in attentions), norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault.

    Windows, where they are used at all, are those of the layers without positions unless `layer_types` says.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.irrelevant("max_window_layers", "left by the converter; no code of this family reads it")
    reader.irrelevant("pretraining_tp", "only slices the same products")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    eps = reader.number("rms_norm_eps", default=1e-6, most=1.0)
    attention_bias, mlp_bias = (reader.flag(key, default=False) for key in ("attention_bias", "mlp_bias"))
    turned = _turned(reader, dimensions.n_layers)
    windows = shared.layer_windows(reader, shared.read_window(reader, None), [not turns for turns in turned])
    reader.finish()
    spec = build(dimensions, turned=turned, eps=eps, attention_bias=attention_bias, mlp_bias=mlp_bias, windows=windows)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _turned(reader: ConfigReader, n_layers: int) -> tuple[bool, ...]:
    """Returns which layers have positions: `no_rope_layers` has a 1 for those; else all but each interval's last."""
    interval = reader.size("no_rope_layer_interval", default=4)
    reader.overruled("no_rope_layer_interval", "no_rope_layers")
    reader.irrelevant("no_rope_layer_interval", "told by no_rope_layers as it is written")
    if not reader.given("no_rope_layers"):
        return tuple((i + 1) % interval != 0 for i in range(n_layers))
    said = reader.config["no_rope_layers"]
    ok = isinstance(said, list) and len(said) >= n_layers and all(is_whole(x) and x in (0, 1) for x in said)
    reader.require("no_rope_layers", ok, f"a list of at least {n_layers} of 1 (rotary positions) and 0 (none)")
    return tuple(x == 1 for x in said[:n_layers])


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, GatedMLP)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
        "no_rope_layers": [int(layer.positions is not None) for layer in shared.attentions(spec)],
        **shared.write_windows(spec, carried),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, shared.STEMS, FAMILY)
