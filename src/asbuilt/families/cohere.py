"""The cohere family: attention and gated feed-forward side by side on one LayerNorm without bias, logits scaled.

Command R (Cohere 2024, the model card of c4ai-command-r-v01). Rotary positions turn adjacent numbers of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, LayerNorm, Model

FAMILY = "cohere"
HEADS = ("CohereForCausalLM",)
# of transformers' CohereConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
STEMS = {"parallel.norm": "input_layernorm"}
STEMS |= {f"parallel.body.attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
STEMS |= {f"parallel.body.ffn.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}


def build(dimensions: Dimensions, *, eps: float = 1e-5, bias: bool = False, logit_scale: float = 0.0625) -> Model:
    """Returns the model of these dimensions, pairs of adjacent numbers turning; `bias` is the attention's."""
    norm = LayerNorm(d=dimensions.d_model, eps=eps, bias=False)
    turned = replace(dimensions, rotary=replace(dimensions.rotary, pairing="adjacent"))
    block = shared.side_by_side(turned.attention(bias=bias, output_bias=bias), turned.gated(), norm)
    return turned.model((block,) * turned.n_layers, norm, logit_scale=logit_scale)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    # in published configs; transformers reads neither of the two
    reader.irrelevant("model_max_length", "the context of long texts; max_position_embeddings is the one that is read")
    reader.irrelevant("pretraining_tp", "only slices the same products")
    reader.only("use_qk_norm", False, None, reason="norms with weights of each head's own are not read in this family")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    eps = reader.number("layer_norm_eps", default=1e-5, most=1.0)
    bias = reader.flag("attention_bias", default=False)
    logit_scale = reader.number("logit_scale", default=0.0625)
    reader.finish()
    spec = build(dimensions, eps=eps, bias=bias, logit_scale=logit_scale)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parallel_parts(spec, FAMILY, GatedMLP)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "layer_norm_eps": float(shared.final_norm(spec, FAMILY, LayerNorm).eps),
        "attention_bias": attention.bias,
        "logit_scale": 1.0 if spec.language_head is None else float(spec.language_head.scale),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, STEMS, FAMILY)
