"""The smollm3 family: llama's blocks, of which some, usually every fourth, have no positions.

Bakouch et al. 2025 (the SmolLM3 report); layers without positions: Yang et al. 2025 (arXiv 2501.18795).
"""

from __future__ import annotations

from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, RMS_EPS, LayerWindows, RopeLayers, sizes
from asbuilt.spec import Model, RMSNorm


def build(
    dimensions: Dimensions,
    *,
    turned: tuple[bool, ...],
    eps: float = 1e-6,
    bias: bool = False,
    mlp_bias: bool = False,
    windows: tuple[int | None, ...] = (),
) -> Model:
    """Returns the model of these dimensions; `turned` tells which layers have positions, `windows` each one's."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    ffn = dimensions.gated(mlp_bias)
    attentions = [
        dimensions.attention(turned=turns, bias=bias, output_bias=bias, window=window)
        for turns, window in zip(turned, windows or (None,) * len(turned), strict=True)
    ]
    return dimensions.model(tuple(pre_norm(attention, ffn, norm) for attention in attentions), norm)


SIZES = sizes(  # defaults as in transformers' SmolLM3Config
    n_vocab=128256, d_model=2048, d_ff=11008, n_layers=36, n_heads=16, n_kv_heads=4, context=32768, theta=2e6, ties=True
)

FAMILY = Family(
    name="smollm3",
    heads=("SmolLM3ForCausalLM",),
    keys=(
        SIZES,
        RMS_EPS,
        ATTENTION_BIAS,
        MLP_BIAS,
        RopeLayers(),
        # those of the layers without positions, unless `layer_types` says
        LayerWindows(default=None, usual=lambda _, values: [not turns for turns in values["turned"]]),
        Irrelevant("left by the converter; no code of this family reads it", "max_window_layers"),
        Irrelevant("only slices the same products", "pretraining_tp"),
    ),
    build=build,
    names=Names(stems=STEMS),
)
