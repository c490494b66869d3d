"""The olmo family: llama with a LayerNorm that has no weights.

Groeneveld et al. 2024 (arXiv 2402.00838).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared.key import Irrelevant, Only
from asbuilt.families.shared.names import ATTENTION, GATED, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import LayerNorm

EPS = 1e-5  # no key says otherwise
SIZES = sizes(n_vocab=50304, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048)

FAMILY = replace(
    llama.FAMILY,
    name="olmo",
    heads=("OlmoForCausalLM",),
    padding=1,
    keys=(  # defaults as in transformers' OlmoConfig
        *SIZES,
        ATTENTION_BIAS,
        Only("clip_qkv", None, reason="clipped queries, keys and values are not supported"),
        Irrelevant("this family has no RMSNorm, and its LayerNorm's epsilon is fixed", "rms_norm_eps"),
    ),
    build=partial(llama.build, eps=EPS, norms=partial(LayerNorm, gain=False, bias=False)),
    names=Names(stems=ATTENTION | GATED),
)
