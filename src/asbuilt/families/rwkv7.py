"""The rwkv7 family: RWKV-7, a delta rule with decays per channel in the place of attention.

Peng et al. 2025 (arXiv 2503.14456). Keys and names are flash-linear-attention's, of files like RWKV7-Goose-World3;
other adapters of the same `model_type` have other keys, which are refused by name. transformers has no such class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Key, Only, Size, Values, depth, eps, tied
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import REQUIRED, ConfigReader, is_whole
from asbuilt.families.shared.table import Chain, Entry, Layout, Leading, Reshaped, Stacked, TensorTable
from asbuilt.spec import (
    Block,
    Branch,
    ChannelMixing,
    DeltaTimeMixing,
    Head,
    HeadNorm,
    LanguageModel,
    LayerNorm,
    Model,
    TiedHead,
    TokenEmbedding,
    TokenShift,
)
from asbuilt.spec.delta_time_mixing import TARGETS

FIRST = "first"  # the name of the first layer's values
# Added to the squared length of a removal key by the fused norm. The other divides by the length or 1e-12, the larger;
# to add the square of that differs for keys that short alone.
FUSED_EPS, PLAIN_EPS = 1e-6, 1e-24


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    d_ff: int,
    decay_rank: int,
    rate_rank: int,
    move_rank: int,
    gate_rank: int,
    d_head: int = 64,
    d_values: int | None = None,
    max_positions: int = 2048,
    eps: float = 1e-5,
    norm_first: bool = True,
    norm_bias: bool = True,
    fused: bool = False,
    tied: bool = False,
    name: str = "rwkv7",
) -> LanguageModel:
    """Returns the model of these sizes; `d_values` is the width of all values together, None for d_model.

    With `norm_first` the embedding is normalised; `fused` tells how removal keys are, see FUSED_EPS.
    """
    norm, n_heads = LayerNorm(d=d_model, eps=eps, bias=norm_bias), d_model // d_head
    d_value = (d_values or d_model) // n_heads
    time = DeltaTimeMixing(
        d_model=d_model,
        n_heads=n_heads,
        d_key=d_head,
        d_value=d_value,
        shift=TokenShift(d_model=d_model, targets=TARGETS, of_past=True),
        norm=HeadNorm(d=d_value, n_heads=n_heads, eps=d_head * eps, bias=True),
        decay_rank=decay_rank,
        rate_rank=rate_rank,
        gate_rank=gate_rank,
        length_eps=FUSED_EPS if fused else PLAIN_EPS,
    )
    shift = TokenShift(d_model=d_model, targets=("up",), belongs="ffn", of_past=True)
    body = ChannelMixing(d_model=d_model, d_ff=d_ff, shift=shift, receptance=False)
    channel = Branch(name="channel", norm=norm, body=body)
    first = replace(time, value_name=FIRST if n_layers > 1 else None)
    later = replace(time, value_from=FIRST, move_rank=move_rank)
    kinds = (first, *(later,) * (n_layers - 1))
    return LanguageModel(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        embedding_norm=norm if norm_first else None,
        blocks=tuple(Block(branches=(Branch(name="time", norm=norm, body=one), channel)) for one in kinds),
        norm=norm,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        name=name,
    )


def _time(parts: Parts, layer: int = 0) -> DeltaTimeMixing:
    body = parts.model.blocks[layer].branches[0].body
    return parts.expect(body, DeltaTimeMixing, f"blocks.{layer}.time.body")


class _Heads:
    """Width of a head: `head_dim`, or where that is null what `num_heads` makes of the stream's."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width; where it is given nothing else is read, as published files repeat another number."""
        d_model = values["d_model"]
        if reader.config.get("head_dim", 64) is None:
            n_heads = reader.size("num_heads")
            reader.require("num_heads", d_model % n_heads == 0, f"a divisor of hidden_size = {d_model}")
            values["d_head"] = d_model // n_heads
            reader.known.add("head_dim")
        else:
            values["d_head"] = reader.size("head_dim", default=64)
            allowed = f"a divisor of hidden_size = {d_model}"
            reader.require("head_dim", d_model % values["d_head"] == 0, allowed)
        reader.irrelevant("num_heads", "follows from head_dim")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width, and how many heads that makes."""
        return {"head_dim": _time(parts).d_key, "num_heads": _time(parts).n_heads}


class _Values:
    """Width of all values together: `value_dim`, one number or a list of one for each layer, all the same."""

    key = "value_dim"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width, which is the stream's where none is given."""
        said, n_layers, n_heads = reader.config.get(self.key), values["n_layers"], values["d_model"] // values["d_head"]
        reader.known.add(self.key)
        if said is None:
            return
        widths = [said] * n_layers if is_whole(said) else said
        same = isinstance(widths, list) and len(widths) == n_layers and all(is_whole(one) for one in widths)
        ok = same and len({*widths}) == 1 and widths[0] > 0 and widths[0] % n_heads == 0
        allowed = f"a multiple of the {n_heads} heads, or a list of it for each of the {n_layers} layers"
        reader.require(self.key, ok, allowed)
        values["d_values"] = widths[0]

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        return {self.key: [_time(parts).d_output] * parts.n_layers}


class _HiddenWidth:
    """Width of the feed-forward: `intermediate_size`, or where that is null hidden_ratio * hidden_size, up to 32s."""

    key, ratio = "intermediate_size", "hidden_ratio"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width."""
        if reader.given(self.key):
            values["d_ff"] = reader.size(self.key)
        else:
            times = reader.number(self.ratio, default=4, null=4, most=1024)
            values["d_ff"] = -(-int(values["d_model"] * times) // 32) * 32
            reader.require(self.ratio, values["d_ff"] > 0, "such that the feed-forward has a width")
        reader.irrelevant(self.ratio, "the width follows from it only where intermediate_size is null")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width."""
        body = parts.expect(parts.last.body, ChannelMixing, "blocks.0.channel.body")
        return {self.key: body.d_ff}


def _rank(key: str, into: str) -> Size:
    """Returns the key of a rank, which must be said: versions of the class have other defaults."""
    return Size(key, into, default=REQUIRED, at=lambda parts: getattr(_time(parts), into))


def _move_rank(parts: Parts) -> int:
    """Returns the rank of the maps that the first layer lacks; of a model of one layer what its config said."""
    found = _time(parts, -1).move_rank
    return parts.carried.get("v_low_rank_dim", 32) if found is None else found


KEYS: tuple[Key, ...] = (  # defaults as in flash-linear-attention's RWKV7Config
    Size("hidden_size", "d_model", default=2048),
    Size("vocab_size", "n_vocab", default=32000),
    depth("num_hidden_layers", 24),
    Size("max_position_embeddings", "max_positions", default=2048),
    _Heads(),
    _Values(),
    _HiddenWidth(),
    _rank("decay_low_rank_dim", "decay_rank"),
    _rank("a_low_rank_dim", "rate_rank"),
    _rank("gate_low_rank_dim", "gate_rank"),
    Size("v_low_rank_dim", "move_rank", default=REQUIRED, at=_move_rank, carried="the first layer has no such map"),
    Flag("norm_first", "norm_first", default=True, at=lambda parts: parts.model.embedding_norm is not None),
    Flag("norm_bias", "norm_bias", default=True, at="first.norm.bias"),
    replace(eps("norm_eps", 1e-5), at="first.norm.eps"),
    Flag("fuse_norm", "fused", default=True, at=lambda parts: _time(parts).length_eps == FUSED_EPS),
    tied(False),
    Only("hidden_act", "sqrelu", reason="the feed-forward of this family squares a ReLU"),
    Only("attn", None, reason="layers of attention between those of this family are not supported"),
    Irrelevant("how it is computed, not what", "attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy"),
    Irrelevant("of the loss in training", "use_l2warp"),
)

SHIFTED = {"r": "x_r", "decay": "x_w", "k": "x_k", "v": "x_v", "rate": "x_a", "gate": "x_g"}
PAIRS = {"decay": "w", "rate": "a", "move": "v", "gate": "g"}
STEMS = {
    "time.norm": "attn_norm",
    "channel.norm": "ffn_norm",
    **{f"time.body.{part}": f"attn.{part}_proj" for part in "rkvo"},
    **{f"time.body.{part}_down": f"attn.{name}_lora.lora.0" for part, name in PAIRS.items()},
    **{f"time.body.{part}": f"attn.{name}_lora.lora.2" for part, name in PAIRS.items()},
    **{f"time.body.shift.{part}": f"attn.{name}" for part, name in SHIFTED.items()},
    "time.body.removal": "attn.k_k",
    "time.body.replacement": "attn.k_a",
    "time.body.bonus": "attn.r_k",
    "time.body.norm": "attn.g_norm",
    "channel.body.up": "ffn.key",
    "channel.body.down": "ffn.value",
    "channel.body.shift.up": "ffn.x_k",
}
OUTSIDE = {
    "embedding": "model.embeddings",
    "embedding_norm": "model.layers.0.pre_norm",
    "norm": "model.norm",
    "head": "lm_head",
}


def table(spec: Model, family: str) -> TensorTable:
    """Returns the names; norms of heads are stored as vectors, and in older files the factors of a shift as one."""
    first = spec.blocks[0].branches[0].body
    layouts: dict[str, Layout] = {f"time.body.shift.{part}": Leading(2) for part in SHIFTED}
    if isinstance(first, DeltaTimeMixing):
        layouts["time.body.norm"] = Reshaped((first.n_heads, first.d_value), (first.d_output,))
    made = Names(stems=STEMS, outside=OUTSIDE, layouts=layouts, ignored={})(spec, family)
    joined = tuple(
        Entry(
            paths=tuple(f"blocks.{i}.time.body.shift.{part}" for part in SHIFTED),
            names=(f"model.layers.{i}.attn.x_x",),
            layout=Chain((Leading(2), Stacked())),
        )
        for i in range(spec.n_layers)
    )
    return replace(made, joined=joined)


FAMILY = Family(name="rwkv7", heads=("RWKV7ForCausalLM",), keys=KEYS, build=build, names=table)
