"""The mistral family: llama's blocks without biases, each layer with the same sliding window, or none with any.

Jiang et al. 2023 (arXiv 2310.06825).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, Model, RMSNorm

FAMILY = "mistral"
HEADS = ("MistralForCausalLM",)
# of transformers' MistralConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 4096 * 32,
    "tie_word_embeddings": False,
}


def build(dimensions: Dimensions, *, eps: float = 1e-6, window: int | None = None) -> Model:
    """Returns the model of these dimensions; every layer has the window."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    block = shared.pre_norm(dimensions.attention(window=window), dimensions.gated(), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; a missing window is the class's 4096, null is none.

    Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.only("attention_bias", False, None, reason="this family has no biases")
    reader.only("mlp_bias", False, None, reason="this family has no biases")
    reader.only("layer_types", None, reason="all layers of this family are alike")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    eps = reader.number("rms_norm_eps", default=1e-6, most=1.0)
    window = shared.read_window(reader, 4096)
    reader.finish()
    spec = build(dimensions, eps=eps, window=window)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, GatedMLP)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "sliding_window": attention.window,
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, shared.STEMS, FAMILY)
