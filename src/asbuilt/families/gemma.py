"""The gemma family: a scaled embedding, RMSNorm with 1 + weight, heads as wide as they please, a tied head.

Gemma Team 2024 (arXiv 2403.08295). Gemma 2 and 3 add norms after each branch, windows and more, and share what is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Choice, Key, Only
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.reader import REFUSED
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, Defaults, key_heads, size_keys
from asbuilt.spec import Activation, Block, Branch, Model, RMSNorm, Rotary


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    d_ff: int,
    max_positions: int,
    layers: Sequence[tuple[Rotary, int | None]],
    eps: float = 1e-6,
    activation: Activation = "gelu_tanh",
    bias: bool = False,
    sandwich: bool = False,
    head_norms: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    logit_softcap: float | None = None,
    tied: bool = True,
    name: str = "gemma",
) -> Model:
    """Returns the model of these dimensions, with a rotation and a window (None for all tokens) for each layer.

    `sandwich` norms each branch's result too, `head_norms` each head's queries and keys. Scores are multiplied by
    `scale` (None for d_head^-0.5) and capped at `softcap`, logits at `logit_softcap`.
    """
    made = Dimensions(
        n_vocab=n_vocab,
        d_model=d_model,
        n_layers=len(layers),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ff=d_ff,
        max_positions=max_positions,
        activation=activation,
        tied=tied,
        name=name,
    )
    norm = RMSNorm(d=d_model, eps=eps, gain="offset")
    per_head = RMSNorm(d=d_head, eps=eps, gain="offset") if head_norms else None
    after = norm if sandwich else None
    ffn = Branch(name="ffn", norm=norm, body=made.gated(), post_norm=after)

    def block(rotary: Rotary, window: int | None) -> Block:
        body = replace(made, rotary=rotary).attention(
            bias=bias, output_bias=bias, q_norm=per_head, k_norm=per_head, window=window, scale=scale
        )
        attention = Branch(name="attention", norm=norm, body=replace(body, softcap=softcap), post_norm=after)
        return Block(branches=(attention, ffn))

    kinds = {layer: block(*layer) for layer in set(layers)}
    # the root is rounded to the stream's dtype when it is applied
    return made.model(
        tuple(kinds[layer] for layer in layers), norm, embedding_scale=d_model**0.5, logit_softcap=logit_softcap
    )


def keys(but: Mapping[str, Key | None], **defaults: Unpack[Defaults]) -> tuple[Key, ...]:
    """Returns what every gemma's config says by the same keys; arguments as those of `size_keys`."""
    heads = replace(key_heads(defaults.get("n_kv_heads")), null=REFUSED)
    return (
        *size_keys({"n_kv_heads": heads, **but}, ("n_vocab",), **defaults),
        RMS_EPS,
        ATTENTION_BIAS,
        Only("use_bidirectional_attention", False, None, reason="only causal attention is read"),
    )


def _build(*, rotary: Rotary, n_layers: int, **values: Any) -> Model:  # noqa: ANN401
    return build(layers=((rotary, None),) * n_layers, **values)


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
    keys=keys(  # defaults as in transformers' GemmaConfig
        {"activation": ACTIVATION},
        n_vocab=256000,
        d_model=3072,
        d_ff=24576,
        n_layers=28,
        n_heads=16,
        n_kv_heads=16,
        d_head=256,
        context=8192,
        ties=True,
    ),
    build=_build,
    names=Names(stems=STEMS),
)
