"""A spec as JSON and back: `{"part": "Attention", field: value, ...}`, equal neighbours written once, with a count."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from asbuilt.errors import InputError, near, one_of
from asbuilt.files import parse_json
from asbuilt.spec import experts, linear, mixer, model
from asbuilt.spec.part import KINDS, Part
from asbuilt.spec.whole import ALWAYS, FIELDS, whole

# The parts are collected from every file of the package.
_FILES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
MODULES = [import_module(f"asbuilt.spec.{name}") for name in _FILES if name not in ("json", "show", "edit")]
ABSTRACT = (Part, linear.Mapped, mixer.Mixer, model.Model)
PARTS: dict[str, type[Part]] = {
    name: value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Part) and value not in ABSTRACT and name[0] != "_"
}

# Registered parts from outside the package, by name; they are allowed where one of these unions is.
OUTSIDE: dict[str, type[Part]] = {}
BODIES = (mixer.Mixer, experts.FeedForward)

# An untrusted file may nest or repeat without limit; no model is deeper or longer than this.
DEEPEST, LONGEST = 16, 100_000


def to_dict(part: Part) -> dict[str, Any]:
    """Returns `part` as plain data; runs of equal list items become `{"repeat": n, "item": ...}`."""
    plain: dict[str, Any] = {"part": type(part).__name__}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Part):
            value = to_dict(value)
        elif isinstance(value, tuple):
            value = _fold(value)
        plain[field.name] = value
    return plain


def _fold(items: tuple[Any, ...]) -> list[Any]:
    folded: list[list[Any]] = []
    for item in items:
        if folded and isinstance(item, Part) and folded[-1][1] == item:
            folded[-1][0] += 1
        else:
            folded.append([1, item])
    plain = [(n, to_dict(item) if isinstance(item, Part) else item) for n, item in folded]
    return [item if n == 1 else {"repeat": n, "item": item} for n, item in plain]


def from_dict(data: object, where: str = "spec", depth: int = 0) -> Part:
    """Returns the part that `data` describes; a "Model" of older files becomes the kind that its fields describe.

    Raises InputError naming the place for an unknown part or field, a missing field, or a value a part refuses.
    """
    if depth > DEEPEST:
        raise InputError("nested too deeply", field=where, allowed=f"at most {DEEPEST} levels")
    if not isinstance(data, dict) or not isinstance(data.get("part"), str):
        raise InputError(field=where, value=data, allowed='an object with a "part" key')
    part = data["part"]
    known, needed = _known(part, where)
    for key in data:
        if key != "part" and key not in known:
            raise InputError(f"unknown field of {part}", field=f"{where}.{key}", fix=near(key, known))
    for name in needed:
        if name not in data:
            raise InputError(f"missing field of {part}", field=f"{where}.{name}")
    values: dict[str, Any] = {
        key: _value(value, f"{where}.{key}", depth) for key, value in data.items() if key != "part"
    }
    kind = PARTS.get(part)
    if kind is None:
        kind, values = whole(values)
    require_parts(kind, values, where, data)
    try:
        return kind(**values)
    except (TypeError, AttributeError, ArithmeticError) as error:  # a part where a number belongs, or the reverse
        raise InputError(f"wrong type in {kind.__name__}: {error}", field=where) from error


def _known(part: str, where: str) -> tuple[Collection[str], list[str]]:
    """Returns the names of a part's fields, and of the required ones; raises InputError for an unknown part."""
    if part == model.Model.__name__:
        return FIELDS, [*ALWAYS]
    if part not in PARTS:
        hint = near(part, PARTS) or "register parts from outside the package first: asbuilt.register"
        raise InputError("unknown part", field=where, value=part, fix=hint)
    own = fields(PARTS[part])
    return [field.name for field in own], [field.name for field in own if field.default is MISSING]


def require_parts(kind: type[Part], values: dict[str, Any], where: str, data: dict[str, Any] | None = None) -> None:
    """Raises InputError, with the value in `data`, for a part in a field of `kind` that does not allow it."""
    for name, hint in _part_fields(kind).items():
        if name in values and not _fits(values[name], hint) and not _stands(values[name], hint):
            raise InputError(
                f"wrong part for {kind.__name__}",
                field=f"{where}.{name}",
                value=values[name] if data is None else data[name],
                allowed=one_of(sorted(part.__name__ for part in _parts_in(hint))),
            )


def fits(kind: type[Part], values: dict[str, Any]) -> bool:
    """Returns whether a part of this kind has these fields, and allows these parts in them."""
    own, hints = {field.name for field in fields(kind)}, _part_fields(kind)
    held = ((value, hints[name]) for name, value in values.items() if name in hints)
    return values.keys() <= own and all(_fits(value, hint) or _stands(value, hint) for value, hint in held)


def register_part(kind: type[Part]) -> None:
    """Registers a part from outside the package; raises InputError for an invalid one or a built-in name."""
    name = getattr(kind, "__name__", repr(kind))
    if not (isinstance(kind, type) and issubclass(kind, Part) and is_dataclass(kind)):
        raise InputError(field="part", value=name, allowed="a dataclass that is a Part")
    frozen = getattr(kind, "__dataclass_params__").frozen  # noqa: B009  a name of dataclasses' own
    if not frozen or any(not field.kw_only for field in fields(kind)):
        allowed = "@dataclass(frozen=True, kw_only=True)"
        raise InputError("not frozen or not keyword-only", field="part", value=name, allowed=allowed)
    if PARTS.get(name, kind) is not kind and name not in OUTSIDE:
        raise InputError("the name of a built-in part", field="part", value=name, fix="choose another")
    if kind.kind not in KINDS:
        raise InputError(field=f"{name}.kind", value=kind.kind, allowed=one_of(KINDS))
    if not hasattr(kind, "d_model") and "d_model" not in {field.name for field in fields(kind)}:
        raise InputError("has no d_model, the width of the stream", field="part", value=name, fix="add it")
    if kind not in PARTS.values():
        PARTS[name] = OUTSIDE[name] = kind
        _part_fields.cache_clear()


def _stands(value: object, hint: Any) -> bool:  # noqa: ANN401  # a type
    """Returns whether a registered part is allowed here: where any mixer, or any feed-forward, is."""
    named = _parts_in(hint)
    return type(value) in OUTSIDE.values() and any(named.issuperset(_parts_in(union)) for union in BODIES)


@cache
def _part_fields(kind: type[Part]) -> dict[str, Any]:
    """Returns the types of the fields that hold parts."""
    return {name: hint for name, hint in get_type_hints(kind, localns=dict(PARTS)).items() if _parts_in(hint)}


def _parts_in(hint: Any) -> set[type[Part]]:  # noqa: ANN401  # a type
    """Returns the types of parts that a field's type allows: for a base class all its subclasses."""
    if isinstance(hint, type) and issubclass(hint, Part):
        return {kind for kind in PARTS.values() if issubclass(kind, hint)} or {hint}
    return {part for inner in get_args(hint) for part in _parts_in(inner)}


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401  # a type
    """Returns whether a value matches a field's type, as far as parts are concerned."""
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, inner) for inner in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    return isinstance(value, hint)


def _value(value: object, where: str, depth: int) -> object:
    if isinstance(value, dict):
        return from_dict(value, where, depth + 1)
    if isinstance(value, list):
        return tuple(_unfold(value, where, depth))
    return value


def _unfold(items: list[Any], where: str, depth: int) -> list[Any]:
    flat: list[Any] = []
    for i, item in enumerate(items):
        n = 1
        if isinstance(item, dict) and set(item) == {"repeat", "item"}:
            n, item = item["repeat"], item["item"]
            if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= LONGEST - len(flat):
                raise InputError("invalid repeat", field=f"{where}.{i}", value=n, allowed=f"1 to {LONGEST} in total")
        flat += [_value(item, f"{where}.{i}", depth)] * n
    return flat


def dumps(part: Part) -> str:
    """Returns `part` as a JSON text."""
    return json.dumps(to_dict(part), indent=1)


def loads(text: str) -> Part:
    """Returns the part that a JSON text describes; raises InputError as `from_dict` does, or for text not JSON."""
    return from_dict(parse_json(text, "spec", finite=False))
