"""The apertus family: llama with a norm of each head's queries and keys, and xIELU between two matrices.

Project Apertus 2025 (arXiv 2509.14233); xIELU: Huang and Schlag 2024 (arXiv 2411.13010).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.families.shared.key import Choice, Only, but, eps
from asbuilt.families.shared.names import ATTENTION, QK_NORMS, Names
from asbuilt.families.shared.rotary import ORIGINAL, ScaledRope, usual_scaling
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import XIELU

# what a config without RoPE keys means
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    ORIGINAL: 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
STEMS = {
    "attention.norm": "attention_layernorm",
    "ffn.norm": "feedforward_layernorm",
    "ffn.body.up": "mlp.up_proj",
    "ffn.body.down": "mlp.down_proj",
    "ffn.body.activation": "mlp.act_fn",
}

FAMILY = replace(
    llama.FAMILY,
    name="apertus",
    heads=("ApertusForCausalLM",),
    prepare=usual_scaling(ROPE),
    keys=(  # defaults as in transformers' ApertusConfig
        *but(
            sizes(n_vocab=131072, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, context=65536),
            rotary=ScaledRope(theta=12_000_000.0),
            activation=Choice(
                "hidden_act",
                "activation",
                default="xielu",
                choices={**ACTIVATION_NAMES, "xielu": XIELU()},
                written={"gelu_tanh": "gelu_pytorch_tanh"},
            ),
        ),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Only("mlp_bias", False, reason="feed-forward parts have no biases here"),
        Only("post_norm", False, reason="norms of this family are before each branch"),
        Only("qk_norm", True, reason="each head's queries and keys are normed in this family"),
    ),
    build=partial(llama.build, head_norms=True, gated=False),
    names=Names(stems=STEMS | ATTENTION | QK_NORMS),
)
