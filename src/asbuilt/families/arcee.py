"""The arcee family: llama with a feed-forward of two matrices and the square of ReLU between them.

Arcee AI 2025, the model card of AFM-4.5B; relu squared: So et al. 2021 (arXiv 2109.08668).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared.key import but, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, NullableHeadWidth, sizes

FAMILY = replace(
    llama.FAMILY,
    name="arcee",
    heads=("ArceeForCausalLM",),
    keys=(  # defaults as in transformers' ArceeConfig
        *but(
            sizes(n_vocab=32000, d_model=2560, d_ff=18432, n_layers=32, n_heads=32, context=4096, act="relu2"),
            d_head=NullableHeadWidth(),
        ),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
    build=partial(llama.build, gated=False),
    names=Names(stems=NORMS | ATTENTION | {"ffn.body.up": "mlp.up_proj", "ffn.body.down": "mlp.down_proj"}),
)
