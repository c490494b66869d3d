"""The config keys of Gemma 4: heads and RoPE by kind of layer, experts, per-layer embeddings, layers that share keys.

Defaults are as in transformers' Gemma4TextConfig.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.experts import MOST_EXPERTS
from asbuilt.families.shared.key import Values
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import KINDS, ORIGINAL, OUTSIDE, WHOLE, partial_factor, read_scaling
from asbuilt.families.shared.rotary import write_rotary_object as write_object
from asbuilt.families.shared.sizes import EVEN, FULL, SLIDING, every_but_last
from asbuilt.spec import Attention, GatedMLP, MixtureOfExperts, Proportional, Rotary

ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
PER_LAYER = "per_layer_config"


def with_ropes(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with the class's RoPE parameters where it has none."""
    return config if config.get("rope_parameters") is not None else config | {"rope_parameters": ROPE}


def usual_layers(reader: ConfigReader, values: Values) -> list[bool]:
    """Returns which layers have a window where none are listed: all but every sixth and the last."""
    return [*every_but_last(values["n_layers"], 6)[:-1], False]


def local(parts: Parts) -> Attention:
    """Returns the first attention with a window; the first of all where there is none."""
    return next((one for one in parts.attentions if one.window is not None), parts.attention)


def full(parts: Parts) -> Attention:
    """Returns the last attention, which has no window."""
    return parts.attentions[-1]


def dense(parts: Parts) -> GatedMLP:
    """Returns the first layer's feed-forward, which may be beside experts."""
    body = next((branch.body for branch in parts.model.blocks[0].branches if branch.name == "ffn"), None)
    found = body.shared if isinstance(body, MixtureOfExperts) else body
    return parts.expect(found, GatedMLP, "blocks.0.ffn.body")


class Heads:
    """Width and number of the key/value heads of full layers, and whether their values are their keys.

    Newer files say the first two by layer, in `per_layer_config`; they are written as the published ones say them.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the heads; raises InputError where layers of a kind differ."""
        same = reader.flag("attention_k_eq_v", default=False)
        width, n_kv_heads = self._by_layer(reader, values) if reader.given(PER_LAYER) else self._by_kind(reader, values)
        # without the flag the number of full layers' own heads is not read
        values["wide"], values["wide_kv_heads"] = width, n_kv_heads if same else values["n_kv_heads"]
        values["values_are_keys"] = same
        divides = values["n_heads"] % values["wide_kv_heads"] == 0
        reader.require("num_global_key_value_heads", divides, f"a divisor of {values['n_heads']}")
        reader.require("global_head_dim", width % 2 == 0, EVEN)
        for key in ("global_head_dim", "num_global_key_value_heads"):
            reader.irrelevant(key, "carried where layers do not depend on it")

    def _by_kind(self, reader: ConfigReader, values: Values) -> tuple[int, int]:
        usual = values["n_kv_heads"]
        return reader.size("global_head_dim", default=512), reader.size(
            "num_global_key_value_heads", default=usual, null=usual, derived=True
        )

    def _by_layer(self, reader: ConfigReader, values: Values) -> tuple[int, int]:
        """Returns width and number of full layers; the numbers of layers may begin with zeros."""
        said, windows = reader.config[PER_LAYER], values["windows"]
        usual = {"head_dim": values["d_head"], "num_key_value_heads": values["n_kv_heads"]}
        named = isinstance(said, dict) and all(key.isdecimal() and int(key) < len(windows) for key in said)
        reader.require(PER_LAYER, named, f"an object by layer, 0 to {len(windows) - 1}")
        own = {int(key): (key, value) for key, value in said.items()}
        found: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
        for i, window in enumerate(windows):
            key, value = own.get(i, (str(i), {}))
            inner = ConfigReader(value, reader.where, f"{reader.prefix}{PER_LAYER}.{key}.", within=reader)
            found[window is None].add(tuple(inner.size(one, default=size) for one, size in usual.items()))
            inner.finish()
        alike = found[False] <= {tuple(usual.values())} and len(found[True]) == 1
        reader.require(PER_LAYER, alike, "the same of all full layers, and of no others")
        for key in ("global_head_dim", "num_global_key_value_heads"):
            reader.only(key, None, reason=f"{PER_LAYER} says it")
        width, n_kv_heads = found[True].pop()
        return width, n_kv_heads

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, by kind of layer."""
        one = full(parts)
        own = {"num_global_key_value_heads": one.n_kv_heads} if one.values_are_keys else {}
        return {"attention_k_eq_v": one.values_are_keys, "global_head_dim": one.d_head, **own}


class Ropes:
    """RoPE of full layers and of those with a window, each an object in `rope_parameters`."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both."""
        newer = reader.nested("rope_parameters")
        assert newer is not None, "a config without them has the class's"
        for kind, into, width in ((FULL, "rotary", values["wide"]), (SLIDING, "local", values["d_head"])):
            inner = newer.nested(kind)
            used = any((window is None) == (kind == FULL) for window in values["windows"])
            newer.require(kind, inner is not None or not used, "an object, since layers of this kind need RoPE")
            values[into] = Rotary(d_rotary=width) if inner is None else self._one(inner, width, values["max_positions"])
        newer.finish()

    @staticmethod
    def _one(inner: ConfigReader, width: int, context: int) -> Rotary:
        if inner.config.get("rope_type") != "proportional":
            inner.only(OUTSIDE[1], 1, None, reason=WHOLE)
        theta = inner.number("rope_theta", above=1.0)
        inner.only(ORIGINAL, None, reason="no scaling of this family depends on it")
        return Rotary(d_rotary=width, theta=theta, scaling=read_scaling(inner, context, context, width, SCALINGS))

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the objects; of a kind that no layer has, the class's."""
        written = {}
        for kind in (FULL, SLIDING):
            layers = [one for one in parts.attentions if (one.window is None) == (kind == FULL)]
            written[kind] = self._object(parts, layers[0]) if layers else ROPE[kind]
        return {"rope_parameters": written}

    @staticmethod
    def _object(parts: Parts, layer: Attention) -> dict[str, Any]:
        rotary = parts.expect(layer.positions, Rotary, "blocks.0.attention.body.positions")
        if not isinstance(rotary.scaling, Proportional):
            return write_object(rotary, parts.max_positions)
        some = partial_factor(2 * rotary.scaling.n_pairs, rotary.d_rotary)
        return {
            "rope_type": "proportional",
            "rope_theta": float(rotary.theta),
            "partial_rotary_factor": some,
            "factor": float(rotary.scaling.factor),
        }


def _proportional(inner: ConfigReader, original: int, context: int, d_head: int) -> Proportional:
    pairs = int(inner.number(OUTSIDE[1], default=1.0, most=1.0) * d_head // 2)
    inner.require(OUTSIDE[1], pairs > 0, f"a part of the {d_head} numbers of a head that is a pair at least")
    return Proportional(n_pairs=pairs, factor=inner.number("factor", default=1.0))


SCALINGS = {"default": KINDS["default"], "linear": KINDS["linear"], "proportional": _proportional}


class Readers:
    """How many of the last layers read keys and values of the last layer before them of their kind.

    Such layers may have feed-forwards twice as wide; where there are none, the flag is carried.
    """

    key, double = "num_kv_shared_layers", "use_double_wide_mlp"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the number; raises InputError where a kind of layer has none to read from."""
        values["n_readers"] = n = reader.size(self.key, default=0, least=0)
        first = values["n_layers"] - n
        windows = values["windows"]
        lent = first > 0 and {*windows[first:]} <= {*windows[:first]}
        reader.require(self.key, lent, "fewer than the layers, with one of each kind before them")
        values["double_wide"] = reader.flag(self.double, default=False)
        reader.irrelevant(self.double, "of layers that read others' keys, where there are any")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number and the flag."""
        n = sum(one.kv_from is not None for one in parts.attentions)
        return {self.key: n} | ({self.double: _last_width(parts) == 2 * dense(parts).d_ff} if n else {})


def _last_width(parts: Parts) -> int | None:
    bodies = (branch.body for branch in parts.model.blocks[-1].branches if branch.name == "ffn")
    found = [body.shared if isinstance(body, MixtureOfExperts) else body for body in bodies]
    return next((one.d_ff for one in found if isinstance(one, GatedMLP)), None)


class Vectors:
    """Width of the per-layer embedding's vectors, 0 for none, and the rows of its table."""

    width, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both."""
        values["d_vector"] = reader.size(self.width, default=256, least=0)
        values["n_vectors"] = reader.size(self.rows, default=262144)
        reader.irrelevant(self.rows, "of the per-layer embedding, where there is one")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns both; the rows of a table that is not there as they were carried."""
        found = parts.model.per_layer
        if found is None:
            return {self.width: 0}
        return {self.width: found.d, self.rows: found.n_vocab}


class Experts:
    """Whether experts stand beside the feed-forward, how many, how wide, and how many each token takes."""

    flag = "enable_moe_block"
    sizes = ("num_experts", "top_k_experts", "moe_intermediate_size")

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the sizes, where the flag says so."""
        values["experts"] = None
        if reader.flag(self.flag, default=False):
            n_experts, top_k, width = (reader.size(key) for key in self.sizes)
            reader.require("num_experts", n_experts <= MOST_EXPERTS // values["n_layers"], "fewer experts")
            reader.require("top_k_experts", top_k <= n_experts, f"at most the {n_experts} experts")
            values["experts"] = (n_experts, top_k, width)
        for key in self.sizes:
            reader.irrelevant(key, "of experts, where there are any")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the flag and the sizes; without experts those that were carried stay."""
        bodies = (branch.body for block in parts.model.blocks for branch in block.branches)
        found = next((body for body in bodies if isinstance(body, MixtureOfExperts)), None)
        if found is None:
            return {self.flag: False}
        return {self.flag: True, **dict(zip(self.sizes, (found.n_experts, found.top_k, found.d_ff), strict=True))}
