"""The glm_moe_dsa family: deepseek_v32 with wider heads, some of whose layers share the last choice of keys.

GLM-5 and later. The RoPE of the indexer pairs adjacent numbers, as that of the main attention does.
"""

from __future__ import annotations

from functools import partial

from asbuilt.families.shared import experts, indexers, latent, predictors
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Fixed, Irrelevant, defaults
from asbuilt.families.shared.sizes import sizes

ROUTER = experts.corrected(
    Fixed("scoring_func", "sigmoid", reason="this family scores by sigmoid"),
    Fixed("topk_method", "noaux_tc", reason="this family chooses by corrected scores, within groups"),
    *experts.counts("n_routed_experts", "num_local_experts", n_experts=256, top_k=8),
    experts.Groups(n_group=1, topk_group=1, score="two_best"),
    scale=2.5,
)
WIDTHS = {"d_nope": 192, "d_value": 256, "eps": 1e-5}

FAMILY = Family(
    name="glm_moe_dsa",
    heads=("GlmMoeDsaForCausalLM",),
    keys=indexers.keys(  # defaults as in transformers' GlmMoeDsaConfig
        defaults(
            latent.keys(
                sizes(n_vocab=154880, d_model=6144, d_ff=12288, n_layers=78, n_heads=64, n_kv_heads=64, context=202752),
                ROUTER,
                predictors.Count(),
                d_expert=2048,
                n_shared=1,
                n_dense=3,
            ),
            **WIDTHS,
        ),
        indexers.SharedLayers(),
        Irrelevant("of prediction layers, which no pass uses", "index_share_for_mtp_iteration"),
        Irrelevant("how routing is computed: in float32 or wider", "moe_router_dtype"),
        heads=32,
        q_rank=2048,
        pairing="adjacent",
    ),
    build=partial(indexers.build, pairing="adjacent"),
    names=indexers.NAMES,
)
