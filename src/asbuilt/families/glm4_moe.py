"""The glm4_moe family: RoPE on half of each head, and experts after the first layers, one of them shared.

GLM-4.5 Team 2025 (arXiv 2508.06471). Experts are chosen as in DeepSeek-V3; biases are of queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared import experts, predictors
from asbuilt.families.shared.key import Flag, but, eps
from asbuilt.families.shared.names import CORRECTED_ROUTER, EXPERTS, QK_NORMS, SHARED_EXPERTS, STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes

FAMILY = replace(
    llama.FAMILY,
    name="glm4_moe",
    heads=("Glm4MoeForCausalLM",),
    keys=(  # defaults as in transformers' Glm4MoeConfig
        *but(
            sizes(n_vocab=151552, d_model=4096, d_ff=10944, n_layers=46, n_heads=96, n_kv_heads=8, context=131072),
            rotary={"partial": 0.5},
            d_ff=experts.dense,
        ),
        experts.corrected(
            *experts.counts("n_routed_experts", "num_local_experts", n_experts=128, top_k=8),
            experts.Groups(n_group=1, topk_group=1, score="two_best"),
            scale=1.0,
        ),
        *experts.fine_grained(d_expert=1408, n_shared=1, n_dense=1),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Flag("use_qk_norm", "head_norms", default=False),
        predictors.Count(),
    ),
    build=partial(llama.build, output_bias=False),
    names=predictors.named(Names(stems=STEMS | QK_NORMS | CORRECTED_ROUTER | SHARED_EXPERTS, experts=EXPERTS)),
)
