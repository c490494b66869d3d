"""The glm4_moe_lite family: deepseek_v3's latent attention and experts, with the kind of each layer listed.

GLM-4.7-Flash: Z.ai 2026, its model card and published code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asbuilt.families.shared import experts, latent, predictors
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Fixed, Size, but
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.sizes import sizes

ROUTER = experts.corrected(
    Fixed("scoring_func", "sigmoid", reason="this family scores by sigmoid"),
    Fixed("topk_method", "noaux_tc", reason="this family chooses by corrected scores, within groups"),
    *experts.counts("n_routed_experts", "num_local_experts", n_experts=64, top_k=4),
    experts.Groups(n_group=1, topk_group=1, score="two_best"),
    scale=1.8,
)


def _older(key: Size) -> Size:
    """Returns the key of the number of first dense layers as one that the newer list overrules."""
    said: Callable[[Parts], int] = lambda parts: parts.carried.get(key.key, key.found(parts))  # noqa: E731
    return replace(key, at=said, carried="mlp_layer_types, as it is written, says it")


FAMILY = Family(
    name="glm4_moe_lite",
    heads=("Glm4MoeLiteForCausalLM",),
    keys=but(  # defaults as in transformers' Glm4MoeLiteConfig
        latent.keys(
            sizes(n_vocab=154880, d_model=2048, d_ff=10240, n_layers=47, n_heads=20, n_kv_heads=20, context=202752),
            ROUTER,
            predictors.Count(),
            experts.LayerKinds(),
            d_expert=1536,
            n_shared=1,
            n_dense=1,
            interleave="rope_interleave",
        ),
        d_nope={"default": 192},
        d_value={"default": 256},
        q_rank={"default": 768},
        eps={"default": 1e-5},
        n_dense=_older,
    ),
    build=latent.build,
    names=latent.NAMES,
)
