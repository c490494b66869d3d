"""The granite family: llama's blocks, with factors on the embedding, the scores, every branch and the logits.

Granite 3 (IBM 2024); the factors keep one learning rate good at all widths: Shen et al. 2024 (arXiv 2408.13359).
"""

from __future__ import annotations

from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Number
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.reader import LARGEST_NUMBER
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, RMS_EPS, sizes
from asbuilt.spec import Model, RMSNorm


def build(
    dimensions: Dimensions,
    *,
    eps: float = 1e-6,
    bias: bool = False,
    mlp_bias: bool = False,
    embedding_scale: float = 1.0,
    score_scale: float = 1.0,
    branch_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> Model:
    """Returns the model of these dimensions; `score_scale` stands in place of d_head^-0.5."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    attention = dimensions.attention(bias=bias, output_bias=bias, scale=score_scale)
    blocks = (pre_norm(attention, dimensions.gated(mlp_bias), norm, branch_scale),) * dimensions.n_layers
    return dimensions.model(blocks, norm, embedding_scale=embedding_scale, logit_scale=logit_scale)


def _divisor(scale: float) -> float:
    """Returns the shortest number whose reciprocal is `scale`."""
    decimals = (float(f"{1 / scale:.{digits}g}") for digits in range(1, 18))
    return next((x for x in decimals if 1 / x == scale), 1 / scale)


FAMILY = Family(
    name="granite",
    heads=("GraniteForCausalLM",),
    keys=(  # defaults as in transformers' GraniteConfig
        sizes(n_vocab=32000, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048),
        RMS_EPS,
        ATTENTION_BIAS,
        MLP_BIAS,
        Number("embedding_multiplier", "embedding_scale", default=1.0),
        Number("attention_multiplier", "score_scale", default=1.0),
        Number("residual_multiplier", "branch_scale", default=1.0),
        # logits are divided by it
        Number(
            "logits_scaling",
            "logit_scale",
            default=1.0,
            above=1 / LARGEST_NUMBER,
            make=lambda divisor: 1 / divisor,
            back=_divisor,
        ),
    ),
    build=build,
    names=Names(stems=STEMS),
)
