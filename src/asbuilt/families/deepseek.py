"""The deepseek family, the first one: llama's attention, fine-grained and shared experts after some dense layers.

Dai et al. 2024 (DeepSeekMoE, arXiv 2401.06066). transformers has no such class; the published code came with the model.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families.shared import experts
from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, Only, Optional
from asbuilt.families.shared.names import EXPERTS, SHARED_EXPERTS, STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes
from asbuilt.spec import Model, RMSNorm, Router

EPS = 1e-20  # of the sum that chosen scores are divided by


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
    first, later = (pre_norm(attention, ffn, norm) for ffn in (dense, mixture))
    return dimensions.model((first,) * n_dense + (later,) * (dimensions.n_layers - n_dense), norm)


FAMILY = Family(
    name="deepseek",
    heads=("DeepseekForCausalLM",),
    keys=(  # defaults as in the published DeepseekConfig; the numbers of experts have none
        sizes(
            n_vocab=102400,
            d_model=4096,
            d_ff=11008,
            n_layers=30,
            n_heads=32,
            n_kv_heads=32,
            context=2048,
            but={"d_ff": experts.dense_width(11008)},
        ),
        Check(
            "head_dim",
            (
                lambda values: values["dimensions"].d_query == values["dimensions"].d_model,
                "hidden_size / num_attention_heads, which is what the published code takes",
            ),
        ),
        experts.routed(
            Only("scoring_func", "softmax", reason="this family scores by softmax"),
            *experts.counts("n_routed_experts"),
            replace(
                experts.renormalise(),
                must=(
                    lambda values: values["top_k"] > 1 or not values["renormalise"],
                    "false where each token takes one expert",
                ),
            ),
            eps=EPS,
        ),
        experts.expert_width(1407),
        Optional("n_shared_experts", "n_shared", at=experts.n_shared),
        experts.first_dense(0),
        RMS_EPS,
        ATTENTION_BIAS,
        Irrelevant("training only", "output_router_logits", "aux_loss_alpha", "seq_aux"),
        Irrelevant("only slices the same products", "pretraining_tp"),
        Only("moe_layer_freq", 1, reason="every layer after the dense ones has experts"),
    ),
    build=build,
    names=Names(stems=STEMS | SHARED_EXPERTS | {"ffn.body.router": "mlp.gate"}, experts=EXPERTS),
)
