"""The solar_open family: glm4_moe with experts in every layer, RoPE on whole heads and no norm of queries and keys.

Upstage 2026, the model card and published code of Solar Open 100B.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Irrelevant, Only, Size, but, eps
from asbuilt.families.shared.names import CORRECTED_ROUTER, EXPERTS, SHARED_EXPERTS, STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, HeadWidth, sizes

FAMILY = replace(
    llama.FAMILY,
    name="solar_open",
    heads=("SolarOpenForCausalLM",),
    keys=(  # defaults as in transformers' SolarOpenConfig
        *but(
            sizes(n_vocab=196608, d_model=4096, d_ff=0, n_layers=48, n_heads=64, n_kv_heads=8, context=131072),
            d_head=HeadWidth(128),
            rotary={"theta": 1e6, "partial": 1.0},
            d_ff=None,
        ),
        experts.corrected(
            *experts.counts("n_routed_experts", "num_local_experts", n_experts=128, top_k=8),
            experts.Groups(n_group=1, topk_group=1, score="two_best"),
            scale=1.0,
        ),
        experts.expert_width(1280),
        Size("n_shared_experts", "n_shared", default=1, at=lambda parts: experts.shared_of(parts) or 0),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Only("use_qk_norm", False, reason="queries and keys are not normed in this family"),
        Only("first_k_dense_replace", 0, reason="every layer has experts"),
        Irrelevant("of layers without experts, and there are none", "intermediate_size"),
        Irrelevant("prediction layers, which are not built", "num_nextn_predict_layers"),
    ),
    build=partial(llama.build, output_bias=False),
    names=Names(stems=STEMS | CORRECTED_ROUTER | SHARED_EXPERTS, experts=EXPERTS),
)
