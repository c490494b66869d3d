"""The olmo family: llama's blocks with a LayerNorm that has no weights.

Groeneveld et al. 2024 (arXiv 2402.00838).
"""

from __future__ import annotations

from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Only
from asbuilt.families.shared.names import ATTENTION, GATED, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import LayerNorm, Model

EPS = 1e-5  # no key says otherwise
SIZES = sizes(n_vocab=50304, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048)


def build(dimensions: Dimensions, *, bias: bool = False) -> Model:
    """Returns the model of these dimensions."""
    norm = LayerNorm(d=dimensions.d_model, eps=EPS, gain=False, bias=False)
    block = pre_norm(dimensions.attention(bias=bias, output_bias=bias), dimensions.gated(), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


FAMILY = Family(
    name="olmo",
    heads=("OlmoForCausalLM",),
    keys=(  # defaults as in transformers' OlmoConfig
        SIZES,
        ATTENTION_BIAS,
        Only("clip_qkv", None, reason="clipped queries, keys and values are not built"),
        Irrelevant("this family has no RMSNorm, and its LayerNorm's epsilon is fixed", "rms_norm_eps"),
    ),
    build=build,
    names=Names(stems=ATTENTION | GATED),
)
