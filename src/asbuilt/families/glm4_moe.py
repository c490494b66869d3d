"""The glm4_moe family: attention that turns half of each head, and experts after the first layers, one of them shared.

GLM-4.5 Team 2025 (arXiv 2508.06471). Experts are chosen as in DeepSeek-V3: by sigmoid and a correction, within groups
where there are several. Biases, where there are any, are those of queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts, predictors
from asbuilt.families.shared.common import config_of, read_common
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import partial_factor
from asbuilt.families.shared.table import Table
from asbuilt.spec import Attention, GatedMLP, Model, RMSNorm, Rotary, Router

FAMILY = "glm4_moe"
HEADS = ("Glm4MoeForCausalLM",)
# of transformers' Glm4MoeConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
EPS = 1e-20  # of the sum that chosen scores are divided by
STEMS = shared.STEMS | shared.QK_NORM_STEMS | {"ffn.body.router": "mlp.gate"}
STEMS |= {"ffn.body.router.correction": f"mlp.gate.{experts.CORRECTION}"}
STEMS |= {f"ffn.body.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}


def usual_router(d_model: int, n_experts: int, top_k: int) -> Router:
    """Returns a router of this family to one group of experts."""
    return Router(
        d_model=d_model, n_experts=n_experts, top_k=top_k, scoring="sigmoid", renormalise=True, correction=True, eps=EPS
    )


def build(
    dimensions: Dimensions,
    router: Router,
    *,
    d_expert: int,
    n_shared: int = 1,
    n_dense: int = 1,
    eps: float = 1e-5,
    bias: bool = False,
    head_norms: bool = False,
    n_predictors: int = 0,
) -> Model:
    """Returns the model: the first `n_dense` layers without experts, `n_predictors` prediction layers with them."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    of_head = RMSNorm(d=dimensions.head_width, eps=eps) if head_norms else None
    attention = dimensions.attention(bias=bias, q_norm=of_head, k_norm=of_head)
    dense = dimensions.gated()
    mixture = replace(experts.mixture(dimensions, router, d_expert), shared=replace(dense, d_ff=n_shared * d_expert))
    first, later = (shared.pre_norm(attention, ffn, norm) for ffn in (dense, mixture))
    spec = dimensions.model((first,) * n_dense + (later,) * (dimensions.n_layers - n_dense), norm)
    return predictors.with_predictors(spec, later, norm, n_predictors)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    router = experts.read_grouped_router(
        reader,
        dimensions.d_model,
        dimensions.n_layers,
        DEFAULTS,
        scoring="sigmoid",
        score="two_best",
        correction=True,
        eps=EPS,
    )
    reader.irrelevant("intermediate_size", "of the dense layers, where there are any")
    spec = build(
        dimensions,
        router,
        d_expert=reader.size("moe_intermediate_size", default=1408),
        n_shared=reader.size("n_shared_experts", default=1),
        n_dense=experts.read_first_dense(reader, dimensions.n_layers, 1),
        eps=reader.number("rms_norm_eps", default=1e-5, most=1.0),
        bias=reader.flag("attention_bias", default=False),
        head_norms=reader.flag("use_qk_norm", default=False),
        n_predictors=predictors.read_count(reader),
    )
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    ffn = experts.first_mixture(spec, FAMILY)
    if ffn.shared is None or ffn.shared.d_ff % ffn.d_ff:
        raise shared.wrong_part(FAMILY, "blocks.0.ffn.body.shared", ffn.shared, GatedMLP)
    attention = shared.attentions(spec)[0] if shared.attentions(spec) else None
    dense = next((body for block in spec.blocks if isinstance(body := block.branches[-1].body, GatedMLP)), None)
    d_ff = carried.get("intermediate_size", DEFAULTS["intermediate_size"]) if dense is None else dense.d_ff
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], replace(ffn, d_ff=d_ff)),
        **_write_attention(attention),
        **experts.write_grouped_router(ffn.router, carried),
        "moe_intermediate_size": ffn.d_ff,
        "n_shared_experts": ffn.shared.d_ff // ffn.d_ff,
        "first_k_dense_replace": experts.first_dense(spec),
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        **predictors.write_count(spec, carried),
    }
    kept = {key: value for key, value in carried.items() if key != predictors.OTHER}
    config = config_of(written, kept, dtype)
    predictors.require_same_but_predictors(spec, read(config, spec.name).spec, FAMILY)
    return config


def _write_attention(attention: Attention | None) -> dict[str, Any]:
    if attention is None or not isinstance(attention.positions, Rotary):
        return {}
    return {
        "partial_rotary_factor": partial_factor(attention.positions.d_rotary, attention.d_head),
        "attention_bias": attention.bias,
        "use_qk_norm": attention.q_norm is not None,
    }


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors, as on the hub: one matrix for each expert."""
    return predictors.table(spec, lambda longer: experts.table(longer, STEMS, EXPERTS, FAMILY))
