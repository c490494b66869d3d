"""The first deepseek family: llama's attention, fine-grained and shared experts after some dense layers.

Dai et al. 2024 (DeepSeekMoE, arXiv 2401.06066). transformers has no such class; the published code came with the model.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Only, Optional, but
from asbuilt.families.shared.names import EXPERTS, ROUTER, SHARED_EXPERTS, STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes, whole_width

SEVERAL = (lambda values: values["top_k"] > 1 or not values["renormalise"], "false where a token takes one expert")
FAMILY = replace(
    llama.FAMILY,
    name="deepseek",
    heads=("DeepseekForCausalLM",),
    keys=(  # defaults as in the published DeepseekConfig; the numbers of experts have none
        *but(
            sizes(n_vocab=102400, d_model=4096, d_ff=11008, n_layers=30, n_heads=32, n_kv_heads=32, context=2048),
            d_ff=experts.dense,
        ),
        whole_width("what the published code takes"),
        experts.routed(
            Only("scoring_func", "softmax", reason="this family scores by softmax"),
            *experts.counts("n_routed_experts"),
            replace(experts.renormalise(), must=SEVERAL),
            eps=experts.EPS,
        ),
        *but(
            experts.fine_grained(d_expert=1407, n_shared=0, n_dense=0),
            n_shared=Optional("n_shared_experts", "n_shared", at=experts.shared_of),
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        Only("moe_layer_freq", 1, reason="every layer after the dense ones has experts"),
    ),
    names=Names(stems=STEMS | SHARED_EXPERTS | ROUTER, experts=EXPERTS),
)
