"""The config keys that decoders share with llama: sizes, heads, rotary positions, windows.

Their values make `Dimensions`, which families build with. A family states its class defaults, and keys of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NotRequired, TypedDict, Unpack

from asbuilt.families.shared.common import divide, read_layer_types
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.key import Flag, Group, Key, Optional, Size, Values, activation, depth, eps, tied
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.rotary import Rope

FULL, SLIDING = "full_attention", "sliding_attention"
RMS_EPS = eps("rms_norm_eps", 1e-6)
ATTENTION_BIAS = Flag("attention_bias", "bias", default=False)
MLP_BIAS = Flag("mlp_bias", "mlp_bias", default=False)


class HeadWidth:
    """`head_dim`; missing means `default`, or where that is None the stream's width shared out over the heads."""

    def __init__(self, default: int | None = None) -> None:
        self.default = default

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width, an even number because pairs of numbers turn."""
        key, even = "head_dim", "an even number: rotary positions turn pairs"
        if self.default is not None or reader.given(key):
            values["d_head"] = reader.size(key, default=self.default or values["d_model"])
            reader.require(key, values["d_head"] % 2 == 0, even)
            return
        whole, heads = (reader.names[name] for name in ("d_model", "n_heads"))
        values["d_head"] = width = divide(reader, values["d_model"], whole, values["n_heads"], heads)
        if width % 2:
            raise reader.error(key, f"missing, and {whole} / {heads} is odd", value=width, allowed=even)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width."""
        return {"head_dim": parts.d_head}


class SharedOut:
    """Heads that share out the stream's width, which no key says; `even` where rotary positions turn pairs."""

    def __init__(self, *, even: bool = False) -> None:
        self.even = even

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Raises InputError where that leaves a remainder, or an odd width that has to be even."""
        whole, heads = (reader.names[name] for name in ("d_model", "n_heads"))
        width = divide(reader, values["d_model"], whole, values["n_heads"], heads)
        allowed = f"an even multiple of the {values['n_heads']} heads: rotary positions turn pairs"
        reader.require(whole, not self.even or width % 2 == 0, allowed)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns nothing."""
        return {}


class CarriedWidth(HeadWidth):
    """A `head_dim` that is carried, so that a null, which means the stream's width shared out, stays one."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width."""
        super().read(reader, values)
        reader.irrelevant(
            "head_dim", "carried so that a null, which means hidden_size / num_attention_heads, stays one"
        )

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width, or null."""
        (key, width), carried = *super().write(parts).items(), parts.carried
        null = carried.get(key, width) is None and parts.attention.d_query == parts.d_model
        return {key: None if null else width}


def key_heads(default: int | None) -> Size:
    """Returns the key of the number of key heads, which null and a `default` of None make as many as heads."""
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
    """The class defaults of the keys that `size_keys` returns: see there."""

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


def size_keys(
    but: Mapping[str, Key | None] | None = None, first: tuple[str, ...] = (), **defaults: Unpack[Defaults]
) -> tuple[Key, ...]:
    """Returns the keys of a decoder's sizes, in order, those of the values `first` before the others.

    Other arguments are the class's defaults. No `n_kv_heads` means as many as heads, no `d_head` the stream's width
    shared out. `but` has other keys for some of the values, None for those that no key says.
    """
    keys: dict[str, Key | None] = {
        "d_model": Size("hidden_size", "d_model", default=defaults["d_model"]),
        "n_heads": Size("num_attention_heads", "n_heads", default=defaults["n_heads"]),
        "d_head": HeadWidth(defaults.get("d_head")),
        "max_positions": Size("max_position_embeddings", "max_positions", default=defaults["context"]),
        "rotary": Rope(theta=defaults.get("theta", 10000.0)),
        "n_vocab": Size("vocab_size", "n_vocab", default=defaults["n_vocab"]),
        "n_layers": depth("num_hidden_layers", defaults["n_layers"]),
        "n_kv_heads": key_heads(defaults.get("n_kv_heads")),
        "d_ff": Size("intermediate_size", "d_ff", default=defaults["d_ff"]),
        "activation": activation(default=defaults.get("act", "silu")),
        "tied": tied(defaults.get("ties", False)),
    } | dict(but or {})
    ordered = {name: keys[name] for name in (*first, *keys)}
    return tuple(key for key in ordered.values() if key is not None)


def sizes(but: Mapping[str, Key | None] | None = None, **defaults: Unpack[Defaults]) -> Group:
    """Returns the keys that make `Dimensions`; arguments as those of `size_keys`."""
    keys = size_keys(but, **defaults)
    return Group("dimensions", Dimensions, keys, given=lambda values: {"name": values.pop("name")})


def window(default: int | None) -> Optional:
    """Returns the key of the window that all layers have, where it is not null."""
    return Optional("sliding_window", "window", default=default)


class LayerWindows:
    """Each layer's window: `layer_types` names the layers that have one, `use_sliding_window` may switch all off.

    `usual` tells which have one where no types are listed. Keys are carried too, so that what a config without windows
    says about them is written again.
    """

    def __init__(self, *, default: int | None, usual: Callable[[ConfigReader, Values], list[bool]]) -> None:
        self.default, self.usual = default, usual

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the windows; raises InputError for a sliding layer without one."""
        Optional("sliding_window", "size", default=self.default).read(reader, own := {})
        Flag("use_sliding_window", "used", default=False).read(reader, own)
        reader.irrelevant("sliding_window", "told by layer_types as it is written")
        reader.irrelevant("use_sliding_window", "told by layer_types as it is written")
        size = own["size"] if own["used"] else None
        usual = tuple(SLIDING if size is not None and slides else FULL for slides in self.usual(reader, values))
        sliding = [kind == SLIDING for kind in read_layer_types(reader, usual)]
        if any(sliding) and size is None:
            raise reader.error("layer_types", "sliding_attention needs use_sliding_window and a sliding_window")
        values["windows"] = tuple(size if slides else None for slides in sliding)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys; where no layer has a window, those that were carried."""
        windows = [layer.window for layer in parts.attentions]
        size = next((one for one in windows if one is not None), None)
        written = {"use_sliding_window": size is not None, "sliding_window": size}
        unused = {key: parts.carried[key] for key in written if key in parts.carried}
        types = [FULL if one is None else SLIDING for one in windows]
        return {"layer_types": types} | written | (unused if size is None else {})


class RopeLayers:
    """Which layers have positions: `no_rope_layers` has a 1 for those; else all but each interval's last.

    An empty list is none at all where it is `empty_too`.
    """

    def __init__(self, *, interval: int = 4, empty_too: bool = False) -> None:
        self.interval, self.empty_too = interval, empty_too

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers; raises InputError for a list that says too few of them."""
        n_layers, key = values["dimensions"].n_layers, "no_rope_layers"
        interval = reader.size("no_rope_layer_interval", default=self.interval)
        reader.overruled("no_rope_layer_interval", key)
        reader.irrelevant("no_rope_layer_interval", f"told by {key} as it is written")
        values["turned"] = every_but_last(n_layers, interval)
        if reader.given(key) and not (self.empty_too and reader.config[key] == []):
            said = reader.config[key]
            ok = isinstance(said, list) and len(said) >= n_layers and all(is_whole(x) and x in (0, 1) for x in said)
            reader.require(key, ok, f"a list of at least {n_layers} of 1 (rotary positions) and 0 (none)")
            values["turned"] = tuple(x == 1 for x in said[:n_layers])

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        return {"no_rope_layers": [int(layer.positions is not None) for layer in parts.attentions]}


def every_but_last(n_layers: int, interval: int) -> tuple[bool, ...]:
    """Returns True for all layers but each interval's last."""
    return tuple((i + 1) % interval != 0 for i in range(n_layers))


class DualChunks:
    """`dual_chunk_attention_config`, which Qwen's million-token models carry for engines that can do it.

    transformers does not read it, and attends as usual. Parameters, FLOPs of all scores and cache are the same. An et
    al. 2024 (arXiv 2402.17463): within chunk_size - local_size tokens the two are one and the same.
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
        inner.irrelevant("original_max_position_embeddings", "told by the chunks")
        for name in ("config", "enabled", "threshold", "last_q"):
            inner.irrelevant(f"sparse_attention_{name}", "which scores an engine leaves out")
        inner.finish()
        note = f"attention is whole, as in transformers: engines that chunk it differ beyond {chunk - local} tokens"
        reader.note(key, "transformers does not read it", note)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns nothing: what was carried is kept."""
        return {}
