"""The granite family: llama with factors on the embedding, the scores, every branch and the logits.

Granite 3 (IBM 2024); with the factors one learning rate suits all widths: Shen et al. 2024 (arXiv 2408.13359).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared.key import Number
from asbuilt.families.shared.reader import LARGEST_NUMBER
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, RMS_EPS, sizes


def _divisor(scale: float) -> float:
    """Returns the shortest number whose reciprocal is `scale`: a config has what logits are divided by."""
    decimals = (float(f"{1 / scale:.{digits}g}") for digits in range(1, 18))
    return next((x for x in decimals if 1 / x == scale), 1 / scale)


DIVISOR = Number("logits_scaling", "logit_scale", default=1.0, above=1 / LARGEST_NUMBER, make=lambda x: 1 / x)
FACTORS = (
    Number("embedding_multiplier", "embedding_scale", default=1.0),
    Number("attention_multiplier", "score_scale", default=1.0),
    Number("residual_multiplier", "branch_scale", default=1.0),
    replace(DIVISOR, back=_divisor),
)

FAMILY = replace(
    llama.FAMILY,
    name="granite",
    heads=("GraniteForCausalLM",),
    keys=(  # defaults as in transformers' GraniteConfig
        *sizes(n_vocab=32000, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048),
        RMS_EPS,
        ATTENTION_BIAS,
        MLP_BIAS,
        *FACTORS,
    ),
)
