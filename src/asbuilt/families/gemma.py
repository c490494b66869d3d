"""The gemma family: a scaled embedding, RMSNorm with 1 + weight, a head width of its own, tied embeddings.

Gemma Team 2024 (arXiv 2403.08295). Gemma 2 and 3 add norms after each branch, windows and more, and share what is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Choice, Key, Only, but
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.reader import REFUSED
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, HeadWidth, sizes
from asbuilt.spec import Block, Branch, LanguageModel, RMSNorm, Rotary


def build(
    *,
    windows: Sequence[int | None] = (),
    local: Rotary | None = None,
    eps: float = 1e-6,
    bias: bool = False,
    sandwich: bool = False,
    head_norms: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    logit_softcap: float | None = None,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes, with a window for each layer (None for all tokens); those with one are `local`.

    `sandwich` norms each branch's result too, `head_norms` each head's queries and keys. Scores are multiplied by
    `scale` (None for d_head^-0.5) and capped at `softcap`, logits at `logit_softcap`.
    """
    made = sized(sizes, activation="gelu_tanh", tied=True)
    norm = RMSNorm(d=made.d_model, eps=eps, gain="offset")
    per_head = RMSNorm(d=made.head_width, eps=eps, gain="offset") if head_norms else None
    after = norm if sandwich else None
    ffn = Branch(name="ffn", norm=norm, body=made.gated(), post_norm=after)

    def block(window: int | None) -> Block:
        rotary = made.rotary if window is None else local or made.rotary
        body = replace(made, rotary=rotary).attention(
            bias=bias, output_bias=bias, q_norm=per_head, k_norm=per_head, window=window, scale=scale, softcap=softcap
        )
        return Block(branches=(Branch(name="attention", norm=norm, body=body, post_norm=after), ffn))

    windows = windows or (None,) * made.n_layers
    kinds = {window: block(window) for window in set(windows)}
    # the root is rounded to the stream's dtype when it is applied
    return made.model(
        tuple(map(kinds.__getitem__, windows)), norm, embedding_scale=made.d_model**0.5, logit_softcap=logit_softcap
    )


def keys(sizes: Iterable[Key], **others: Key) -> tuple[Key, ...]:
    """Returns what every gemma's config says by the same keys, these `sizes` and `others` among them."""
    found = but(sizes, n_kv_heads={"null": REFUSED}, tied={"default": True}, **others)
    return (
        *sorted(found, key=lambda key: getattr(key, "into", "") != "n_vocab"),  # which is read first
        RMS_EPS,
        ATTENTION_BIAS,
        Only("use_bidirectional_attention", False, None, reason="only causal attention is read"),
    )


# `gelu` in the first releases' files means its tanh form, which they were trained with. `hidden_activation` is a later
# spelling, which some versions read and others do not.
ACTIVATION = Choice(
    "hidden_act",
    "activation",
    again="hidden_activation",
    choices={**ACTIVATION_NAMES, "gelu": "gelu_tanh"},
    default="gelu_pytorch_tanh",
    written={"gelu_tanh": "gelu_pytorch_tanh"},
)

FAMILY = Family(
    name="gemma",
    heads=("GemmaForCausalLM",),
    padding=0,
    keys=keys(  # defaults as in transformers' GemmaConfig
        sizes(n_vocab=256000, d_model=3072, d_ff=24576, n_layers=28, n_heads=16, n_kv_heads=16, context=8192),
        d_head=HeadWidth(256),
        activation=ACTIVATION,
    ),
    build=build,
    names=Names(stems=STEMS),
)
