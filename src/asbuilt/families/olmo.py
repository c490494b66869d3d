"""The olmo family: llama's blocks with a LayerNorm that has no weights.

Groeneveld et al. 2024 (arXiv 2402.00838).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, LayerNorm, Model

FAMILY = "olmo"
HEADS = ("OlmoForCausalLM",)
EPS = 1e-5  # no key says otherwise
# of transformers' OlmoConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def build(dimensions: Dimensions, *, bias: bool = False) -> Model:
    """Returns the model of these dimensions."""
    norm = LayerNorm(d=dimensions.d_model, eps=EPS, gain=False, bias=False)
    block = shared.pre_norm(dimensions.attention(bias=bias, output_bias=bias), dimensions.gated(), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.only("clip_qkv", None, reason="clipped queries, keys and values are not built")
    reader.irrelevant("rms_norm_eps", "this family has no RMSNorm, and its LayerNorm's epsilon is fixed")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    bias = reader.flag("attention_bias", default=False)
    reader.finish()
    return Reading(
        spec=build(dimensions, bias=bias),
        carried=reader.carried,
        dtype=dtype,
        family=FAMILY,
        defaults=reader.defaults,
        notes=reader.notes,
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, GatedMLP)
    written = {**shared.write_dimensions(spec, FAMILY, HEADS[0], ffn), "attention_bias": attention.bias}
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, shared.ATTENTION_STEMS | shared.GATED_STEMS, FAMILY)
