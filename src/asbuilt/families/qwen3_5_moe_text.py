"""The qwen3_5_moe_text family: qwen3_5_text with experts in all layers, beside a gated shared one.

Qwen Team 2026 (Qwen3.5, its blog post). The text of qwen3_5_moe, which has a vision tower beside it.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import qwen3_5_text
from asbuilt.families.shared import delta_nets, experts, predictors
from asbuilt.families.shared.ends import decoder_ends
from asbuilt.families.shared.key import Irrelevant, Only, Size, but
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes

FAMILY = replace(
    qwen3_5_text.FAMILY,
    name="qwen3_5_moe_text",
    heads=("Qwen3_5MoeForCausalLM",),
    ends=lambda name: decoder_ends("Qwen3_5MoeText"),
    keys=(  # defaults as in transformers' Qwen3_5MoeTextConfig
        *but(
            sizes(
                n_vocab=248320,
                d_model=2048,
                d_ff=1,
                n_layers=40,
                n_heads=16,
                n_kv_heads=2,
                d_head=256,
                context=32768,
            ),
            rotary=delta_nets.RopeOfTexts(partial=0.25),
            activation=None,
            d_ff=None,
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        delta_nets.LayerKinds(),
        *delta_nets.SIZES,
        *delta_nets.REDUNDANT,
        predictors.One("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=256, top_k=8),
            Only("norm_topk_prob", True, reason="scores of chosen experts are always divided by their sum"),
            renormalise=True,
        ),
        experts.expert_width(512),
        Size("shared_expert_intermediate_size", "d_shared", default=512, at="mixture.shared.d_ff"),
        Irrelevant("every layer has experts", "intermediate_size"),
        Only("decoder_sparse_step", 1, reason="every layer has experts"),
        Only("mlp_only_layers", [], None, reason="every layer has experts"),
    ),
)
