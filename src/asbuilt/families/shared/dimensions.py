"""What decoders are built of: their dimensions, and the parts that these make.

A family says which parts its blocks are made of; `Dimensions` knows how wide they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict, TypeVar

from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    FeedForward,
    GatedMLP,
    Head,
    HeadNorm,
    LanguageModel,
    Mixer,
    MixtureOfExperts,
    Model,
    Norm,
    Parallel,
    Predictor,
    RMSNorm,
    Rotary,
    Router,
    SharedEmbedding,
    SharedHead,
    TiedHead,
    TokenEmbedding,
)

W = TypeVar("W", bound=Model)


class Sizes(TypedDict):
    """What the `build` functions of decoders take by name, and hand on to `sized`."""

    n_vocab: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: NotRequired[int | None]
    d_head: NotRequired[int | None]
    d_ff: NotRequired[int]
    max_positions: int
    rotary: NotRequired[Rotary]
    activation: NotRequired[Activation]
    tied: NotRequired[bool]
    name: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes of a stack; d_head None means that RoPE covers whole heads, rotary.d_rotary wide."""

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

    def attention(
        self,
        *,
        rope: bool = True,
        adjacent: bool = False,
        scale: float | None = None,
        **fields: Any,  # noqa: ANN401
    ) -> Attention:
        """Returns attention with `rope` or without, scores times `scale` (None for d_head^-0.5), and other `fields`.

        RoPE pairs `adjacent` numbers of a head, or one from either half.
        """
        rotary = replace(self.rotary, pairing="adjacent") if self.rotary is not None and adjacent else self.rotary
        made: dict[str, Any] = {
            "n_kv_heads": self.n_kv_heads,
            "d_head": self.head_width,
            "positions": rotary if rope else None,
            "scale": None if scale == self.head_width**-0.5 else scale,
        }
        return Attention(d_model=self.d_model, n_heads=self.n_heads, **(made | fields))

    def whole_normed_attention(self, bias: bool, eps: float) -> Attention:
        """Returns attention with one RMSNorm over the queries of all heads together, and one over all keys."""
        q_norm, k_norm = (RMSNorm(d=heads * self.head_width, eps=eps) for heads in (self.n_heads, self.n_kv_heads))
        return self.attention(bias=bias, output_bias=bias, q_norm=q_norm, k_norm=k_norm)

    def head_norms(self, eps: float) -> dict[str, Any]:
        """Returns norms of q and k with gains for each head, as fields of attention."""
        heads = {"q_norm": self.n_heads, "k_norm": self.n_kv_heads}
        return {name: HeadNorm(d=self.head_width, n_heads=n, eps=eps) for name, n in heads.items()}

    def gated(self, bias: bool = False, **fields: Any) -> GatedMLP:  # noqa: ANN401
        """Returns the gated feed-forward part."""
        return GatedMLP(d_model=self.d_model, d_ff=self.d_ff, activation=self.activation, bias=bias, **fields)

    def plain(self, bias: bool = False) -> MLP:
        """Returns the feed-forward part of two matrices."""
        return MLP(d_model=self.d_model, d_ff=self.d_ff, activation=self.activation, bias=bias)

    def mixture(
        self,
        router: Router,
        d_expert: int | None = None,
        n_shared: int | None = None,
        d_shared: int | None = None,
        shared_gate: bool = False,
    ) -> MixtureOfExperts:
        """Returns the mixture of experts, each `d_expert` wide (None for d_ff), the shared ones together as one.

        That one is `d_shared` wide, or as wide as `n_shared` of the others, and may have a gate.
        """
        width = d_expert or self.d_ff
        wide = d_shared if n_shared is None else n_shared * width
        return MixtureOfExperts(
            d_model=self.d_model,
            d_ff=width,
            n_experts=router.n_experts,
            activation=self.activation,
            router=router,
            shared=None if wide is None else replace(self.gated(), d_ff=wide),
            shared_gate=shared_gate,
        )

    def model(self, blocks: tuple[Block, ...], norm: Norm | None, **parts: Any) -> LanguageModel:  # noqa: ANN401
        """Returns the language model of these blocks; `parts` are what `whole` takes."""
        return self.whole(LanguageModel, blocks, norm, **parts)

    def whole(
        self,
        kind: type[W],
        blocks: tuple[Block, ...],
        norm: Norm | None,
        *,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        head_bias: bool = False,
        **parts: Any,  # noqa: ANN401
    ) -> W:
        """Returns the whole of this kind, with `norm` before the head; other `parts` are its own fields."""
        made: dict[str, Any] = {"max_positions": self.max_positions, **parts}
        table: dict[str, Any] = {"n_vocab": self.n_vocab, "d_model": self.d_model}
        if "embedding" not in made:
            made["embedding"] = TokenEmbedding(**table, scale=embedding_scale)
        if "head" not in made:
            head = TiedHead if self.tied else Head
            made["head"] = head(**table, scale=logit_scale, softcap=logit_softcap, bias=head_bias)
        return kind(blocks=blocks, norm=norm, name=self.name, **made)


def sized(sizes: Mapping[str, Any], **usual: Any) -> Dimensions:  # noqa: ANN401
    """Returns the dimensions, `usual` where the sizes do not say; no d_ff is 4 * d_model, no n_kv_heads is n_heads."""
    found: dict[str, Any] = usual | dict(sizes)
    found["n_kv_heads"] = found.get("n_kv_heads") or found["n_heads"]
    return Dimensions(**{"d_ff": 4 * found["d_model"], **found})


def pre_norm(attention: Mixer, ffn: FeedForward, norm: Norm, scale: float = 1.0, *, parallel: bool = False) -> Block:
    """Returns the block x + scale * attention(norm(x)), then the same of the feed-forward part, or `parallel` to it."""
    return residual(attention, ffn, norm, None, scale, parallel=parallel)


def residual(
    attention: Mixer,
    ffn: FeedForward,
    before: Norm | None,
    after: Norm | None,
    scale: float = 1.0,
    *,
    parallel: bool = False,
) -> Block:
    """Returns the block x + scale * after(attention(before(x))), then the same of the feed-forward part.

    Either norm may be absent; a `parallel` feed-forward part reads what attention reads.
    """
    alike: dict[str, Any] = {"norm": before, "post_norm": after, "scale": scale}
    first = Branch(name="attention", body=attention, **alike)
    return Block(branches=(first, Branch(name="ffn", body=ffn, parallel=parallel, **alike)))


def parallel_block(attention: Attention, ffn: FeedForward, norm: Norm) -> Block:
    """Returns the block x + attention(norm(x)) + ffn(norm(x)), its one branch named `parallel`."""
    return Block(branches=(Branch(name="parallel", body=Parallel(attention=attention, ffn=ffn), norm=norm),))


def with_predictors(
    spec: LanguageModel, block: Block, norm: Norm, count: int, *, shared: bool = False
) -> LanguageModel:
    """Returns the model with `count` prediction layers of the block.

    Each has an embedding and a head of its own, or those of the model where they are `shared`.
    """
    sizes: dict[str, Any] = {"n_vocab": spec.n_vocab, "d_model": spec.d_model}
    predictor = Predictor(
        embedding=SharedEmbedding(**sizes) if shared else TokenEmbedding(**sizes),
        token_norm=norm,
        stream_norm=norm,
        block=block,
        norm=norm,
        head=SharedHead(**sizes, tied=isinstance(spec.head, TiedHead)) if shared else Head(**sizes),
    )
    return replace(spec, predictors=(predictor,) * count)
