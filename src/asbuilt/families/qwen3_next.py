"""The qwen3_next family: three gated delta nets to one gated attention, and many small experts beside a shared one.

Qwen Team 2025 (Qwen3-Next, its blog post). Norms are 1 + their weight, but those of delta nets; a delta net's inputs
are stored as two tensors, by key head.
"""

from __future__ import annotations

from asbuilt.families.shared import delta_nets, experts, predictors
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Size, but
from asbuilt.families.shared.names import Fused
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes

FAMILY = Family(
    name="qwen3_next",
    heads=("Qwen3NextForCausalLM",),
    keys=(  # defaults as in transformers' Qwen3NextConfig
        *but(
            sizes(
                n_vocab=151936,
                d_model=2048,
                d_ff=5632,
                n_layers=48,
                n_heads=16,
                n_kv_heads=2,
                d_head=256,
                context=32768,
            ),
            rotary={"partial": 0.25},
            d_ff=experts.dense,
            activation=None,
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        delta_nets.LayerKinds(),
        *delta_nets.SIZES,
        *delta_nets.REDUNDANT,
        predictors.One("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=512, top_k=10), experts.renormalise(True)
        ),
        experts.expert_width(512),
        Size("shared_expert_intermediate_size", "d_shared", default=512, at="mixture.shared.d_ff"),
        experts.DenseLayers(),
    ),
    build=delta_nets.build,
    names=delta_nets.names(
        {},
        {
            "linear_attn.in_proj_qkvz": Fused(
                stems=delta_nets.inward("q", "k", "v", "gate"), join=delta_nets.by_key_head
            ),
            "linear_attn.in_proj_ba": Fused(stems=delta_nets.inward("beta", "decay"), join=delta_nets.by_key_head),
        },
    ),
)
