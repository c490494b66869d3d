"""The deepseek_v32 family: deepseek_v3 whose layers attend only to the keys that an indexer chooses.

DeepSeek-AI 2025 (arXiv 2512.02556), section 2.1. The published code multiplies indexer queries and keys by a Hadamard
matrix, which changes no score, before it rounds them to fp8; here they are not rounded.
"""

from __future__ import annotations

from functools import partial

from asbuilt.families.shared import experts, indexers, latent, predictors
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
    name="deepseek_v32",
    heads=("DeepseekV32ForCausalLM",),
    keys=indexers.keys(  # defaults as in transformers' DeepseekV32Config
        latent.keys(
            sizes(n_vocab=129280, d_model=7168, d_ff=18432, n_layers=61, n_heads=128, n_kv_heads=128, context=163840),
            ROUTER,
            predictors.Count(),
            d_expert=2048,
            n_shared=1,
            n_dense=3,
        ),
        heads=64,
        q_rank=1536,
        pairing="halves",
    ),
    build=partial(indexers.build, pairing="halves"),
    names=indexers.NAMES,
)
