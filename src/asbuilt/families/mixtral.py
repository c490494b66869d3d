"""The mixtral family: mistral's blocks with experts, of which each token takes some, weighted by softmax over those.

Jiang et al. 2024 (arXiv 2401.04088).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import Attention, MixtureOfExperts, Model, RMSNorm, Router

FAMILY = "mixtral"
HEADS = ("MixtralForCausalLM",)
# of transformers' MixtralConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 4096 * 32,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
STEMS = shared.NORM_STEMS | shared.ATTENTION_STEMS | {"ffn.body.router": "block_sparse_moe.gate"}
# w1 is the gate, w3 what is gated, w2 leads back
EXPERTS = {
    part: f"block_sparse_moe.experts.{{}}.{name}.weight"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


def build(dimensions: Dimensions, router: Router, *, eps: float = 1e-5, window: int | None = None) -> Model:
    """Returns the model of these dimensions; every layer has the window and as many experts."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    ffn = experts.mixture(dimensions, router)
    block = shared.pre_norm(dimensions.attention(window=window), ffn, norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.only("attention_bias", False, None, reason="this family has no biases")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    reader.irrelevant("head_dim", "carried so that a null, which means hidden_size / num_attention_heads, stays one")
    router = experts.read_router(
        reader,
        dimensions.d_model,
        dimensions.n_layers,
        ("num_local_experts", "num_experts"),
        n_experts=8,
        top_k=2,
        renormalise=True,
    )
    eps = reader.number("rms_norm_eps", default=1e-5, most=1.0)
    window = shared.read_window(reader, None)
    reader.finish()
    spec = build(dimensions, router, eps=eps, window=window)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, MixtureOfExperts)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        **_write_width(attention, carried),
        "num_local_experts": ffn.n_experts,
        "num_experts_per_tok": ffn.top_k,
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "sliding_window": attention.window,
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _write_width(attention: Attention, carried: dict[str, Any]) -> dict[str, Any]:
    """Returns `head_dim`; null where that was carried and still means the same."""
    null = "head_dim" in carried and carried["head_dim"] is None and attention.d_query == attention.d_model
    return {"head_dim": None if null else attention.d_head}


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors, as on the hub: one matrix for each expert."""
    return experts.table(spec, STEMS, EXPERTS, FAMILY)
