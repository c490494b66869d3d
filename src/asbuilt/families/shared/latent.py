"""What the families with latent attention share: their keys, and their names on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared import experts, predictors
from asbuilt.families.shared.key import Group, Irrelevant, Key, Only, Size, Values, but
from asbuilt.families.shared.names import CORRECTED_ROUTER, EXPERTS, GATED, NORMS, SHARED_EXPERTS, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import ATTENTION_BIAS, EVEN, RMS_EPS
from asbuilt.families.shared.table import Interleave, Layout
from asbuilt.spec import Block, Indexer, LanguageModel, LatentAttention, RMSNorm, Rotary, YaRN

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


def build(
    *,
    q_rank: int,
    kv_rank: int,
    d_nope: int,
    d_rope: int,
    d_value: int,
    rotary: Rotary,
    mscale: float | None = None,
    bias: bool = False,
    indexer: Indexer | None = None,
    **values: Any,  # noqa: ANN401
) -> LanguageModel:
    """Returns the model; a `q_rank` of 0 is a query without a latent, other `values` are those of `llama.build`."""
    attention = LatentAttention(
        d_model=values["d_model"],
        n_heads=values["n_heads"],
        q_rank=q_rank or None,
        kv_rank=kv_rank,
        d_nope=d_nope,
        d_rope=d_rope,
        d_value=d_value,
        q_norm=RMSNorm(d=q_rank, eps=INNER_EPS) if q_rank else None,
        kv_norm=RMSNorm(d=kv_rank, eps=INNER_EPS),
        positions=rotary,
        mscale=mscale,
        bias=bias,
        output_bias=bias,
        indexer=indexer,
    )
    return llama.build(mixer=attention, **values)


def _rotary_of(parts: Parts) -> Rotary:
    return parts.expect(parts.at("mixer.positions"), Rotary, "blocks.0.attention.body.positions")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LatentRope(Rope):
    """The RoPE keys; pairs are adjacent unless the key `interleave` says otherwise.

    `mscale_all_dim` inside widens the softmax scale too; where one mscale stands alone, codes disagree.
    """

    interleave: str = ""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads RoPE and the mscale."""
        super().read(reader, values)
        if not self.interleave or reader.flag(self.interleave, default=True, null=False):
            values["rotary"] = replace(values["rotary"], pairing="adjacent")
        inner = reader.nested("rope_parameters", "rope_scaling")
        if inner is not None and isinstance(values["rotary"].scaling, YaRN):
            both = inner.given("mscale"), inner.given("mscale_all_dim")
            if both[0] != both[1]:
                alone = "mscale" if both[0] else "mscale_all_dim"
                raise inner.error(alone, "needs both mscale and mscale_all_dim", value=inner.config[alone])
            values["mscale"] = inner.number("mscale_all_dim") if both[1] else None

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys."""
        written, rotary, mscale = super().write(parts), _rotary_of(parts), parts.at("mixer.mscale")
        if self.interleave:
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
        derived = {"head_dim": parts.at("mixer.d_rope"), "qk_head_dim": parts.at("mixer.d_head")}
        return {key: value for key, value in derived.items() if key in parts.carried}


WIDTHS = (
    Size("kv_lora_rank", "kv_rank", default=512, at="mixer.kv_rank"),
    Size("qk_nope_head_dim", "d_nope", default=128, at="mixer.d_nope"),
    Size(
        "qk_rope_head_dim",
        "d_rope",
        default=64,
        must=(lambda values: values["d_rope"] % 2 == 0, EVEN),
        at="mixer.d_rope",
    ),
    Size("v_head_dim", "d_value", default=128, at="mixer.d_value"),
    Size("q_lora_rank", "q_rank", default=1536, null=0, at="mixer.q_rank"),
)
AS_MANY = (
    lambda values: values["n_kv_heads"] == values["n_heads"],
    lambda values: f"num_attention_heads = {values['n_heads']}, or null",
)


def keys(
    sizes: tuple[Key, ...], router: Group, *more: Key, d_expert: int, n_shared: int, n_dense: int, interleave: str = ""
) -> tuple[Key, ...]:
    """Returns the keys of one of these families: llama's `sizes`, a router, others, and what experts are like.

    `interleave` is the key that says whether RoPE pairs adjacent numbers, which it always does where there is none.
    """
    return (
        Derived(),
        Irrelevant("only shares out the same products", "ep_size"),
        Only("moe_layer_freq", 1, reason="every layer after the dense ones has experts"),
        Only("mlp_bias", False, None, reason="feed-forward parts have no biases here"),
        *WIDTHS,
        *but(
            sizes,
            n_heads={"at": "mixer.n_heads"},
            d_head=None,
            rotary=LatentRope(interleave=interleave, width=lambda values: values["d_rope"], at=_rotary_of),
            n_kv_heads={"at": "mixer.n_heads", "divides": "", "must": AS_MANY},
            d_ff=experts.dense,
        ),
        replace(ATTENTION_BIAS, at="mixer.output_bias"),
        router,
        *experts.fine_grained(d_expert=d_expert, n_shared=n_shared, n_dense=n_dense),
        *more,
        RMS_EPS,
    )


def _by_head(block: Block, rows: tuple[int, ...]) -> Layout:
    body = next(branch.body for branch in block.branches if isinstance(branch.body, LatentAttention))
    return Interleave(body.n_heads, (body.d_nope, body.d_value))


# Latent and shared key are one tensor; so are each head's key and value maps, head by head.
PLAIN_NAMES = Names(
    stems=STEMS,
    fused={
        "self_attn.kv_a_proj_with_mqa": Fused(stems=("attention.body.kv_down", "attention.body.k_rope")),
        "self_attn.kv_b_proj": Fused(stems=("attention.body.k_up", "attention.body.v_up"), join=_by_head),
    },
    experts=EXPERTS,
)
NAMES = predictors.named(PLAIN_NAMES)
