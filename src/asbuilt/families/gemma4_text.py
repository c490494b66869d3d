"""The gemma4_text family: heads of another width in full layers, normed values, keys and values of earlier layers.

Gemma Team 2026, as published (E2B, E4B, 26B-A4B, 31B). Each block reads a per-layer embedding, where there is one, and
ends in a stored factor; experts stand beside the feed-forward, in one branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from asbuilt.families.gemma2 import ACTIVATION, SANDWICH, cap
from asbuilt.families.shared import gemma4
from asbuilt.families.shared.dimensions import Dimensions, Sizes, sized
from asbuilt.families.shared.ends import decoder_ends
from asbuilt.families.shared.experts import TRAINING
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Only, but
from asbuilt.families.shared.names import NO_BUFFERS, OUTSIDE, QK_NORMS, Names
from asbuilt.families.shared.reader import REFUSED
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, HeadWidth, LayerWindows, sizes
from asbuilt.families.shared.table import Concat, EachExpert, Entry, TensorTable, entry
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    LanguageModel,
    MixtureOfExperts,
    Model,
    PerLayerEmbedding,
    PerLayerInput,
    RMSNorm,
    Rotary,
    Router,
)

# Whether a layer's keys and values are its own alone, read by later layers too, or another's.
Role = Literal["own", "lends", "reads"]


def build(
    *,
    windows: Sequence[int | None],
    local: Rotary,
    wide: int,
    wide_kv_heads: int,
    values_are_keys: bool = False,
    n_readers: int = 0,
    double_wide: bool = False,
    d_vector: int = 0,
    n_vectors: int = 0,
    experts: tuple[int, int, int] | None = None,
    eps: float = 1e-6,
    bias: bool = False,
    logit_softcap: float | None = None,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes, each layer with its own of the windows (None for all tokens).

    Layers with a window have `local` RoPE; others have heads `wide`, `wide_kv_heads` of keys and values, which with
    `values_are_keys` have one projection. The last `n_readers` layers read keys and values of earlier ones; with
    `double_wide` their feed-forwards are twice as wide. With a `d_vector` each block reads a per-layer embedding of
    `n_vectors` rows. `experts` are their number, that of a token, and their width.
    """
    made = sized(sizes, activation="gelu_tanh", tied=True)
    norm = RMSNorm(d=made.d_model, eps=eps)

    def attention(window: int | None, role: Role) -> Attention:
        full = window is None
        kind, width = ("full", wide) if full else ("sliding", made.head_width)
        per_head = RMSNorm(d=width, eps=eps)
        own: dict[str, Any] = {"k_norm": per_head, "v_norm": replace(per_head, gain="none")}
        own |= {"values_are_keys": full and values_are_keys, "kv_name": kind if role == "lends" else None}
        if role == "reads":
            own = {"kv_from": kind}
        return made.attention(
            bias=bias,
            output_bias=bias,
            n_kv_heads=wide_kv_heads if full else made.n_kv_heads,
            d_head=width,
            q_norm=per_head,
            positions=made.rotary if full else local,
            window=window,
            scale=1.0,
            **own,
        )

    def block(window: int | None, role: Role) -> Block:
        ffn = replace(made, d_ff=made.d_ff * (2 if double_wide and role == "reads" else 1))
        branches = [
            Branch(name="attention", norm=norm, body=attention(window, role), post_norm=norm),
            _feed_forward(ffn, norm, experts),
        ]
        if d_vector:
            body = PerLayerInput(d_model=made.d_model, d=d_vector, activation=made.activation)
            branches.append(Branch(name="vector", body=body, post_norm=norm))
        return Block(branches=tuple(branches), scaled=True)

    layers = [*zip(windows, roles(windows, n_readers), strict=True)]
    kinds = {layer: block(*layer) for layer in dict.fromkeys(layers)}
    embedded = vectors(made, eps, d_vector, n_vectors) if d_vector else None
    return made.model(
        tuple(map(kinds.__getitem__, layers)),
        norm,
        embedding_scale=made.d_model**0.5,
        logit_softcap=logit_softcap,
        per_layer=embedded,
    )


def roles(windows: Sequence[int | None], n_readers: int) -> list[Role]:
    """Returns each layer's role: the last layer of a kind before the readers lends to those of its kind."""
    first = len(windows) - n_readers
    lenders = {max(i for i in range(first) if windows[i] == window) for window in {*windows[first:]}}
    return ["reads" if i >= first else "lends" if i in lenders else "own" for i in range(len(windows))]


def _feed_forward(made: Dimensions, norm: RMSNorm, experts: tuple[int, int, int] | None) -> Branch:
    """Returns the branch of the gated feed-forward, alone or beside experts, each side with norms of its own."""
    if experts is None:
        return Branch(name="ffn", norm=norm, body=made.gated(), post_norm=norm)
    n_experts, top_k, width = experts
    router = Router(
        d_model=made.d_model,
        n_experts=n_experts,
        top_k=top_k,
        renormalise=True,
        norm=norm,
        logit_scale=made.d_model**-0.5,
        expert_scale=True,
    )
    body = replace(
        made.mixture(router, width),
        shared=made.gated(),
        norm=norm,
        post_norm=norm,
        shared_norm=norm,
        shared_post_norm=norm,
    )
    return Branch(name="ffn", body=body, post_norm=norm)


def vectors(made: Dimensions, eps: float, width: int, rows: int) -> PerLayerEmbedding:
    """Returns the embedding of which each block reads a vector `width` wide, a table of as many `rows`."""
    return PerLayerEmbedding(
        n_vocab=rows,
        n_layers=made.n_layers,
        d=width,
        d_model=made.d_model,
        norm=RMSNorm(d=width, eps=eps),
        scale=width**0.5,
        project_scale=made.d_model**-0.5,
        sum_scale=2**-0.5,
    )


VECTORS = {
    "vector.body.gate": "per_layer_input_gate",
    "vector.body.down": "per_layer_projection",
    "vector.post_norm": "post_per_layer_input_norm",
}
BESIDE = {
    **{f"ffn.body.shared.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "ffn.body.shared_norm": "pre_feedforward_layernorm",
    "ffn.body.shared_post_norm": "post_feedforward_layernorm_1",
    "ffn.body.norm": "pre_feedforward_layernorm_2",
    "ffn.body.post_norm": "post_feedforward_layernorm_2",
    "ffn.body.router": "router.proj",
    "ffn.body.router.norm.weight": "router.scale",
    "ffn.body.router.expert_scale": "router.per_expert_scale",
}
STEMS = SANDWICH | QK_NORMS | VECTORS | BESIDE | {"scale": "layer_scalar"}
WHOLE = OUTSIDE | {
    "per_layer": "model.embed_tokens_per_layer",
    "per_layer.project": "model.per_layer_model_projection",
    "per_layer.norm": "model.per_layer_projection_norm",
}


def _stacked(part: MixtureOfExperts) -> list[Entry]:
    """Returns the entries of the experts: in stacks, gates before ups."""
    inward = EachExpert(Concat((part.d_ff, part.d_ff)))
    return [
        Entry(paths=("gate", "up"), names=("experts.gate_up_proj",), layout=inward),
        entry("down", "experts.down_proj"),
    ]


def ignored(spec: Model) -> dict[str, str]:
    """Returns what files hold beside the model: keys and values of layers that read those of others."""
    bodies = ((i, branch.body) for i, block in enumerate(spec.blocks) for branch in block.branches)
    readers = "|".join(str(i) for i, body in bodies if isinstance(body, Attention) and body.kv_from is not None)
    unused = rf"(.*\.)?layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return NO_BUFFERS | ({unused: "this layer reads the keys and values of another"} if readers else {})


def _names(spec: Model, family: str) -> TensorTable:
    return Names(stems=STEMS, outside=WHOLE, stacked=_stacked, ignored=ignored(spec))(spec, family)


FAMILY = Family(
    name="gemma4_text",
    heads=("Gemma4ForCausalLM",),
    ends=lambda name: decoder_ends("Gemma4Text"),
    prepare=gemma4.with_ropes,
    keys=(  # defaults as in transformers' Gemma4TextConfig
        *but(
            sizes(n_vocab=262144, d_model=2304, d_ff=9216, n_layers=30, n_heads=8, n_kv_heads=4, context=131072),
            d_head=HeadWidth(256, at=gemma4.local),
            n_kv_heads={"null": REFUSED, "at": lambda parts: gemma4.local(parts).n_kv_heads},
            rotary=None,
            d_ff={"at": lambda parts: gemma4.dense(parts).d_ff},
            activation=replace(ACTIVATION, at=lambda parts: gemma4.dense(parts).activation),
            tied={"default": True},
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        LayerWindows(default=512, usual=gemma4.usual_layers, required=True),
        Check("layer_types", (lambda values: values["windows"][-1] is None, "a list that ends in full_attention")),
        gemma4.Heads(),
        gemma4.Ropes(),
        gemma4.Readers(),
        gemma4.Vectors(),
        TRAINING,
        gemma4.Experts(),
        Only("expert_intermediate_size", None, reason="moe_intermediate_size is what is read"),
        Only("use_bidirectional_attention", None, "vision", reason="a text alone is read causally"),
        cap("final_logit_softcapping", "logit_softcap", None),
    ),
    build=build,
    names=_names,
)
