"""The mixtral family: mistral's blocks with experts, of which each token takes some, weighted by softmax over those.

Jiang et al. 2024 (arXiv 2401.04088).
"""

from __future__ import annotations

from asbuilt.families.shared import experts
from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.sizes import CarriedWidth, sizes, window
from asbuilt.spec import Model, RMSNorm, Router

# w1 is the gate, w3 what is gated, w2 leads back
EXPERTS = {
    part: f"block_sparse_moe.experts.{{}}.{name}.weight"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


def build(dimensions: Dimensions, router: Router, *, eps: float = 1e-5, window: int | None = None) -> Model:
    """Returns the model of these dimensions; every layer has the window and as many experts."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    block = pre_norm(dimensions.attention(window=window), experts.mixture(dimensions, router), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


FAMILY = Family(
    name="mixtral",
    heads=("MixtralForCausalLM",),
    keys=(  # defaults as in transformers' MixtralConfig
        sizes(
            n_vocab=32000,
            d_model=4096,
            d_ff=14336,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            context=131072,
            theta=1e6,
            but={"d_head": CarriedWidth()},
        ),
        experts.TRAINING,
        experts.routed(*experts.counts("num_local_experts", "num_experts", n_experts=8, top_k=2), renormalise=True),
        eps("rms_norm_eps", 1e-5),
        window(None),
        Only("attention_bias", False, None, reason="this family has no biases"),
    ),
    build=build,
    names=Names(stems=NORMS | ATTENTION | {"ffn.body.router": "block_sparse_moe.gate"}, experts=EXPERTS),
)
