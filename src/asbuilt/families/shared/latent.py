"""What the families with latent attention share: their keys, their names on disk, and layers that predict further on.

They read out of one config what the attention is, which layers have experts, and how many prediction layers follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared import experts, predictors
from asbuilt.families.shared.key import Flag, Group, Irrelevant, Key, Only, Size, Values, activation, depth, tied
from asbuilt.families.shared.names import CORRECTED_ROUTER, EXPERTS, GATED, NORMS, SHARED_EXPERTS, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import RMS_EPS
from asbuilt.families.shared.table import Interleave, Layout
from asbuilt.spec import Block, LatentAttention, Model, RMSNorm, Rotary, Router, YaRN

INNER_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says: so in the published code and in transformers

STEMS = NORMS | GATED | SHARED_EXPERTS | CORRECTED_ROUTER
STEMS |= {
    f"attention.body.{part}": f"self_attn.{name}"
    for part, name in (
        ("q", "q_proj"),
        ("q_down", "q_a_proj"),
        ("q_norm", "q_a_layernorm"),
        ("q_up", "q_b_proj"),
        ("kv_norm", "kv_a_layernorm"),
        ("o", "o_proj"),
    )
}


def build(attention: LatentAttention, router: Router, **values: Any) -> Model:  # noqa: ANN401
    """Returns the model; `values` are llama's, but for what the attention says."""
    own = {"d_model": attention.d_model, "n_heads": attention.n_heads, "eps": 1e-6}
    return llama.build(mixer=attention, router=router, **(own | values))


def attention_of(parts: Parts) -> LatentAttention:
    """Returns the first layer's attention; raises InputError where it is another."""
    return parts.expect(parts.first.body, LatentAttention, f"blocks.0.{parts.first.name}.body")


def _rotary_of(parts: Parts) -> Rotary:
    return parts.expect(attention_of(parts).positions, Rotary, "blocks.0.attention.body.positions")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LatentRope(Rope):
    """The rotary keys, whose pairs are adjacent unless the key `interleave` says otherwise.

    `mscale_all_dim` inside widens the softmax scale too; where one mscale stands alone, codes disagree.
    """

    interleave: str | None = None

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the rotary positions and the mscale."""
        super().read(reader, values)
        if self.interleave is None or reader.flag(self.interleave, default=True, null=False):
            values["rotary"] = replace(values["rotary"], pairing="adjacent")
        inner = reader.nested("rope_parameters", "rope_scaling")
        if inner is not None and isinstance(values["rotary"].scaling, YaRN):
            both = inner.given("mscale"), inner.given("mscale_all_dim")
            if both[0] != both[1]:
                alone = "mscale" if both[0] else "mscale_all_dim"
                raise inner.error(alone, "stands alone", value=inner.config[alone], allowed="mscale and mscale_all_dim")
            values["mscale"] = inner.number("mscale_all_dim") if both[1] else None

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys."""
        written, rotary, mscale = super().write(parts), _rotary_of(parts), attention_of(parts).mscale
        if self.interleave is not None:
            written[self.interleave] = rotary.pairing == "adjacent"
        if mscale is not None:
            written["rope_scaling"] |= _mscales(rotary, mscale)
        return written


def _mscales(rotary: Rotary, mscale: float) -> dict[str, float]:
    """Returns both mscales; their quotient is the attention factor, which is written beside them."""
    assert isinstance(rotary.scaling, YaRN)
    length = 0.1 * math.log(rotary.scaling.factor) if rotary.scaling.factor > 1 else 0.0
    own = mscale
    if rotary.attention_factor != 1.0 and length:
        own = (rotary.attention_factor * (length * mscale + 1) - 1) / length
    return {"mscale": float(own), "mscale_all_dim": float(mscale)}


class Derived:
    """Widths that follow from those that are read; written again where they were carried."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Declares them."""
        Irrelevant("follows from the widths that are read", "head_dim", "qk_head_dim").read(reader, values)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns those that were carried."""
        attention = attention_of(parts)
        derived = {"head_dim": attention.d_rope, "qk_head_dim": attention.d_head}
        return {key: value for key, value in derived.items() if key in parts.carried}


def _attention(
    *,
    q_rank: int,
    kv_rank: int,
    rotary: Rotary,
    n_kv_heads: int,
    max_positions: int,
    bias: bool,
    **rest: Any,  # noqa: ANN401
) -> LatentAttention:
    return LatentAttention(
        q_rank=q_rank or None,
        q_norm=RMSNorm(d=q_rank, eps=INNER_EPS) if q_rank else None,
        kv_rank=kv_rank,
        kv_norm=RMSNorm(d=kv_rank, eps=INNER_EPS),
        positions=rotary,
        bias=bias,
        output_bias=bias,
        **rest,
    )


def _width(key: str, into: str, defaults: Mapping[str, int | None], **more: Any) -> Size:  # noqa: ANN401
    return Size(key, into, default=defaults[into], at=lambda parts: getattr(attention_of(parts), into), **more)


def _attention_keys(defaults: Mapping[str, int | None], interleave: str | None) -> Group:
    even = (lambda values: values["d_rope"] % 2 == 0, "an even number: RoPE rotates pairs")
    as_many = (
        lambda values: values["n_kv_heads"] == values["n_heads"],
        lambda values: f"num_attention_heads = {values['n_heads']}, or null",
    )
    heads, usual = (lambda values: values["n_heads"]), defaults["n_kv_heads"]
    keys: tuple[Key, ...] = (
        _width("num_attention_heads", "n_heads", defaults),
        Size(
            "num_key_value_heads",
            "n_kv_heads",
            default=usual or heads,
            null=heads,
            derived=usual is None,
            must=as_many,
            at=lambda parts: attention_of(parts).n_heads,
        ),
        _width("kv_lora_rank", "kv_rank", defaults),
        _width("qk_nope_head_dim", "d_nope", defaults),
        _width("qk_rope_head_dim", "d_rope", defaults, must=even),
        _width("v_head_dim", "d_value", defaults),
        _width("q_lora_rank", "q_rank", defaults, null=0),
        LatentRope(interleave=interleave, width=lambda values: values["d_rope"], at=_rotary_of),
        Flag("attention_bias", "bias", default=False, at=lambda parts: attention_of(parts).output_bias),
    )
    return Group(
        "attention",
        _attention,
        keys,
        given=lambda values: {key: values[key] for key in ("d_model", "max_positions")},
    )


def keys(
    router: Group,
    *,
    interleave: str | None = None,
    predicts: bool = False,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    max_positions: int,
    d_ff: int,
    d_expert: int,
    n_shared: int,
    n_dense: int,
    **attention: int | None,
) -> tuple[Key, ...]:
    """Returns the keys of one of these families; numbers are the class's defaults, those of the `attention` by field.

    `interleave` is the key that says whether rotary pairs are adjacent, None where they always are; a family that
    `predicts` may have prediction layers.
    """
    return (
        Derived(),
        Irrelevant("only shares out or slices the same products", "ep_size", "pretraining_tp"),
        Only("moe_layer_freq", 1, reason="every layer after the dense ones has experts"),
        Only("mlp_bias", False, None, reason="feed-forward parts have no biases here"),
        Size("hidden_size", "d_model", default=d_model),
        depth("num_hidden_layers", n_layers),
        Size("max_position_embeddings", "max_positions", default=max_positions),
        experts.first_dense(n_dense),
        _attention_keys(attention, interleave),
        router,
        Size("vocab_size", "n_vocab", default=n_vocab),
        experts.dense_width(d_ff),
        experts.expert_width(d_expert),
        experts.shared_experts(n_shared),
        *((predictors.Count(),) if predicts else ()),
        activation(),
        RMS_EPS,
        tied(False),
    )


def _by_head(block: Block, rows: tuple[int, ...]) -> Layout:
    body = next(branch.body for branch in block.branches if isinstance(branch.body, LatentAttention))
    return Interleave(body.n_heads, (body.d_nope, body.d_value))


# Latent and shared key are one tensor; so are each head's key and value maps, head by head.
NAMES = predictors.named(
    Names(
        stems=STEMS,
        fused={
            "self_attn.kv_a_proj_with_mqa": Fused(stems=("attention.body.kv_down", "attention.body.k_rope")),
            "self_attn.kv_b_proj": Fused(stems=("attention.body.k_up", "attention.body.v_up"), join=_by_head),
        },
        experts=EXPERTS,
    )
)
