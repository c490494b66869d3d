"""The mistral family: llama without biases, with one sliding window for all layers, or none.

Jiang et al. 2023 (arXiv 2310.06825).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared.key import Only
from asbuilt.families.shared.sizes import RMS_EPS, sizes, window

FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    heads=("MistralForCausalLM",),
    keys=(  # defaults as in transformers' MistralConfig
        *sizes(n_vocab=32000, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, context=131072),
        RMS_EPS,
        window(4096),
        Only("attention_bias", False, None, reason="this family has no biases"),
        Only("mlp_bias", False, None, reason="this family has no biases"),
        Only("layer_types", None, reason="all layers of this family are alike"),
    ),
)
