"""The lfm2 family: gated short convolutions in most layers, llama's attention with normed heads in the others.

Liquid AI 2025 (arXiv 2511.23404). `intermediate_size` is adjusted, unless `block_auto_adjust_ff_dim` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from asbuilt.families.shared.common import read_layer_types
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import DROPPED, Flag, Irrelevant, Number, Only, Size, Values, but, eps
from asbuilt.families.shared.names import OUTSIDE, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.sizes import FULL, DerivedHeadWidth, sizes
from asbuilt.spec import Block, Branch, GatedConvolution, LanguageModel, RMSNorm, Router, ShortConvolution

CONV = "conv"
USUAL = 12288  # the class's default of the width, before it is adjusted


def build(
    *,
    conv_layers: Sequence[bool],
    kernel: int,
    conv_bias: bool = False,
    eps: float = 1e-5,
    router: Router | None = None,
    d_expert: int | None = None,
    n_dense: int = 0,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes, with a convolution in the `conv_layers` and attention in the others.

    With a `router` the layers after the first `n_dense` have experts of width `d_expert`.
    """
    made = sized(sizes, activation="silu")
    norm, per_head = (RMSNorm(d=d, eps=eps) for d in (made.d_model, made.head_width))
    conv = GatedConvolution(
        d_model=made.d_model,
        conv=ShortConvolution(channels=made.d_model, kernel=kernel, bias=conv_bias, activation=None),
        bias=conv_bias,
    )
    first = {
        True: Branch(name="convolution", norm=norm, body=conv),
        False: Branch(name="attention", norm=norm, body=made.attention(q_norm=per_head, k_norm=per_head)),
    }
    dense, experts = made.gated(), made.gated() if router is None else made.mixture(router, d_expert)
    kinds = [(one, i < n_dense) for i, one in enumerate(conv_layers)]
    blocks = {
        kind: Block(branches=(first[kind[0]], Branch(name="ffn", norm=norm, body=dense if kind[1] else experts)))
        for kind in set(kinds)
    }
    return made.model(tuple(map(blocks.__getitem__, kinds)), norm)


class Kinds:
    """Which layers have a convolution: `layer_types`, or all but those in the older `full_attn_idxs`."""

    key, older, into = "layer_types", "full_attn_idxs", "conv_layers"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers."""
        n_layers = values["n_layers"]
        full = reader.config[self.older] if reader.given(self.older) else list(range(n_layers))
        ok = isinstance(full, list) and all(is_whole(i) for i in full)
        reader.require(self.older, ok, "a list of layers")
        usual = tuple(FULL if i in full else CONV for i in range(n_layers))
        types = read_layer_types(reader, usual, (FULL, CONV))
        reader.irrelevant(self.older, f"{self.key}, as it is written, says it")
        values[self.into] = tuple(kind == CONV for kind in types)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the layers."""
        convolutions = (isinstance(block.branches[0].body, GatedConvolution) for block in parts.model.blocks)
        return {self.key: [CONV if one else FULL for one in convolutions]}


class _Width:
    """The width of the feed-forward: two thirds of the key's, times a factor, rounded up, or the key's own."""

    into = "d_ff"
    keys = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")

    def read(self, reader: ConfigReader, values: Values) -> None:
        size = reader.size(self._size(reader.config), default=USUAL)
        reader.irrelevant("block_ff_dim", "carried: it stands in the place of intermediate_size")
        reader.irrelevant("intermediate_size", "carried: the width follows from it")
        adjust, factor, multiple = self.keys
        Flag(adjust, "adjust", default=True).read(reader, own := {})
        Number(factor, "factor", default=1.0).read(reader, own)
        Size(multiple, "multiple", default=256).read(reader, own)
        for key in self.keys:
            reader.irrelevant(key, "carried: the width follows from it")
        values[self.into] = self._adjusted(size, **own)
        reader.require(self._size(reader.config), values[self.into] > 0, "wide enough to leave a feed-forward")

    @staticmethod
    def _size(config: dict[str, Any]) -> str:
        return "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"

    @staticmethod
    def _adjusted(size: int, adjust: bool, factor: float, multiple: int) -> int:
        if not adjust:
            return size
        return -(-int(factor * int(2 * size / 3)) // multiple) * multiple

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys as carried, if they still say the width; otherwise the width itself."""
        carried = parts.carried
        values: Values = {}
        names = ("block_ff_dim", "intermediate_size", *self.keys)
        kept = {key: carried[key] for key in names if key in carried}
        self.read(ConfigReader(dict(kept), "config"), values)
        if values[self.into] == parts.d_ff:
            return kept if self._size(kept) in kept else {**kept, "intermediate_size": USUAL}
        return dict.fromkeys(kept, DROPPED) | {"intermediate_size": parts.d_ff, self.keys[0]: False}


def convolution(parts: Parts) -> GatedConvolution:
    """Returns the first layer's convolution that there is."""
    bodies = (block.branches[0].body for block in parts.model.blocks)
    found = next((body for body in bodies if isinstance(body, GatedConvolution)), None)
    return parts.expect(found, GatedConvolution, "blocks")


TIED = Flag("tie_word_embeddings", "tied", default=True, also=("tie_embedding",))
KERNEL = Size("conv_L_cache", "kernel", default=3, at=lambda parts: convolution(parts).conv.kernel)
CONV_BIAS = Flag("conv_bias", "conv_bias", default=False, at=lambda parts: convolution(parts).bias)
STEMS = {
    "attention.norm": "operator_norm",
    "convolution.norm": "operator_norm",
    "ffn.norm": "ffn_norm",
    **{f"attention.body.{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attention.body.o": "self_attn.out_proj",
    **{f"attention.body.{name}_norm": f"self_attn.{name}_layernorm" for name in "qk"},
    "convolution.body.o": "conv.out_proj",
    "convolution.body.conv": "conv.conv",
    "ffn.body.gate": "feed_forward.w1",
    "ffn.body.up": "feed_forward.w3",
    "ffn.body.down": "feed_forward.w2",
}
ACTIVATION = Only("hidden_act", "silu", reason="the feed-forward is gated by SiLU, whatever the config says")
FUSED = {"conv.in_proj": Fused(stems=tuple(f"convolution.body.{name}" for name in "bcx"))}
NORM = OUTSIDE | {"norm": "model.embedding_norm"}
FAMILY = Family(
    name="lfm2",
    heads=("Lfm2ForCausalLM",),
    keys=(  # defaults as in transformers' Lfm2Config
        *but(
            sizes(
                n_vocab=65536,
                d_model=2560,
                d_ff=12288,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                context=128000,
                theta=1e6,
            ),
            d_head=DerivedHeadWidth(even=True),
            d_ff=_Width(),
            activation=None,
            tied=TIED,
        ),
        eps("norm_eps", 1e-5),
        Kinds(),
        KERNEL,
        CONV_BIAS,
        ACTIVATION,
        Only("block_use_swiglu", True, reason="the feed-forward is gated"),
        Only("use_pos_enc", True, reason="attention has RoPE"),
        Irrelevant(
            "repeats a key that is read, or initialisation only",
            "block_dim",
            "block_norm_eps",
            "block_mlp_init_scale",
            "block_out_init_scale",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",
        ),
    ),
    build=build,
    names=Names(stems=STEMS, outside=NORM, fused=FUSED),
)
