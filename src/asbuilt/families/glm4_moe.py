"""The glm4_moe family: attention that turns half of each head, and experts after the first layers, one of them shared.

GLM-4.5 Team 2025 (arXiv 2508.06471). Experts are chosen as in DeepSeek-V3: by sigmoid and a correction, within groups
where there are several. Biases, where there are any, are those of queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families.shared import experts, predictors
from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, eps
from asbuilt.families.shared.names import EXPERTS, QK_NORMS, SHARED_EXPERTS, STEMS, Names
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import Model, RMSNorm, Router

EPS = 1e-20  # of the sum that chosen scores are divided by
ROUTED = {"ffn.body.router": "mlp.gate", "ffn.body.router.correction": f"mlp.gate.{experts.CORRECTION}"}
NAMES = Names(stems=STEMS | QK_NORMS | ROUTED | SHARED_EXPERTS, experts=EXPERTS)


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
    first, later = (pre_norm(attention, ffn, norm) for ffn in (dense, mixture))
    spec = dimensions.model((first,) * n_dense + (later,) * (dimensions.n_layers - n_dense), norm)
    return predictors.with_predictors(spec, later, norm, n_predictors)


FAMILY = Family(
    name="glm4_moe",
    heads=("Glm4MoeForCausalLM",),
    keys=(  # defaults as in transformers' Glm4MoeConfig
        sizes(
            n_vocab=151552,
            d_model=4096,
            d_ff=10944,
            n_layers=46,
            n_heads=96,
            n_kv_heads=8,
            context=131072,
            but={"rotary": Rope(partial=0.5), "d_ff": experts.dense_width(10944)},
        ),
        experts.routed(
            experts.GROUPED_TRAINING,
            *experts.counts("n_routed_experts", "num_local_experts", n_experts=128, top_k=8),
            experts.Groups(n_group=1, topk_group=1, score="two_best"),
            experts.renormalise(True),
            experts.scale(1.0),
            scoring="sigmoid",
            correction=True,
            eps=EPS,
        ),
        experts.expert_width(1408),
        experts.shared_experts(1),
        experts.first_dense(1),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Flag("use_qk_norm", "head_norms", default=False),
        predictors.Count(),
    ),
    build=build,
    names=lambda spec, family: predictors.table(spec, lambda longer: NAMES(longer, family)),
)
