"""What decoders are built of: their dimensions, and the parts that these make.

A family says which parts its blocks are made of; `Dimensions` knows how wide they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    FeedForward,
    GatedMLP,
    Head,
    LearnedPositions,
    Mixer,
    Model,
    Norm,
    Parallel,
    RMSNorm,
    Rotary,
    TiedHead,
    TokenEmbedding,
)


class Widths(TypedDict):
    """What `build` functions take by name, and hand on to `sized`, if the longest context is theirs to say."""

    n_vocab: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: NotRequired[int | None]
    d_ff: NotRequired[int]
    rotary: NotRequired[Rotary]
    name: NotRequired[str]


class Sizes(Widths):
    """The same, with the longest context."""

    max_positions: int


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes of a decoder; d_head None means that RoPE is applied to whole heads, rotary.d_rotary wide."""

    n_vocab: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_positions: int
    rotary: Rotary | None = None
    activation: Activation = "silu"
    tied: bool = False
    d_head: int | None = None
    name: str = "model"

    @property
    def head_width(self) -> int:
        """Numbers of one head."""
        if self.d_head is None and self.rotary is not None:
            return self.rotary.d_rotary
        return self.d_head or self.d_model // self.n_heads

    @property
    def d_query(self) -> int:
        """Numbers of all heads' queries together."""
        return self.n_heads * self.head_width

    def attention(
        self,
        *,
        turned: bool = True,
        adjacent: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> Attention:
        """Returns attention whose heads are `turned`, or have no positions; scores times `scale`, None the usual.

        Pairs are those of `adjacent` numbers, or of one from either half.
        """
        rotary = replace(self.rotary, pairing="adjacent") if self.rotary is not None and adjacent else self.rotary
        return Attention(
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            d_head=self.head_width,
            positions=rotary if turned else None,
            bias=bias,
            output_bias=output_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            window=window,
            scale=None if scale == self.head_width**-0.5 else scale,
        )

    def whole_normed_attention(self, bias: bool, eps: float) -> Attention:
        """Returns attention with an RMSNorm over all heads' queries together, and one over all keys."""
        widths = (self.d_query, self.n_kv_heads * self.head_width)
        q_norm, k_norm = (RMSNorm(d=width, eps=eps) for width in widths)
        return self.attention(bias=bias, output_bias=bias, q_norm=q_norm, k_norm=k_norm)

    def gated(self, bias: bool = False) -> GatedMLP:
        """Returns the gated feed-forward part."""
        return GatedMLP(d_model=self.d_model, d_ff=self.d_ff, activation=self.activation, bias=bias)

    def plain(self, bias: bool = False) -> MLP:
        """Returns the feed-forward part of two matrices."""
        return MLP(d_model=self.d_model, d_ff=self.d_ff, activation=self.activation, bias=bias)

    def model(
        self,
        blocks: tuple[Block, ...],
        norm: Norm | None,
        *,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        head_bias: bool = False,
        embedding_norm: Norm | None = None,
        positions: LearnedPositions | None = None,
    ) -> Model:
        """Returns the model of these blocks, with `norm` before the head; what is looked up, and logits, are scaled."""
        head = TiedHead if self.tied else Head
        return Model(
            embedding=TokenEmbedding(n_vocab=self.n_vocab, d_model=self.d_model, scale=embedding_scale),
            positions=positions,
            embedding_norm=embedding_norm,
            blocks=blocks,
            norm=norm,
            head=head(
                d_model=self.d_model, n_vocab=self.n_vocab, scale=logit_scale, softcap=logit_softcap, bias=head_bias
            ),
            max_positions=self.max_positions,
            name=self.name,
        )


def sized(*, activation: Activation = "silu", tied: bool = False, d_ff: int | None = None, **sizes: Any) -> Dimensions:  # noqa: ANN401
    """Returns the dimensions; d_ff None means 4 * d_model, n_kv_heads None n_heads."""
    sizes["n_kv_heads"] = sizes.get("n_kv_heads") or sizes["n_heads"]
    return Dimensions(activation=activation, tied=tied, d_ff=d_ff or 4 * sizes["d_model"], **sizes)


def pre_norm(attention: Mixer, ffn: FeedForward, norm: Norm, scale: float = 1.0, *, parallel: bool = False) -> Block:
    """Returns the block x + scale * attention(norm(x)), then the same of the feed-forward part, or `parallel` to it."""
    first = Branch(name="attention", body=attention, norm=norm, scale=scale)
    return Block(branches=(first, Branch(name="ffn", body=ffn, norm=norm, scale=scale, parallel=parallel)))


def side_by_side(attention: Attention, ffn: FeedForward, norm: Norm) -> Block:
    """Returns the block x + attention(norm(x)) + ffn(norm(x)), its one branch named `parallel`."""
    return Block(branches=(Branch(name="parallel", body=Parallel(attention=attention, ffn=ffn), norm=norm),))
