"""The config keys that decoders share with llama: sizes, heads, RoPE, windows.

Their values are what `Sizes` holds. A family states its class defaults, and keys of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict, Unpack

from asbuilt.families.shared.common import divide, read_layer_types
from asbuilt.families.shared.key import (
    Check,
    Declared,
    Flag,
    Irrelevant,
    Key,
    Optional,
    Size,
    Values,
    activation,
    depth,
    eps,
    tied,
)
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.rotary import Rope
from asbuilt.spec import Attention

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
EVEN = "an even number (RoPE rotates pairs)"
RMS_EPS = eps("rms_norm_eps", 1e-6)
ATTENTION_BIAS = Flag("attention_bias", "bias", default=False)
MLP_BIAS = Flag("mlp_bias", "mlp_bias", default=False)


class HeadWidth:
    """`head_dim`; missing means `default`, or where that is None d_model / n_heads; `at` is the layer that has it."""

    into = "d_head"
    keys = ("head_dim",)

    def __init__(
        self, default: int | None = None, at: Callable[[Parts], Attention] = lambda parts: parts.attention
    ) -> None:
        self.default, self.at = default, at

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width, an even number because RoPE rotates pairs."""
        key = "head_dim"
        if self.default is not None or reader.given(key):
            values["d_head"] = reader.size(key, default=self.default or values["d_model"])
            reader.require(key, values["d_head"] % 2 == 0, EVEN)
            return
        values["d_head"] = width = head_width(reader, values)
        if width % 2:
            whole, heads = (reader.names[name] for name in ("d_model", "n_heads"))
            raise reader.error(key, f"missing, and {whole} / {heads} is odd", value=width, allowed=EVEN)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width."""
        return {"head_dim": self.at(parts).d_head}


class DerivedHeadWidth(Declared):
    """Heads d_model / n_heads wide, which no key says; `even` where RoPE rotates pairs."""

    into = "d_head"

    def __init__(self, *, even: bool = False) -> None:
        self.even = even

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Raises InputError where that leaves a remainder, or an odd width that has to be even."""
        values["d_head"] = width = head_width(reader, values)
        allowed = f"an even multiple of the {values['n_heads']} heads (RoPE rotates pairs)"
        reader.require(reader.names["d_model"], not self.even or width % 2 == 0, allowed)


def head_width(reader: ConfigReader, values: Values) -> int:
    """Returns d_model / n_heads; raises InputError naming both keys where that leaves a remainder."""
    whole, heads = (reader.names[name] for name in ("d_model", "n_heads"))
    return divide(reader, values["d_model"], whole, values["n_heads"], heads)


class NullableHeadWidth(HeadWidth):
    """A `head_dim` that is carried, so that a null, which means d_model / n_heads, stays one."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width."""
        null = reader.config.get("head_dim", self.default) is None
        HeadWidth(None if null else self.default).read(reader, values)
        reader.irrelevant("head_dim", "carried so that a null, hidden_size / num_attention_heads, stays one")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width, or null."""
        (key, width), carried = *super().write(parts).items(), parts.carried
        null = carried.get(key, width) is None and parts.attention.d_query == parts.d_model
        return {key: None if null else width}


def four_times(values: Values) -> int:
    """Returns 4 * d_model, the usual width of a feed-forward."""
    return 4 * values["d_model"]


def whole_width(reason: str) -> Check:
    """Returns the check that all heads together are as wide as the stream, for this reason."""
    same = lambda values: values["n_heads"] * values["d_head"] == values["d_model"]  # noqa: E731
    return Check("head_dim", (same, f"hidden_size / num_attention_heads ({reason})"))


def kv_heads(default: int | None) -> Size:
    """Returns the key of the number of key/value heads, which null and a `default` of None make as many as heads."""
    as_many: Callable[[Values], int] = lambda values: values["n_heads"]  # noqa: E731
    return Size(
        "num_key_value_heads",
        "n_kv_heads",
        default=default or as_many,
        null=as_many,
        derived=default is None,
        divides="n_heads",
    )


class Defaults(TypedDict):
    """The class defaults of the keys that `sizes` returns."""

    n_vocab: int
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    context: int
    n_kv_heads: NotRequired[int]
    d_head: NotRequired[int]
    theta: NotRequired[float]
    act: NotRequired[str]
    ties: NotRequired[bool]


def sizes(**defaults: Unpack[Defaults]) -> tuple[Key, ...]:
    """Returns the keys of a decoder's sizes, in the order in which they are read, with these class defaults.

    No `n_kv_heads` means as many as heads, no `d_head` d_model / n_heads.
    """
    return (
        Size("hidden_size", "d_model", default=defaults["d_model"]),
        Size("num_attention_heads", "n_heads", default=defaults["n_heads"]),
        HeadWidth(defaults.get("d_head")),
        Size("max_position_embeddings", "max_positions", default=defaults["context"]),
        Rope(theta=defaults.get("theta", 10000.0)),
        Size("vocab_size", "n_vocab", default=defaults["n_vocab"]),
        depth("num_hidden_layers", defaults["n_layers"]),
        kv_heads(defaults.get("n_kv_heads")),
        Size("intermediate_size", "d_ff", default=defaults["d_ff"]),
        activation(default=defaults.get("act", "silu")),
        tied(defaults.get("ties", False)),
    )


def window(default: int | None) -> Optional:
    """Returns the key of the window that all layers have, where it is not null."""
    return Optional("sliding_window", "window", default=default)


class LayerWindows:
    """Each layer's window, or chunk: `layer_types` names the layers of that `kind`, `key` says how many tokens it has.

    `usual` says which layers those are where no types are listed; a key `switch` may disable them all. A null size
    makes all layers full, or with `required` is refused. What a config without such layers says is carried.
    """

    def __init__(
        self,
        *,
        default: int | None,
        usual: Callable[[ConfigReader, Values], Sequence[bool]],
        key: str = "sliding_window",
        kind: str = SLIDING,
        switch: str = "",
        required: bool = False,
    ) -> None:
        self.default, self.usual, self.key, self.kind, self.switch = default, usual, key, kind, switch
        self.required, self.into = required, "chunks" if kind == CHUNKED else "windows"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the sizes; raises InputError for a layer that needs one and has none."""
        Optional(self.key, "size", default=self.default).read(reader, own := {"used": True})
        if self.switch:
            Flag(self.switch, "used", default=False).read(reader, own)
        size = own["size"] if own["used"] else None
        some = size is not None or self.required
        usual = tuple(self.kind if some and one else FULL for one in self.usual(reader, values))
        types = read_layer_types(reader, usual, (FULL, self.kind))
        if self.kind not in types:
            Irrelevant("no layer has one", *filter(None, (self.key, self.switch))).read(reader, values)
        elif size is None:
            needs = f"{self.switch} and a {self.key}" if self.switch else f"a {self.key}"
            raise reader.error("layer_types" if self.switch else self.key, f"{self.kind} needs {needs}")
        values[self.into] = tuple(size if kind == self.kind else None for kind in types)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys; where no layer has a window, those that were carried."""
        found = [layer.chunk if self.kind == CHUNKED else layer.window for layer in parts.attentions]
        size = next((one for one in found if one is not None), None)
        types = {"layer_types": [FULL if one is None else self.kind for one in found]}
        if size is not None:
            return types | ({self.switch: True} if self.switch else {}) | {self.key: size}
        unused = {self.switch: False, self.key: None} if self.switch else {}
        return types | unused | {key: parts.carried[key] for key in unused if key in parts.carried}


class LaterWindows(LayerWindows):
    """Windows of the layers from `max_window_layers` on, `first` by default, unless `layer_types` says."""

    key_of_first = "max_window_layers"

    def __init__(self, first: int = 28, switch: str = "use_sliding_window") -> None:
        super().__init__(default=4096, usual=self._from_a_layer_on, switch=switch)
        self.first = first

    def _from_a_layer_on(self, reader: ConfigReader, values: Values) -> list[bool]:
        first = reader.size(self.key_of_first, default=self.first, least=0)
        reader.irrelevant(self.key_of_first, "layer_types, as it is written, says it")
        reader.overruled(self.key_of_first, "layer_types")
        return [i >= first for i in range(values["n_layers"])]

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the windows."""
        super().read(reader, values)
        if not any(values["windows"]):
            reader.defaults.pop(self.key_of_first, None)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys."""
        windowed = (i for i, attention in enumerate(parts.attentions) if attention.window is not None)
        first = next(windowed, parts.n_layers)
        return super().write(parts) | {self.key_of_first: parts.carried.get(self.key_of_first, first)}


class RopeLayers:
    """Which layers have RoPE: `no_rope_layers` has a 1 for those; else all but each interval's last.

    With `empty_too` an empty list counts as missing.
    """

    def __init__(self, *, interval: int = 4, empty_too: bool = False) -> None:
        self.interval, self.empty_too = interval, empty_too

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers; raises InputError for a list that says too few of them."""
        n_layers, key = values["n_layers"], "no_rope_layers"
        interval = reader.size("no_rope_layer_interval", default=self.interval)
        reader.overruled("no_rope_layer_interval", key)
        reader.irrelevant("no_rope_layer_interval", f"{key}, as it is written, says it")
        values["rope_layers"] = every_but_last(n_layers, interval)
        if reader.given(key) and not (self.empty_too and reader.config[key] == []):
            said = reader.config[key]
            ok = isinstance(said, list) and len(said) >= n_layers and all(is_whole(x) and x in (0, 1) for x in said)
            reader.require(key, ok, f"a list of at least {n_layers} values, 1 (RoPE) or 0 (none)")
            values["rope_layers"] = tuple(x == 1 for x in said[:n_layers])

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        return {"no_rope_layers": [int(layer.positions is not None) for layer in parts.attentions]}


def every_but_last(n_layers: int, interval: int) -> tuple[bool, ...]:
    """Returns True for all layers but each interval's last."""
    return tuple((i + 1) % interval != 0 for i in range(n_layers))


class DualChunks(Declared):
    """`dual_chunk_attention_config`, which Qwen's million-token models carry for engines that support it.

    transformers does not read it, and attends as usual. Parameters, FLOPs of all scores and cache are the same. An et
    al. 2024 (arXiv 2402.17463): within chunk_size - local_size tokens the two are the same.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the object, and leaves a note."""
        key = "dual_chunk_attention_config"
        inner = reader.nested(key)
        if inner is None:
            reader.known.add(key)
            return
        chunk, local = inner.size("chunk_size"), inner.size("local_size")
        inner.require("local_size", local < chunk, f"less than chunk_size = {chunk}")
        inner.irrelevant("original_max_position_embeddings", "the chunks say it")
        for name in ("config", "enabled", "threshold", "last_q"):
            inner.irrelevant(f"sparse_attention_{name}", "which scores an engine leaves out")
        inner.finish()
        note = f"attention is full, as in transformers: engines that chunk it differ beyond {chunk - local} tokens"
        reader.note(key, "transformers does not read it", note)
