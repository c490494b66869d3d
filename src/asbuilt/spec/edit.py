"""Finding and changing parts by path: a spec is frozen, so an edit returns a new one, validated by its parts.

Paths are those of `walk_stored`. In a pattern `*` stands for one segment, and `0-3` for 0, 1, 2, 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from asbuilt.errors import InputError, near

if TYPE_CHECKING:
    from asbuilt.spec.part import Part

P = TypeVar("P", bound="Part")
Which = Callable[[str, "Part"], bool]
Change = Callable[["Part"], "Part"]
ChangeAt = Callable[[str, "Part"], "Part"]


def matches(pattern: str, path: str) -> bool:
    """Returns whether a path matches the pattern."""
    wanted, given = pattern.split("."), path.split(".")
    return len(wanted) == len(given) and all(map(_same, wanted, given))


def _same(wanted: str, given: str) -> bool:
    first, dash, last = wanted.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and given.isdecimal():
        return int(first) <= int(given) <= int(last)
    return wanted in ("*", given)


def at(part: Part, path: str) -> Part:
    """Returns the part at a path; raises InputError, with similar paths, for an unknown one."""
    for found, below in _walk(part):
        if found == path:
            return below
    raise _nothing(part, path)


def edit(part: P, pattern: str, changes: dict[str, Any]) -> P:
    """Returns the part with fields changed in all parts that match the pattern.

    A whole model that cannot have the new fields becomes the kind of model that can: a language model without its head
    becomes a text encoder.

    Raises InputError if nothing matches, for an unknown field, and for values that the parts refuse.
    """
    if not any(matches(pattern, path) for path, _ in _walk(part)):
        raise _nothing(part, pattern)
    return _rebuilt(part, "", lambda path, _: matches(pattern, path), None, changes)


def replace_where(
    part: P, which: type[Part] | tuple[type[Part], ...] | Which, change: Part | Change | None, changes: dict[str, Any]
) -> P:
    """Returns the part with all parts changed that are of a type, or for which `which(path, part)` is true.

    `change` is a replacement, or a function that returns it; otherwise `changes` are fields. Raises as `edit` does.
    """
    chosen = _chooser(which)
    if not any(chosen(path, below) for path, below in _walk(part)):
        raise InputError("no part is of this kind", field="which", value=getattr(which, "__name__", which))
    if change is not None and changes:
        raise InputError("give either a replacement or fields", field="change", value=list(changes))
    if change is None:
        return _rebuilt(part, "", chosen, None, changes)
    make = change if callable(change) else lambda _: change
    return _rebuilt(part, "", chosen, lambda _, below: make(below), changes)


def transform(part: P, change: Callable[[str, Part], Part]) -> P:
    """Returns the part with every part in it replaced by the result of `change(path, part)`, children first.

    An owner is changed after its children have been replaced. Raises InputError for values that parts refuse.
    """
    return _rebuilt(part, "", lambda *_: True, change, {})


def _chooser(which: type[Part] | tuple[type[Part], ...] | Which) -> Which:
    if isinstance(which, type | tuple):
        return lambda _, part: isinstance(part, which)
    return which


def _walk(part: Part) -> Iterator[tuple[str, Part]]:
    from asbuilt.spec.part import walk_stored

    return walk_stored(part)


def _nothing(part: Part, path: str) -> InputError:
    known = [found for found, _ in _walk(part)]
    hint = near(path.replace("*", "0"), known, cutoff=0.6) or f"paths begin {', '.join(known[1:4])} ..."
    return InputError("no part at this path", field="path", value=path, fix=hint)


def _rebuilt(part: Any, path: str, which: Which, change: ChangeAt | None, changes: dict[str, Any]) -> Any:  # noqa: ANN401  # the part's own type
    """Returns `part` with the chosen parts changed, children first, together with a part's own fields."""
    below: dict[str, Part] = {}
    for name, child in (*part.children(), *part.extras()):
        made = _rebuilt(child, f"{path}.{name}" if path else name, which, change, changes)
        if made is not child and made != child:
            below[name] = made
    chosen = which(path, part)
    values = _placed(part, below, path) | (changes if chosen and change is None else {})
    made = _replaced(part, values, path) if values else part
    return change(path, made) if chosen and change is not None else made


def _placed(part: Part, below: dict[str, Part], path: str) -> dict[str, Any]:
    """Returns the fields of the named children, with the new children in place."""
    values: dict[str, Any] = {}
    slots = dict(_slots(part))
    for name, child in below.items():
        if name not in slots:
            raise InputError("not a field, so it cannot be changed", field=f"{path}.{name}" if path else name)
        field, index = slots[name]
        if index is None:
            values[field] = None if _is_plain_map(part, name, child) else child
        else:
            items = list(values.get(field, getattr(part, field)))
            items[index] = child
            values[field] = tuple(items)
    return {name: _shared(value) for name, value in values.items()}


def _is_plain_map(part: Part, name: str, child: Part) -> bool:
    """Returns whether the child is the default linear map of the part."""
    from asbuilt.spec.linear import Mapped

    return isinstance(part, Mapped) and part.plain_maps().get(name) == child


def _shared(value: Any) -> Any:  # noqa: ANN401  # a field's value
    """Returns a tuple with equal items as the same object, so that work per kind of block is done once."""
    if not isinstance(value, tuple):
        return value
    own = {item: item for item in value}
    return tuple(own[item] for item in value)


def _slots(part: Part) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """Yields (name of a child, its field and index), in the order of the fields."""
    from asbuilt.spec.part import Part

    held: list[tuple[str, str, int | None, Part]] = []
    for field in fields(part):
        value = getattr(part, field.name)
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, item in items:
            if isinstance(item, Part):
                held.append((field.name if index is None else f"{field.name}.{index}", field.name, index, item))
    plain = {field.name: (field.name, None) for field in fields(part)}  # None if the part creates it itself
    plain |= {name: (field, index) for name, field, index, _ in held}
    left = iter(held)
    for name, child in (*part.children(), *part.extras()):
        if name in plain:
            yield name, plain[name]
            continue
        found = next(((field, index) for _, field, index, item in left if item is child), None)
        if found is not None:  # children with their own names, such as a block's branches
            yield name, found


def _replaced(part: Part, values: dict[str, Any], path: str) -> Part:
    from asbuilt.spec.json import fits, require_parts
    from asbuilt.spec.model import Model
    from asbuilt.spec.whole import FIELDS, whole

    kind = type(part)
    if isinstance(part, Model) and values.keys() <= FIELDS.keys() and not fits(kind, values):
        kind, values = whole({field.name: getattr(part, field.name) for field in fields(part)} | values)
    known = [field.name for field in fields(kind) if field.init]
    where = path or kind.__name__
    for name, value in values.items():
        if name not in known:
            hint = near(name, known) or f"fields: {', '.join(known)}"
            raise InputError(f"unknown field of {kind.__name__}", field=f"{where}.{name}", value=value, fix=hint)
    require_parts(kind, values, where)
    try:
        return replace(part, **values) if kind is type(part) else kind(**values)
    except InputError as error:
        field = f"{where}: {error.field}"
        raise InputError(error.problem, field=field, value=error.value, allowed=error.allowed, fix=error.fix) from error
    except (TypeError, AttributeError, ArithmeticError) as error:  # a part in place of a number, or the reverse
        raise InputError(f"wrong type in {kind.__name__}: {error}", field=where) from error
