"""The minimax_m2 family: norms over the queries and keys of all heads, partial RoPE, corrected sigmoid routing.

MiniMax 2025, the model card and published code of MiniMax-M2. All layers have experts, and full attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama, mixtral
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Irrelevant, Only, but
from asbuilt.families.shared.names import QK_NORMS, Names
from asbuilt.families.shared.rotary import RopeOfWidth
from asbuilt.families.shared.sizes import RMS_EPS, HeadWidth, sizes

CORRECTION = {"ffn.body.router.correction": "block_sparse_moe.e_score_correction_bias"}

FAMILY = replace(
    llama.FAMILY,
    name="minimax_m2",
    heads=("MiniMaxM2ForCausalLM",),
    keys=(  # defaults as in transformers' MiniMaxM2Config
        *but(
            sizes(n_vocab=200064, d_model=3072, d_ff=1536, n_layers=62, n_heads=48, n_kv_heads=8, context=196608),
            d_head=HeadWidth(128),
            rotary=RopeOfWidth(theta=5e6),
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_local_experts", "num_experts", n_experts=256, top_k=8),
            Only("scoring_func", "sigmoid", reason="this family scores by sigmoid"),
            Only("use_routing_bias", True, reason="scores of this family are always corrected for the choice"),
            scoring="sigmoid",
            correction=True,
            renormalise=True,
        ),
        RMS_EPS,
        Only("attn_type_list", lambda values: [1] * values["n_layers"], reason="all layers have full attention"),
        Only("use_qk_norm", True, reason="queries and keys are always normed in this family"),
        Only("qk_norm_type", "per_layer", reason="a norm of this family is over all heads"),
        Only("shared_intermediate_size", 0, None, reason="this family has no shared expert"),
        Only("sliding_window", None, reason="all layers have full attention"),
        Irrelevant("there is no shared expert", "shared_moe_mode"),
        Irrelevant(
            "published files leave prediction layers out", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"
        ),
        Irrelevant(
            "left by MiniMax-01, whose branches had factors; nothing reads it here",
            "mlp_intermediate_size",
            *(
                f"layernorm_{part}_{end}"
                for part in ("full_attention", "linear_attention", "mlp")
                for end in ("alpha", "beta")
            ),
        ),
    ),
    build=partial(llama.build, whole_norms=True),
    names=Names(stems=mixtral.STEMS | QK_NORMS | CORRECTION, experts=mixtral.EXPERTS),
)
