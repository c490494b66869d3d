"""The gemma2 family: gemma with norms after branches too, windows on every other layer, soft-capped scores and logits.

Gemma Team 2024 (arXiv 2408.00118).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import gemma
from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.families.shared.key import Choice, Irrelevant, Number, Optional
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.sizes import HeadWidth, LayerWindows, every_but_last, sizes

SANDWICH = STEMS | {
    "attention.post_norm": "post_attention_layernorm",
    "ffn.norm": "pre_feedforward_layernorm",
    "ffn.post_norm": "post_feedforward_layernorm",
}


def _scalar(scale: float) -> int | float:
    """Returns the number whose root `scale` divides by, whole where that gives the same scale."""
    scalar = scale**-2
    return round(scalar) if round(scalar) >= 1 and round(scalar) ** -0.5 == scale else scalar


ACTIVATION = Choice(
    "hidden_activation",
    "activation",
    again="hidden_act",
    choices=ACTIVATION_NAMES,
    default="gelu_pytorch_tanh",
    written={"gelu_tanh": "gelu_pytorch_tanh"},
)
SCALE = Number(
    "query_pre_attn_scalar",
    "scale",
    default=256,
    make=lambda scalar: scalar**-0.5,
    back=_scalar,
    at="score_scale",
)


def cap(key: str, into: str, default: float | None) -> Optional:
    """Returns the key of what scores or logits are capped at; null means that they are not."""
    return Optional(key, into, default=default, of=Number)


OLDER_SIZE = Irrelevant("sliding_window is what is read", "sliding_window_size")

FAMILY = replace(
    gemma.FAMILY,
    name="gemma2",
    heads=("Gemma2ForCausalLM",),
    padding=0,
    keys=(  # defaults as in transformers' Gemma2Config
        *gemma.keys(
            sizes(n_vocab=256000, d_model=2304, d_ff=9216, n_layers=26, n_heads=8, n_kv_heads=4, context=8192),
            d_head=HeadWidth(256),
            activation=ACTIVATION,
        ),
        LayerWindows(default=4096, usual=lambda _, values: every_but_last(values["n_layers"], 2), required=True),
        OLDER_SIZE,
        SCALE,
        cap("attn_logit_softcapping", "softcap", 50.0),
        cap("final_logit_softcapping", "logit_softcap", 30.0),
    ),
    build=partial(gemma.build, sandwich=True),
    names=Names(stems=SANDWICH),
)
