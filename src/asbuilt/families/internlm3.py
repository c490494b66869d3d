"""The internlm3 family: llama whose biases have other names, and are of all matrices or of none.

InternLM3-8B: Shanghai AI Laboratory 2025, its model card and published code.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared.key import Check, Flag, but, eps
from asbuilt.families.shared.sizes import NullableHeadWidth, sizes

FAMILY = replace(
    llama.FAMILY,
    name="internlm3",
    # the second is the class that transformers builds, and names
    heads=("InternLM3ForCausalLM", "LlamaForCausalLM"),
    keys=(  # defaults as in transformers' InternLM3Config
        *but(
            sizes(n_vocab=128512, d_model=4096, d_ff=10240, n_layers=48, n_heads=32, n_kv_heads=2, context=32768),
            d_head=NullableHeadWidth(128),
        ),
        eps("rms_norm_eps", 1e-5),
        Flag("qkv_bias", "bias", also=("attention_bias",), default=False),
        Flag("bias", "mlp_bias", also=("mlp_bias",), default=False),
        Check("bias", (lambda values: values["bias"] == values["mlp_bias"], "the same as qkv_bias")),
    ),
)
