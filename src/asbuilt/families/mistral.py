"""The mistral family: llama's blocks without biases, each layer with the same sliding window, or none with any.

Jiang et al. 2023 (arXiv 2310.06825).
"""

from __future__ import annotations

from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.sizes import RMS_EPS, sizes, window
from asbuilt.spec import Model, RMSNorm


def build(dimensions: Dimensions, *, eps: float = 1e-6, window: int | None = None) -> Model:
    """Returns the model of these dimensions; every layer has the window."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    block = pre_norm(dimensions.attention(window=window), dimensions.gated(), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


FAMILY = Family(
    name="mistral",
    heads=("MistralForCausalLM",),
    keys=(  # defaults as in transformers' MistralConfig
        sizes(n_vocab=32000, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, context=131072),
        RMS_EPS,
        window(4096),
        Only("attention_bias", False, None, reason="this family has no biases"),
        Only("mlp_bias", False, None, reason="this family has no biases"),
        Only("layer_types", None, reason="all layers of this family are alike"),
    ),
    build=build,
    names=Names(stems=STEMS),
)
