"""The qwen3_5_text family: qwen3_next's layers with a dense feed-forward, inputs of delta nets stored one by one.

Qwen Team 2026 (Qwen3.5, its blog post). The text of qwen3_5, which has a vision tower beside it.
"""

from __future__ import annotations

from asbuilt.families.shared import delta_nets, predictors
from asbuilt.families.shared.ends import decoder_ends
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import but
from asbuilt.families.shared.names import Fused
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes

NAMES = delta_nets.names(
    {
        f"delta_net.body.{name}": f"linear_attn.in_proj_{stored}"
        for name, stored in (("gate", "z"), ("beta", "b"), ("decay", "a"))
    },
    {"linear_attn.in_proj_qkv": Fused(stems=delta_nets.inward("q", "k", "v"))},
)

FAMILY = Family(
    name="qwen3_5_text",
    heads=("Qwen3_5ForCausalLM",),
    ends=lambda name: decoder_ends("Qwen3_5Text"),
    keys=(  # defaults as in transformers' Qwen3_5TextConfig
        *but(
            sizes(
                n_vocab=248320,
                d_model=4096,
                d_ff=12288,
                n_layers=32,
                n_heads=16,
                n_kv_heads=4,
                d_head=256,
                context=32768,
            ),
            rotary=delta_nets.RopeOfTexts(partial=0.25),
            activation=None,
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        delta_nets.LayerKinds(),
        *delta_nets.SIZES,
        *delta_nets.REDUNDANT,
        predictors.One("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    ),
    build=delta_nets.build,
    names=NAMES,
)
