"""A recipe: all settings of a run, as a TOML file, with changes `key=value`.

Every default is visible (`dumps`), and a key that no setting has is refused with the names near it.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from asbuilt.errors import InputError, near, one_of
from asbuilt.files import read_text
from asbuilt.train.schedule import Schedule
from asbuilt.train.settings import Data, Experts, Loop, Model, Optimizer, Parallel, Step
from asbuilt.train.tune_settings import Tune

LARGEST = 1 << 20  # bytes of a recipe
SHIPPED = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, by section."""

    model: Model
    data: Data
    tune: Tune = field(default_factory=Tune)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    step: Step = field(default_factory=Step)
    experts: Experts = field(default_factory=Experts)
    parallel: Parallel = field(default_factory=Parallel)
    run: Loop = field(default_factory=Loop)


def shipped() -> list[str]:
    """Returns the names of the recipes in the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Returns the recipe in a TOML file, or the shipped one of this name, with `key=value` changes."""
    path, names, beside = Path(name), shipped(), False
    if str(name) in names and not path.is_file():
        path, beside = SHIPPED / f"{name}.toml", True
    elif not path.exists():
        hint = near(str(name), names) or f"shipped are {', '.join(names)}"
        raise InputError("no such recipe", field="RECIPE", value=str(name), allowed="a .toml file", fix=hint)
    made = loads(read_text(path, LARGEST), str(path), changes)
    if beside and made.model.source and (SHIPPED / made.model.source).is_file():  # a spec in the package
        made = replace(made, model=replace(made.model, source=str(SHIPPED / made.model.source)))
    return made


def loads(text: str, where: str = "recipe", changes: Sequence[str] = ()) -> Recipe:
    """Returns the recipe of a TOML text, with changes; raises InputError naming the key that is wrong."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not TOML: {error}", field=where) from error
    for change in changes:
        _change(data, change)
    return _read(Recipe, data, "")


def dumps(recipe: Recipe) -> str:
    """Returns the recipe as TOML, with every setting, and what each is as a comment."""
    return "\n".join(_section(one.name, getattr(recipe, one.name)) for one in fields(recipe))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe as plain data."""
    return {one.name: _plain(getattr(recipe, one.name)) for one in fields(recipe)}


def differences(one: Recipe, other: Recipe) -> Iterator[tuple[str, Any, Any]]:
    """Yields the settings that differ: `section.key` and both values."""
    for section, mine in to_dict(one).items():
        theirs = to_dict(other)[section]
        yield from ((f"{section}.{key}", value, theirs[key]) for key, value in mine.items() if value != theirs[key])


def _plain(section: Any) -> dict[str, Any]:  # noqa: ANN401  a dataclass
    values = {one.name: getattr(section, one.name) for one in fields(section)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _change(data: dict[str, Any], change: str) -> None:
    """Sets a key of the data; a value that is not TOML is a string."""
    key, equals, said = change.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise InputError(field="change", value=change, allowed="SECTION.KEY=VALUE, as optimizer.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {said}")["value"]
    except tomllib.TOMLDecodeError:
        value = said
    for name in names[:-1]:
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            raise InputError(f"{name} is not a section", field=key, value=inner)
        data = inner
    data[names[-1]] = value


def _read(kind: type[Any], data: object, where: str) -> Any:  # noqa: ANN401  an instance of `kind`
    if not isinstance(data, dict):
        raise InputError(field=where, value=data, allowed="a section")
    hints = get_type_hints(kind)
    for key in data:
        if key not in hints:
            raise InputError("unknown key", field=f"{where}{key}", fix=_suggested(key, where, hints))
    needed = {name for name, hint in hints.items() if is_dataclass(hint)}
    given = {name: data.get(name, {}) for name in hints if name in data or name in needed}
    return kind(**{name: _value(value, hints[name], f"{where}{name}") for name, value in given.items()})


def _suggested(key: str, where: str, hints: dict[str, Any]) -> str:
    """Returns a hint: a near name of this section, or the section that has such a key, or all names."""
    if hint := near(key, hints):
        return hint
    sections = get_type_hints(Recipe)
    elsewhere = [name for name, kind in sections.items() if key in get_type_hints(kind)]
    return f"it is {elsewhere[0]}.{key}" if elsewhere else f"known are {one_of(hints)}"


def _value(value: Any, hint: Any, where: str) -> Any:  # noqa: ANN401  what TOML holds
    if is_dataclass(hint):
        return _read(hint, value, f"{where}.")  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return _several(value, hint, where)
    kind = str if get_origin(hint) is Literal else get_origin(hint) or hint
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and (whole or isinstance(value, float)) and math.isfinite(value):
        return float(value)
    if (kind is int and whole) or (kind in (str, bool, dict) and isinstance(value, kind)):
        return value
    named = {float: "a number", int: "a whole number", str: "a string", bool: "true or false", dict: "a section"}
    raise InputError(field=where, value=value, allowed=named[kind])


def _several(value: object, hint: Any, where: str) -> tuple[Any, ...]:  # noqa: ANN401
    inner = get_args(hint)
    if not isinstance(value, list) or (inner[-1] is not Ellipsis and len(value) != len(inner)):
        count = "" if inner[-1] is Ellipsis else f" of {len(inner)}"
        raise InputError(field=where, value=value, allowed=f"a list{count}")
    return tuple(_value(one, inner[0], f"{where}.{i}") for i, one in enumerate(value))


def _section(name: str, section: Any) -> str:  # noqa: ANN401  a dataclass
    said = documented(type(section))
    plain = {key: value for key, value in _plain(section).items() if not isinstance(value, dict)}
    lines = [f"[{name}]", *(f"{key} = {_toml(value)}  # {said[key]}" for key, value in plain.items())]
    for key, value in _plain(section).items():
        if isinstance(value, dict) and value:
            lines += [f"[{name}.{key}]", *(f"{_key(inner)} = {_toml(each)}" for inner, each in value.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.replace("_", "").replace("-", "")
    return name if bare.isascii() and bare.isalnum() else json.dumps(name)


def _toml(value: Any) -> str:  # noqa: ANN401  what TOML holds
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


@cache
def documented(kind: type[Any]) -> dict[str, str]:
    """Returns what the strings below a dataclass's fields say, by field."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(made, ast.ClassDef)
    found = {}
    for one, below in zip(made.body, made.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(below, ast.Expr):
            found[one.target.id] = str(ast.literal_eval(below.value))
    return found
