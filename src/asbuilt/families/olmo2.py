"""The olmo2 family: no norm before a branch but one after it, and an RMSNorm over all heads' queries and keys.

Walsh et al. 2025 (arXiv 2501.00656).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.olmo import DEFAULTS
from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import Block, Branch, GatedMLP, Model, RMSNorm

FAMILY = "olmo2"
HEADS = ("Olmo2ForCausalLM",)
POST_NORM_STEMS = {"attention.post_norm": "post_attention_layernorm", "ffn.post_norm": "post_feedforward_layernorm"}
STEMS = POST_NORM_STEMS | shared.ATTENTION_STEMS | shared.GATED_STEMS | shared.QK_NORM_STEMS


def build(dimensions: Dimensions, *, eps: float = 1e-5, bias: bool = False) -> Model:
    """Returns the model of these dimensions."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    d_head = dimensions.rotary.d_rotary
    attention = dimensions.attention(
        bias=bias,
        output_bias=bias,
        q_norm=RMSNorm(d=dimensions.n_heads * d_head, eps=eps),
        k_norm=RMSNorm(d=dimensions.n_kv_heads * d_head, eps=eps),
    )
    first = Branch(name="attention", body=attention, post_norm=norm)
    block = Block(branches=(first, Branch(name="ffn", body=dimensions.gated(), post_norm=norm)))
    return dimensions.model((block,) * dimensions.n_layers, norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    dimensions = shared.read_dimensions(reader, DEFAULTS)  # Olmo2Config has OlmoConfig's
    eps = reader.number("rms_norm_eps", default=1e-5, most=1.0)
    bias = reader.flag("attention_bias", default=False)
    reader.finish()
    spec = build(dimensions, eps=eps, bias=bias)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, GatedMLP)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": attention.bias,
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, STEMS, FAMILY)
