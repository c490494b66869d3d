"""The deepseek_v3 family: latent attention, corrected sigmoid routing within groups, multi-token prediction.

DeepSeek-AI 2024 (arXiv 2412.19437). Names on disk as on the hub, where weights are stored in fp8 with
a scale for each tile, as `quantization_config` says.
"""

from __future__ import annotations

from asbuilt.families.shared import experts, latent, predictors
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Fixed
from asbuilt.families.shared.sizes import sizes

ROUTER = experts.corrected(
    Fixed("scoring_func", "sigmoid", reason="this family scores by sigmoid"),
    Fixed("topk_method", "noaux_tc", reason="this family chooses by corrected scores, within groups"),
    *experts.counts("n_routed_experts", "num_local_experts", n_experts=256, top_k=8),
    experts.Groups(n_group=8, topk_group=4, score="two_best"),
    scale=2.5,
)

FAMILY = Family(
    name="deepseek_v3",
    heads=("DeepseekV3ForCausalLM",),
    keys=latent.keys(  # defaults as in transformers' DeepseekV3Config
        sizes(n_vocab=129280, d_model=7168, d_ff=18432, n_layers=61, n_heads=128, n_kv_heads=128, context=4096),
        ROUTER,
        predictors.Count(),
        d_expert=2048,
        n_shared=1,
        n_dense=3,
        interleave="rope_interleave",
    ),
    build=latent.build,
    names=latent.NAMES,
)
