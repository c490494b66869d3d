"""The lfm2_moe family: lfm2 with experts after the first dense layers.

Liquid AI 2025 (arXiv 2511.23404). Experts are chosen by sigmoid scores, corrected by a buffer unless said otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import lfm2
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Flag, Size, but, eps
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.sizes import DerivedHeadWidth, sizes
from asbuilt.spec import GatedMLP

EPS = 1e-6  # added to the sum of the chosen scores


def _n_dense(parts: Parts) -> int:
    """Returns how many layers stand before the first with experts."""
    bodies = [block.branches[-1].body for block in parts.model.blocks]
    return next((i for i, body in enumerate(bodies) if not isinstance(body, GatedMLP)), len(bodies))


STEMS = lfm2.STEMS | {
    "ffn.body.router": "feed_forward.gate",
    "ffn.body.router.correction": "feed_forward.expert_bias",
}
EXPERTS = {
    part: f"feed_forward.experts.{{}}.{name}.weight" for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
FAMILY = replace(
    lfm2.FAMILY,
    name="lfm2_moe",
    heads=("Lfm2MoeForCausalLM",),
    keys=(  # defaults as in transformers' Lfm2MoeConfig
        *but(
            sizes(
                n_vocab=65536,
                d_model=2048,
                d_ff=7168,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                context=128000,
                theta=1e6,
            ),
            d_head=DerivedHeadWidth(even=True),
            d_ff=experts.dense,
            activation=None,
            tied=lfm2.TIED,
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=32, top_k=4),
            experts.renormalise(True),
            experts.routed_scale(1.0),
            Flag("use_expert_bias", "correction", default=True, at="mixture.router.correction"),
            scoring="sigmoid",
            eps=EPS,
        ),
        experts.expert_width(1792),
        Size("num_dense_layers", "n_dense", default=2, least=0, at=_n_dense),
        eps("norm_eps", 1e-5),
        lfm2.Kinds(),
        lfm2.KERNEL,
        lfm2.CONV_BIAS,
        lfm2.ACTIVATION,
    ),
    names=Names(stems=STEMS, outside=lfm2.NORM, fused=lfm2.FUSED, experts=EXPERTS),
)
