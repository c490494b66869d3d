"""The stablelm family: llama with LayerNorm, RoPE on a quarter of each head, and both branches of a block one or two.

Stability AI 2024 (Stable LM 2, arXiv 2402.17834).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared.dimensions import parallel_block, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Only, but, eps
from asbuilt.families.shared.names import STEMS, Names, in_parallel
from asbuilt.families.shared.sizes import DerivedHeadWidth, sizes
from asbuilt.spec import LayerNorm, Model


def build(*, parallel: bool = False, eps: float = 1e-5, bias: bool = False, **values: Any) -> Model:  # noqa: ANN401
    """Returns the model; with `parallel` both branches read one norm, q, k and v may have a `bias`.

    Other `values` are those of `llama.build`.
    """
    if not parallel:
        return llama.build(norms=LayerNorm, eps=eps, bias=bias, output_bias=False, **values)
    made = sized(values)
    norm = LayerNorm(d=made.d_model, eps=eps)
    block = parallel_block(made.attention(bias=bias), made.gated(), norm)
    return made.model((block,) * made.n_layers, norm)


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
        Only("qk_layernorm", False, reason="norms with weights for each head are not supported"),
    ),
    build=build,
    names=Names(stems=STEMS | in_parallel(STEMS) | {"parallel.norm": "input_layernorm"}),
)
