"""The deepseek family, the first one: llama's attention, fine-grained and shared experts after some dense layers.

Dai et al. 2024 (DeepSeekMoE, arXiv 2401.06066). transformers has no such class; the published code came with the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, MixtureOfExperts, Model, RMSNorm, Router

FAMILY = "deepseek"
HEADS = ("DeepseekForCausalLM",)
# of the published DeepseekConfig; the numbers of experts have none
DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
EPS = 1e-20  # of the sum that chosen scores are divided by
STEMS = shared.STEMS | {"ffn.body.router": "mlp.gate"}
STEMS |= {f"ffn.body.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}


def build(
    dimensions: Dimensions,
    router: Router,
    *,
    d_expert: int,
    n_shared: int | None,
    n_dense: int,
    eps: float = 1e-6,
    bias: bool = False,
) -> Model:
    """Returns the model of these dimensions, the first `n_dense` layers without experts; `bias` is of all attention."""
    norm, dense = RMSNorm(d=dimensions.d_model, eps=eps), dimensions.gated()
    attention = dimensions.attention(bias=bias, output_bias=bias)
    mixture = experts.mixture(dimensions, router, d_expert)
    if n_shared is not None:
        mixture = replace(mixture, shared=replace(dense, d_ff=n_shared * d_expert))
    first, later = (shared.pre_norm(attention, ffn, norm) for ffn in (dense, mixture))
    return dimensions.model((first,) * n_dense + (later,) * (dimensions.n_layers - n_dense), norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.irrelevant("pretraining_tp", "only slices the same products")
    reader.only("moe_layer_freq", 1, reason="every layer after the dense ones has experts")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    whole = dimensions.n_heads * dimensions.head_width == dimensions.d_model
    reader.require("head_dim", whole, "hidden_size / num_attention_heads, which is what the published code takes")
    reader.irrelevant("intermediate_size", "of the dense layers, where there are any")
    spec = build(
        dimensions,
        _read_router(reader, dimensions),
        d_expert=reader.size("moe_intermediate_size", default=1407),
        n_shared=reader.size("n_shared_experts") if reader.given("n_shared_experts") else None,
        n_dense=experts.read_first_dense(reader, dimensions.n_layers, 0),
        eps=reader.number("rms_norm_eps", default=1e-6, most=1.0),
        bias=reader.flag("attention_bias", default=False),
    )
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _read_router(reader: ConfigReader, dimensions: Dimensions) -> Router:
    for key in ("output_router_logits", "aux_loss_alpha", "seq_aux"):
        reader.irrelevant(key, "training only")
    reader.only("scoring_func", "softmax", reason="this family scores by softmax")
    n_experts = reader.size("n_routed_experts", most=experts.MOST_EXPERTS // dimensions.n_layers)
    top_k = reader.size("num_experts_per_tok")
    reader.require("num_experts_per_tok", top_k <= n_experts, f"at most the {n_experts} experts")
    renormalise = reader.flag("norm_topk_prob", default=False)
    reader.require("norm_topk_prob", top_k > 1 or not renormalise, "false where each token takes one expert")
    return Router(
        d_model=dimensions.d_model,
        n_experts=n_experts,
        top_k=top_k,
        renormalise=renormalise,
        eps=EPS if renormalise else 0.0,
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    ffn = experts.first_mixture(spec, FAMILY)
    layers = shared.attentions(spec)
    dense = next((body for block in spec.blocks if isinstance(body := block.branches[-1].body, GatedMLP)), None)
    d_ff = carried.get("intermediate_size", DEFAULTS["intermediate_size"]) if dense is None else dense.d_ff
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], replace(ffn, d_ff=d_ff)),
        "moe_intermediate_size": ffn.d_ff,
        "n_shared_experts": _n_shared(ffn),
        "first_k_dense_replace": experts.first_dense(spec),
        "n_routed_experts": ffn.n_experts,
        "num_experts_per_tok": ffn.top_k,
        "norm_topk_prob": ffn.router.renormalise,
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": bool(layers) and layers[0].bias,
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _n_shared(ffn: MixtureOfExperts) -> int | None:
    """Returns how many shared experts there are: they are stored as one, as wide as all of them."""
    if ffn.shared is None:
        return None
    if ffn.shared.d_ff % ffn.d_ff:
        raise shared.wrong_part(FAMILY, "blocks.0.ffn.body.shared", ffn.shared, GatedMLP)
    return ffn.shared.d_ff // ffn.d_ff


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors: one matrix for each routed expert."""
    return experts.table(spec, STEMS, EXPERTS, FAMILY)
