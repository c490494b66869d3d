"""The seed_oss family: llama with biases on queries, keys and values.

ByteDance Seed 2025, the model card and published code of Seed-OSS-36B.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared.key import Flag, Irrelevant, but
from asbuilt.families.shared.sizes import MLP_BIAS, RMS_EPS, NullableHeadWidth, sizes

FAMILY = replace(
    llama.FAMILY,
    name="seed_oss",
    heads=("SeedOssForCausalLM",),
    padding=1,
    keys=(  # defaults as in transformers' SeedOssConfig
        *but(
            sizes(n_vocab=155136, d_model=4096, d_ff=27648, n_layers=64, n_heads=80, n_kv_heads=8, context=524288),
            d_head=NullableHeadWidth(128),
        ),
        RMS_EPS,
        Flag("attention_bias", "bias", default=True),
        Flag("attention_out_bias", "output_bias", default=False, at="attention.output_bias"),
        MLP_BIAS,
        Irrelevant("training only", "residual_dropout"),
    ),
)
