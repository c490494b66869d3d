"""RoPE in a config: the older `rope_theta` and `rope_scaling`, the newer `rope_parameters`, and back.

What each key does, and what stands in for a missing one, follows transformers 5.24 (`modeling_rope_utils`), since that
is what a published config was checked against.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import DynamicNTK, FrequencyFactors, LinearScaling, Llama3Scaling, Rotary, Scaling, YaRN

MOST_FACTOR = 1e6
ORIGINAL = "original_max_position_embeddings"
OUTSIDE = ("rope_theta", "partial_rotary_factor")
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")
WHOLE = "RoPE covers whole heads in this family"
# rope_type -> what reads the scaling from (the RoPE object, original context, context, width that RoPE covers)
Kinds = dict[str, Callable[[ConfigReader, int, int, int], Scaling | None]]


def read_rotary(
    reader: ConfigReader,
    d_head: int,
    context: int,
    default_theta: float = 10000.0,
    *,
    partial: float | None = None,
    kinds: Kinds | None = None,
    outside: tuple[str, str] = OUTSIDE,
) -> Rotary:
    """Returns the RoPE of a config, which pairs a head's halves.

    It covers whole heads, or with `partial` the part that `partial_rotary_factor` says, `partial` by default. `outside`
    names the base and that factor where they stand beside the RoPE object. Raises InputError naming the key, in either
    spelling, that is missing, out of bounds or unknown.
    """
    inner = reader.nested(*ROPE_OBJECTS)
    theta = _theta(reader, inner, outside[0], default_theta)
    original = _agreed(reader, inner, ORIGINAL)
    d_rotary = _width(reader, inner, outside[1], d_head, partial)
    scaling = read_scaling(inner, original or context, context, d_rotary, kinds)
    return Rotary(d_rotary=d_rotary, theta=theta, scaling=scaling)


def read_scaling(
    inner: ConfigReader | None, original: int, context: int, d_rotary: int, kinds: Kinds | None = None
) -> Scaling | None:
    """Returns the scaling that a RoPE object describes, all of whose keys must be known; raises as `read_rotary`."""
    if inner is None:
        return None
    kind = inner.choice("rope_type", "type", choices=kinds or KINDS, default="default")
    inner.note(
        "attn_factor",
        "transformers does not read it",
        "ignored, as in transformers: vLLM multiplies cosines and sines by it",
    )
    scaling = kind(inner, original, context, d_rotary)
    inner.finish()
    if isinstance(scaling, DynamicNTK) and d_rotary <= 2:
        raise inner.error("rope_type", "dynamic scaling needs heads of more than 2 numbers", value=d_rotary)
    return scaling


def _width(reader: ConfigReader, inner: ConfigReader | None, key: str, d_head: int, usual: float | None) -> int:
    """Returns how many numbers of each head RoPE covers; `usual` None is a family in which it covers all."""
    places = [(reader, key), *([(inner, OUTSIDE[1])] if inner is not None else [])]
    if usual is None:
        for place, name in places:
            place.only(name, 1, None, reason=WHOLE)
        return d_head
    found = [place.number(name, most=1.0) for place, name in places if place.spelled(name)]
    if len(set(found)) > 1:
        raise reader.error(key, "disagrees with the RoPE parameters", value=found)
    fraction = found[0] if found else usual
    d_rotary = int(d_head * fraction)
    if d_rotary < 2 or d_rotary % 2:
        allowed = f"an even part of the {d_head} numbers of a head"
        raise reader.error(key, value=fraction, allowed=allowed)
    return d_rotary


def _theta(reader: ConfigReader, inner: ConfigReader | None, key: str, default: float) -> float:
    # with a base of 1 or less frequencies would not fall, and YaRN divides by its logarithm
    theta = reader.number(key, default=default, above=1.0)
    if inner is None or "rope_theta" not in inner.config:
        return theta
    inside = inner.number("rope_theta", above=1.0)
    if key in reader.config and inside != theta:
        raise inner.error("rope_theta", f"disagrees with {key} outside", value=inside)
    return inside


def _agreed(reader: ConfigReader, inner: ConfigReader | None, key: str) -> int | None:
    """Returns a size that may stand inside the RoPE object or beside it, None where it does neither."""
    found = {place.prefix: place.size(key) for place in (reader, inner) if place is not None and place.given(key)}
    if len(set(found.values())) > 1:
        raise reader.error(key, "disagrees with the RoPE parameters", value=sorted(found.values()))
    return next(iter(found.values()), None)


def _default(inner: ConfigReader, original: int, context: int, d_head: int) -> None:
    inner.irrelevant("factor", "positions are not scaled")


def _linear(inner: ConfigReader, original: int, context: int, d_head: int) -> Scaling:
    return LinearScaling(factor=inner.number("factor", most=MOST_FACTOR))


def _dynamic(inner: ConfigReader, original: int, context: int, d_head: int) -> Scaling:
    # transformers grows the base from max_position_embeddings on, whatever an original context says
    if original != context:
        raise inner.error(
            ORIGINAL, "dynamic scaling starts at max_position_embeddings", value=original, allowed=str(context)
        )
    return DynamicNTK(factor=inner.number("factor", most=MOST_FACTOR), original_context=context)


def _llama3(inner: ConfigReader, original: int, context: int, d_head: int) -> Scaling:
    factor, low, high = (
        inner.number(key, most=MOST_FACTOR) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    inner.require("high_freq_factor", high >= low, f"at least low_freq_factor = {low:g}")
    return Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=original)


def _yarn(inner: ConfigReader, original: int, context: int, d_head: int) -> Scaling:
    # null asks for the ratio of the contexts; a missing factor is refused, as transformers does
    factor = inner.number("factor", null=context / original, most=MOST_FACTOR)
    fast, slow = (
        inner.number(key, default=default, null=default, most=MOST_FACTOR)
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    inner.require("beta_fast", fast >= slow, f"at least beta_slow = {slow:g}")
    inner.irrelevant("finetuned", "says how the model was made")
    return YaRN(
        factor=factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_yarn_attention(inner, factor),
        truncate=inner.flag("truncate", default=True, null=False),
    )


def _yarn_attention(inner: ConfigReader, factor: float) -> float | None:
    """Returns the factor on cos and sin: as given, or the quotient of two mscales; None for the usual one."""
    # a 0 is no mscale, as in transformers
    said = [key for key in ("mscale", "mscale_all_dim") if inner.given(key) and inner.config[key] != 0]
    scales = [inner.number(key, most=MOST_FACTOR) for key in said]
    if inner.given("attention_factor"):
        return inner.number("attention_factor", most=MOST_FACTOR)
    if len(scales) < 2:
        return None  # one alone has no effect
    over, under = (0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0 for scale in scales)
    return over / under


def _longrope(inner: ConfigReader, original: int, context: int, d_head: int) -> Scaling:
    """Returns one divisor per pair; raises InputError where long contexts have others than short ones."""
    short, long = (inner.numbers(key, d_head // 2) for key in ("short_factor", "long_factor"))
    if short != long:
        raise inner.error(
            "long_factor", "longrope that changes with the length is not supported", allowed="equal to short_factor"
        )
    factor = inner.number("factor", default=context / original, null=context / original, most=MOST_FACTOR)
    if inner.given("attention_factor") or factor > 1:
        said = inner.number("attention_factor", most=MOST_FACTOR)
        inner.require("attention_factor", said == 1.0, "1.0")
    return FrequencyFactors(factors=short)


KINDS: Kinds = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def partial_factor(d_rotary: int, d_head: int) -> float:
    """Returns the partial_rotary_factor by which a reader, rounding down, finds `d_rotary` of `d_head` numbers."""
    factor = d_rotary / d_head
    return factor if int(d_head * factor) == d_rotary else math.nextafter(factor, 1.0)


def write_rotary(rotary: Rotary, context: int) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`, the older spelling, which every version reads."""
    return {"rope_theta": float(rotary.theta), "rope_scaling": _write_scaling(rotary.scaling, context)}


def write_rotary_object(rotary: Rotary, context: int) -> dict[str, Any]:
    """Returns one object with base and scaling, as newer configs have for each kind of layer."""
    older = write_rotary(rotary, context)
    return {"rope_theta": older["rope_theta"], **(older["rope_scaling"] or {"rope_type": "default"})}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rope:
    """The keys of RoPE, with a base of `theta` by default.

    With `partial` it covers a part of each head, that part by default. `outside` names base and part where they stand
    beside the RoPE object. `width` finds the width of a head in what was read, `at` the rotation in a spec.
    """

    theta: float = 10000.0
    partial: float | None = None
    outside: tuple[str, str] = OUTSIDE
    width: Callable[[dict[str, Any]], int] = lambda values: values["d_head"]
    at: Callable[[Parts], Rotary] = lambda parts: parts.rotary
    into = "rotary"
    kinds: Kinds | None = None

    def read(self, reader: ConfigReader, values: dict[str, Any]) -> None:
        """Reads the keys."""
        values["rotary"] = read_rotary(
            reader,
            self.width(values),
            values["max_positions"],
            default_theta=self.theta,
            partial=self.partial,
            kinds=self.kinds,
            outside=self.outside,
        )

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, in the older spelling."""
        written = write_rotary(self.at(parts), parts.max_positions)
        written[self.outside[0]] = written.pop("rope_theta")
        if self.partial is not None:
            written[self.outside[1]] = partial_factor(parts.rotary.d_rotary, parts.d_head)
        return written


class ScaledRope(Rope):
    """The keys of RoPE where a null scaling would mean the class's own."""

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, the scaling never null."""
        written = super().write(parts)
        return written | {"rope_scaling": written["rope_scaling"] or {"rope_type": "default"}}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RopeOfWidth(Rope):
    """The keys of RoPE on the first `rotary_dim` numbers of each head; a newer `partial_rotary_factor` says it too.

    Without either it covers the part `partial`, whole heads unless said.
    """

    partial: float | None = 1.0

    def read(self, reader: ConfigReader, values: dict[str, Any]) -> None:
        """Reads the keys; raises InputError where both say a width and it is not the same."""
        key, d_head = "rotary_dim", self.width(values)
        if not reader.given(key):
            super().read(reader, values)
            return
        width = reader.size(key, most=d_head)
        reader.require(key, width % 2 == 0, "an even number (RoPE rotates pairs)")
        Rope.read(replace(self, partial=partial_factor(width, d_head)), reader, values)
        reader.require(key, values["rotary"].d_rotary == width, "the same width as partial_rotary_factor says")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, the width in numbers."""
        written = {key: value for key, value in super().write(parts).items() if key != self.outside[1]}
        return written | {"rotary_dim": parts.rotary.d_rotary}


def usual_scaling(scaling: dict[str, Any]) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """Returns what gives a config without a RoPE object this one, which its class has; a null says nothing either."""

    def prepare(config: dict[str, Any], name: str) -> dict[str, Any]:
        said = {key: value for key, value in config.items() if key not in ROPE_OBJECTS or value}
        return said if any(key in said for key in ROPE_OBJECTS) else said | {"rope_scaling": scaling}

    return prepare


class TwoRopes:
    """RoPE of the layers with full attention, and `local`, that of layers with a window.

    The newer `rope_parameters` has an object for each. Of the older keys `bases` are the two bases, with their
    defaults; beside a `rope_theta` a `rope_scaling` is that of full attention. With `partial` it covers a part of each
    head, that part by default.
    """

    into = "rotary"

    def __init__(self, *bases: tuple[str, float], kinds: Kinds | None = None, partial: float | None = None) -> None:
        self.bases, self.kinds = dict(zip(("full_attention", "sliding_attention"), bases, strict=True)), kinds
        self.partial = partial

    def read(self, reader: ConfigReader, values: dict[str, Any]) -> None:
        """Reads both."""
        older = reader.nested("rope_scaling") if self._scaled_outside else None
        newer = reader.nested("rope_parameters")
        if newer is not None and older is not None:
            raise reader.error("rope_scaling", "given together with rope_parameters", fix="keep one of the two")
        inside = [older, None] if newer is None else [newer.nested(kind) for kind in self.bases]
        if newer is not None:
            newer.finish()
        found = zip(self.bases.values(), inside, strict=True)
        values["rotary"], values["local"] = (self._one(reader, *base, inner, values) for base, inner in found)

    @property
    def _scaled_outside(self) -> bool:
        return self.bases["full_attention"][0] == "rope_theta"

    def _told_apart(self, full: Rotary, local: Rotary) -> bool:
        """Whether the older keys say both bases; one key for both, transformers reads for full attention alone."""
        (key, _), (local_key, usual) = self.bases.values()
        return key != local_key or full.theta == local.theta == usual

    def _one(
        self, reader: ConfigReader, key: str, default: float, inner: ConfigReader | None, values: dict[str, Any]
    ) -> Rotary:
        d_head, context = values["d_head"], values["max_positions"]
        theta = _theta(reader, inner, key, default)
        width = _width(reader, inner, OUTSIDE[1], d_head, self.partial)
        if inner is None:
            return Rotary(d_rotary=width, theta=theta)
        original = inner.size(ORIGINAL) if ORIGINAL in inner.config else context
        return Rotary(d_rotary=width, theta=theta, scaling=read_scaling(inner, original, context, width, self.kinds))

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, in the older spelling where it can say them."""
        covered = int(parts.d_head * (self.partial or 1)) // 2 * 2
        full, local = (Rotary(d_rotary=covered, theta=theta) for _, theta in self.bases.values())
        for i, layer in enumerate(parts.attentions):
            rotary = parts.expect(layer.positions, Rotary, f"blocks.{i}.attention.body.positions")
            full, local = (rotary, local) if layer.window is None else (full, rotary)
        older = self.partial is None and self._scaled_outside and local.scaling is None
        if older and self._told_apart(full, local):
            return write_rotary(full, parts.max_positions) | {self.bases["sliding_attention"][0]: float(local.theta)}
        objects = [write_rotary_object(rotary, parts.max_positions) for rotary in (full, local)]
        for one, rotary in zip(objects, (full, local), strict=True):
            one |= {} if self.partial is None else {OUTSIDE[1]: partial_factor(rotary.d_rotary, parts.d_head)}
        return {"rope_parameters": dict(zip(self.bases, objects, strict=True))}


def _write_scaling(scaling: Scaling | None, context: int) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": float(scaling.factor)}
        case DynamicNTK():
            return {"rope_type": "dynamic", "factor": float(scaling.factor)}  # it starts at the model's context
        case YaRN():
            return _write_yarn(scaling)
        case Llama3Scaling():
            frequencies = {key: float(getattr(scaling, key)) for key in ("low_freq_factor", "high_freq_factor")}
            base = {"rope_type": "llama3", "factor": float(scaling.factor), ORIGINAL: scaling.original_context}
            return base | frequencies
        case FrequencyFactors():
            factors = list(scaling.factors)
            # an attention factor of 1 and equal lists leave transformers' llama with these divisors alone
            return {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "factor": 1.0,
                "attention_factor": 1.0,
                ORIGINAL: context,
            }
    raise InputError("a config cannot express this scaling", field="scaling", value=scaling)


def _write_yarn(scaling: YaRN) -> dict[str, Any]:
    written: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": float(scaling.factor),
        ORIGINAL: scaling.original_context,
        "beta_fast": float(scaling.beta_fast),
        "beta_slow": float(scaling.beta_slow),
        "truncate": scaling.truncate,
    }
    if scaling.attention_factor is not None:
        written["attention_factor"] = float(scaling.attention_factor)
    return written
