"""The stablelm family: llama with LayerNorm, RoPE on a quarter of each head, and both branches of a block one or two.

Stability AI 2024 (Stable LM 2, arXiv 2402.17834).
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, parallel_block, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Only, but, eps
from asbuilt.families.shared.names import STEMS, Names, in_parallel
from asbuilt.families.shared.sizes import DerivedHeadWidth, sizes
from asbuilt.spec import LayerNorm, Model


def build(
    *, parallel: bool = False, eps: float = 1e-5, bias: bool = False, head_norms: bool = False, **sizes: Unpack[Sizes]
) -> Model:
    """Returns the model; with `parallel` both branches read one norm, q, k and v may have a `bias`.

    With `head_norms` q and k have a LayerNorm with gains for each head.
    """
    made = sized(sizes)
    norm = LayerNorm(d=made.d_model, eps=eps)
    attention = made.attention(bias=bias, **(made.head_norms(eps) if head_norms else {}))
    block = (parallel_block if parallel else pre_norm)(attention, made.gated(), norm)
    return made.model((block,) * made.n_layers, norm)


HEAD_NORMS = {f"attention.body.{name}_norm.weight": f"self_attn.{name}_layernorm.norms.{{}}.weight" for name in "qk"}

FAMILY = Family(
    name="stablelm",
    heads=("StableLmForCausalLM",),
    keys=(  # defaults as in transformers' StableLmConfig
        *but(
            sizes(n_vocab=50304, d_model=2560, d_ff=6912, n_layers=32, n_heads=32, n_kv_heads=32, context=4096),
            d_head=DerivedHeadWidth(),
            rotary={"partial": 0.25},
        ),
        eps("layer_norm_eps", 1e-5),
        Flag("use_qkv_bias", "bias", default=False),
        Flag("use_parallel_residual", "parallel", default=False, at=lambda parts: parts.first.name == "parallel"),
        Only("rotary_scaling_factor", 1, reason="RoPE is not scaled in this family, but by rope_scaling"),
        Flag("qk_layernorm", "head_norms", default=False),
    ),
    build=build,
    names=Names(
        stems=STEMS | in_parallel(STEMS) | {"parallel.norm": "input_layernorm"},
        rows=HEAD_NORMS | in_parallel(HEAD_NORMS),
    ),
)
