"""The glm family: llama with RoPE on adjacent numbers of half of each head, and gate and up stored as one.

GLM-4: GLM Team 2024 (arXiv 2406.12793).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared.key import Flag, but, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Fused, Names
from asbuilt.families.shared.sizes import NullableHeadWidth, sizes

STEMS = NORMS | ATTENTION | {"ffn.body.down": "mlp.down_proj"}
FUSED = {"mlp.gate_up_proj": Fused(stems=("ffn.body.gate", "ffn.body.up"))}

FAMILY = replace(
    llama.FAMILY,
    name="glm",
    heads=("GlmForCausalLM",),
    padding=151329,
    keys=(  # defaults as in transformers' GlmConfig
        *but(
            sizes(n_vocab=151552, d_model=4096, d_ff=13696, n_layers=40, n_heads=32, n_kv_heads=2, context=131072),
            d_head=NullableHeadWidth(128),
            rotary={"partial": 0.5},
        ),
        eps("rms_norm_eps", 1.5625e-7),
        Flag("attention_bias", "bias", default=True),
    ),
    build=partial(llama.build, output_bias=False, adjacent=True),
    names=Names(stems=STEMS, fused=FUSED),
)
