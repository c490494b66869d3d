"""Transformer blocks whose weights are used at several depths, beside the stream (Zamba, arXiv 2405.16712).

Any part may share its weights so: it `lends` them under a name, and an equal part later in the stack `borrows` them.
They are held once, but each use has its own products, cache and saved tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.attention import Attention
from asbuilt.spec.feedforward import GatedMLP
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Part, Pass, Product, require, require_names, require_sizes


@dataclass(frozen=True, kw_only=True)
class SharedTransformer(Part):
    """ffn(ffn_norm(attention(norm([x, x_0])))), without residual connections; x_0 is the stream before the first block.

    Its weights are lent under the name `weights_name`, or those of the earlier part that lends them as `weights_from`.
    """

    norm: Norm | None = None
    """Norm of the stream and x_0, joined."""
    attention: Attention
    """Attention from both to the width of the stream."""
    ffn_norm: Norm | None = None
    """Norm of what attention gives."""
    ffn: GatedMLP
    """The feed-forward."""
    weights_name: str | None = None
    """Name under which later parts use these weights; None if none does."""
    weights_from: str | None = None
    """Name of the earlier part whose weights these are; None for its own."""

    def __post_init__(self) -> None:
        for name, kind in (("attention", Attention), ("ffn", GatedMLP)):
            require(self, name, isinstance(getattr(self, name), kind), f"a part of kind {kind.__name__}")
        wide, d_model = 2 * self.d_model, self.d_model
        require(self, "attention", self.attention.input_width == wide, f"attention whose d_input is {wide}")
        require(self, "norm", self.norm is None or self.norm.d == wide, f"a norm over {wide} numbers")
        require(self, "ffn", self.ffn.d_model == d_model, f"d_model = {d_model} as in the attention")
        fits = self.ffn_norm is None or self.ffn_norm.d == d_model
        require(self, "ffn_norm", fits, f"a norm over d_model = {d_model}")
        require(self, "ffn", self.ffn.clamp is None, "a feed-forward without clamps")
        require_names(self, "weights_name", "weights_from")
        both = self.weights_name is not None and self.weights_from is not None
        require(self, "weights_name", not both, "none: its weights are another's")

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.attention.d_model

    @property
    def lends(self) -> str | None:
        """Its `weights_name`."""
        return self.weights_name

    @property
    def borrows(self) -> str | None:
        """Its `weights_from`."""
        return self.weights_from


@dataclass(frozen=True, kw_only=True)
class SideTransformer(Mapped):
    """project(shared(x)), of which `project` belongs to this depth alone.

    So do low-rank maps (Zamba2, arXiv 2411.15242). What is added to the feed-forward's gate and up is, with its input
    h, adapt_gate(adapt(h)) and adapt_up(adapt(h)), `rank` numbers wide in between; what is added to the attention's q,
    before norms and RoPE, is q_up(q_down(x)) with its input x, `attention_rank` wide, and to k and v likewise. Unlike
    adapters they are no addition to frozen weights.
    """

    shared: SharedTransformer
    """The transformer, whose weights other depths may use too."""
    rank: int | None = None
    """Width between the low-rank maps beside the feed-forward; None for none."""
    attention_rank: int | None = None
    """Width between those beside the attention's q, k and v; None for none."""
    project: Map | None = None
    """Replaces the plain map of the result, if given."""
    adapt: Map | None = None
    """Replaces the plain map to `rank` numbers, if given."""
    adapt_gate: Map | None = None
    """Replaces the plain map from there to the gate, if given."""
    adapt_up: Map | None = None
    """Replaces the plain map from there beside up, if given."""
    q_down: Map | None = None
    """Replaces the plain map beside q to `attention_rank` numbers, if given."""
    q_up: Map | None = None
    """Replaces the plain map from there, if given."""
    k_down: Map | None = None
    """As `q_down`, beside k."""
    k_up: Map | None = None
    """As `q_up`, beside k."""
    v_down: Map | None = None
    """As `q_down`, beside v."""
    v_up: Map | None = None
    """As `q_up`, beside v."""

    def __post_init__(self) -> None:
        require_sizes(self, *(name for name in ("rank", "attention_rank") if getattr(self, name) is not None))
        attention = self.shared.attention
        own = attention.inward == ("q", "k", "v") and not attention.caches_input
        allowed = "none, unless attention has maps of q, k and v of its own and caches what they give"
        require(self, "attention_rank", own or self.attention_rank is None, allowed)
        self.require_maps()

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.shared.d_model

    def plain_maps(self) -> dict[str, Linear]:
        """project (d_model to d_model), and low-rank maps: adapt (d_model to rank) and two from there to d_ff.

        Of each of q, k and v one from the attention's input to attention_rank, and one from there.
        """
        maps = {"project": Linear(d_in=self.d_model, d_out=self.d_model)}
        if self.rank is not None:
            out = Linear(d_in=self.rank, d_out=self.shared.ffn.d_ff, split="out", belongs="ffn")
            into = Linear(d_in=self.d_model, d_out=self.rank, belongs="ffn")
            maps |= {"adapt": into, "adapt_gate": out, "adapt_up": out}
        if self.attention_rank is not None:
            attention = self.shared.attention
            into = Linear(d_in=attention.input_width, d_out=self.attention_rank, belongs="attention")
            for name in attention.inward:
                wide = attention.maps[name].plain.d_out
                up = Linear(d_in=self.attention_rank, d_out=wide, split="out", belongs="attention")
                maps |= {f"{name}_down": into, f"{name}_up": up}
        return maps

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once."""
        return self.map_products(run, *self.maps)
