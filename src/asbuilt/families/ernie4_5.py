"""The ernie4_5 family: llama with RoPE on adjacent numbers, and biases everywhere or nowhere.

ERNIE Team, Baidu 2025 (technical report of ERNIE 4.5, and its model cards).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared.key import Flag, but, eps
from asbuilt.families.shared.sizes import NullableHeadWidth, sizes

EPS = eps("rms_norm_eps", 1e-5)

FAMILY = replace(
    llama.FAMILY,
    name="ernie4_5",
    heads=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),  # the second in the first releases
    keys=(  # defaults as in transformers' Ernie4_5Config
        *but(
            sizes(n_vocab=103424, d_model=1024, d_ff=3072, n_layers=18, n_heads=16, n_kv_heads=2, context=131072),
            d_head=NullableHeadWidth(128),
            rotary={"theta": 500_000.0},
            tied={"default": True},
        ),
        EPS,
        Flag("use_bias", "bias", default=False),
    ),
    build=lambda bias, **values: llama.build(bias=bias, mlp_bias=bias, adjacent=True, **values),
)
