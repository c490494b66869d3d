"""The olmoe family: experts weighted by softmax over all of them, and norms over all heads' queries and keys together.

Muennighoff et al. 2024 (arXiv 2409.02060). The published 7B has experts 1024 wide; the class default is 2048.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import MixtureOfExperts, Model, RMSNorm, Router

FAMILY = "olmoe"
HEADS = ("OlmoeForCausalLM",)
# of transformers' OlmoeConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
STEMS = shared.NORM_STEMS | shared.ATTENTION_STEMS | shared.QK_NORM_STEMS | {"ffn.body.router": "mlp.gate"}
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}


def build(dimensions: Dimensions, router: Router, *, eps: float = 1e-5, bias: bool = False) -> Model:
    """Returns the model of these dimensions; `bias` is of q, k, v and o."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    d_head = dimensions.rotary.d_rotary
    attention = dimensions.attention(
        bias=bias,
        output_bias=bias,
        q_norm=RMSNorm(d=dimensions.n_heads * d_head, eps=eps),
        k_norm=RMSNorm(d=dimensions.n_kv_heads * d_head, eps=eps),
    )
    block = shared.pre_norm(attention, experts.mixture(dimensions, router), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.only("clip_qkv", None, reason="clipped queries, keys and values are not read")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    whole = dimensions.n_heads * dimensions.rotary.d_rotary == dimensions.d_model
    reader.require("head_dim", whole, "hidden_size / num_attention_heads: the query norm is hidden_size wide")
    router = experts.read_router(
        reader,
        dimensions.d_model,
        dimensions.n_layers,
        ("num_experts", "num_local_experts"),
        n_experts=64,
        top_k=8,
        renormalise=reader.flag("norm_topk_prob", default=False),
    )
    eps = reader.number("rms_norm_eps", default=1e-5, most=1.0)
    bias = reader.flag("attention_bias", default=False)
    reader.finish()
    spec = build(dimensions, router, eps=eps, bias=bias)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, MixtureOfExperts)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "num_experts": ffn.n_experts,
        "num_experts_per_tok": ffn.top_k,
        "norm_topk_prob": ffn.router.renormalise,
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": attention.bias,
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors, as on the hub: one matrix for each expert."""
    return experts.table(spec, STEMS, EXPERTS, FAMILY)
