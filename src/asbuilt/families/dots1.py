"""The dots1 family: qwen3's attention, and deepseek_v3's experts after the first layers.

dots.llm1: rednote-hilab 2025 (arXiv 2506.05767).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Only, but
from asbuilt.families.shared.names import CORRECTED_ROUTER, EXPERTS, QK_NORMS, SHARED_EXPERTS, STEMS, Names
from asbuilt.families.shared.reader import REQUIRED
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, LaterWindows, sizes

FAMILY = replace(
    llama.FAMILY,
    name="dots1",
    heads=("Dots1ForCausalLM",),
    keys=(  # defaults as in transformers' Dots1Config, which counts no experts unless said
        *but(
            sizes(n_vocab=152064, d_model=4608, d_ff=10944, n_layers=62, n_heads=32, n_kv_heads=32, context=2048),
            d_ff=experts.dense,
        ),
        experts.routed(
            Only("scoring_func", "sigmoid", "noaux_tc", reason="this family scores by sigmoid"),
            Only("topk_method", "noaux_tc", reason="this family chooses by corrected scores"),
            *experts.counts("n_routed_experts", "num_local_experts"),
            experts.Groups(n_group=1, topk_group=1, score="two_best"),
            experts.renormalise(),
            experts.routed_scale(1.0),
            scoring="sigmoid",
            correction=True,
            eps=experts.EPS,
        ),
        *but(experts.fine_grained(d_expert=1408, n_shared=1, n_dense=0), n_shared={"default": REQUIRED}),
        Only("moe_layer_freq", 1, reason="every layer after the dense ones has experts"),
        RMS_EPS,
        ATTENTION_BIAS,
        LaterWindows(first=62, switch=""),
    ),
    build=partial(llama.build, head_norms=True),
    names=Names(stems=STEMS | QK_NORMS | CORRECTED_ROUTER | SHARED_EXPERTS, experts=EXPERTS),
)
