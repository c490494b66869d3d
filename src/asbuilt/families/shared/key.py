"""A key of a config as a value: its name, its default, what it may be, and where in a spec it is found again.

A key is read into `values`, by the name that the family's `build` has for it, and written from the `Parts` of a spec,
by the same name unless `at` says another place. So each is said once, and reading and writing cannot disagree about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol, cast

from asbuilt.errors import InputError
from asbuilt.families.shared.common import ACTIVATION_NAMES, MOST_LAYERS, divide
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import LARGEST_NUMBER, REFUSED, REQUIRED, ConfigReader
from asbuilt.spec.part import LARGEST_SIZE

# What has been read so far, by the names of the arguments of `build`.
Values = dict[str, Any]
# Whether the values are allowed, and what would be.
Must = tuple[Callable[[Values], bool], Callable[[Values], str] | str]


class Key(Protocol):
    """One key of a config, or several that say one thing together."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the key into `values`; raises InputError naming it where it is missing or not allowed."""
        ...

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the key as a config of these parts has it; DROPPED for one that was carried and no longer holds."""
        ...


DROPPED = object()
# Keys are never compared: without `eq` and `repr` these classes take half as long to import.


def resolved(value: Any, values: Values) -> Any:  # noqa: ANN401
    """Returns what a default or bound is beside the values read so far: some follow from others."""
    return value(values) if callable(value) else value


@dataclass(frozen=True, eq=False, repr=False)
class Value:
    """A key with one value, `into` which argument of `build` it goes, `also` its other spellings.

    `default` is the value of a missing key and `null` that of null, or functions of the values read so far; `must` is a
    condition on those and what is allowed; `at` is where a spec says it.
    With `carried`, a reason, the key is carried verbatim too.
    """

    key: str
    into: str
    _: KW_ONLY
    default: Any = REQUIRED
    null: Any = REFUSED
    also: tuple[str, ...] = ()
    must: Must | None = None
    at: str | Callable[[Parts], Any] = ""
    carried: str = ""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the value, then holds it to `must`."""
        values[self.into] = self.get(reader, resolved(self.default, values), resolved(self.null, values), values)
        reader.names[self.into] = name = reader.spelled(self.key, *self.also) or self.key
        self.check(reader, name, values)
        for key in (self.key, *self.also) if self.carried else ():
            reader.irrelevant(key, self.carried)

    def check(self, reader: ConfigReader, name: str, values: Values) -> None:
        """Raises InputError naming the key, spelled `name`, unless the value is allowed beside the others."""
        if self.must is not None:
            reader.require(name, self.must[0](values), resolved(self.must[1], values))

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> Any:  # noqa: ANN401
        """Returns what the config says."""
        raise NotImplementedError

    def found(self, parts: Parts) -> Any:  # noqa: ANN401
        """Returns what a spec says."""
        return self.at(parts) if callable(self.at) else parts.at(self.at or self.into)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the key with what the spec says."""
        return {self.key: self.found(parts)}


@dataclass(frozen=True, eq=False, repr=False)
class Size(Value):
    """A whole number from `least` to `most`, which `divides` another that was read before.

    A `derived` default follows from other keys of the same model.
    """

    _: KW_ONLY
    least: int = 1
    most: Any = LARGEST_SIZE
    derived: bool = False
    divides: str = ""

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> int:  # noqa: ANN401
        """Returns the size."""
        return reader.size(
            self.key,
            *self.also,
            default=default,
            null=null,
            least=self.least,
            most=resolved(self.most, values),
            derived=self.derived,
        )

    def check(self, reader: ConfigReader, name: str, values: Values) -> None:
        """Raises InputError naming both keys where a division leaves a remainder."""
        super().check(reader, name, values)
        if self.divides:
            divide(reader, values[self.divides], reader.names[self.divides], values[self.into], name)


@dataclass(frozen=True, eq=False, repr=False)
class Number(Value):
    """A finite number greater than `above` and at most `most`.

    Where the spec has another that follows from it, `make` is the way there, and `back` the way back.
    """

    _: KW_ONLY
    above: float = 0.0
    most: float = LARGEST_NUMBER
    make: Callable[[float], float] = float
    back: Callable[[float], float] = float

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> float:  # noqa: ANN401
        """Returns the number."""
        said = reader.number(self.key, *self.also, default=default, null=null, above=self.above, most=self.most)
        return self.make(said)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number."""
        return {self.key: self.back(self.found(parts))}


class Flag(Value):
    """True or false."""

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> bool:  # noqa: ANN401
        """Returns the flag."""
        return reader.flag(self.key, *self.also, default=default, null=null)


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Value):
    """One of the names in `choices`; a value that has several is written by the name that `written` has for it.

    Another key, `again`, may repeat it, and is carried.
    """

    _: KW_ONLY
    choices: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[Any, str] = field(default_factory=dict)
    again: str = ""

    def check(self, reader: ConfigReader, name: str, values: Values) -> None:
        """Raises InputError where the other key says another."""
        super().check(reader, name, values)
        if self.again and reader.given(self.again):
            same = reader.choice(self.again, choices=self.choices) == values[self.into]
            reader.require(self.again, same, f"the same as {self.key}")
        if self.again:
            reader.irrelevant(self.again, f"repeats {self.key}")

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> Any:  # noqa: ANN401
        """Returns what the name stands for."""
        return reader.choice(self.key, *self.also, choices=self.choices, default=default)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the name."""
        value = self.found(parts)
        named = (name for name, meant in self.choices.items() if meant == value)
        return {self.key: self.written.get(value) or next(named, value)}


@dataclass(frozen=True, eq=False, repr=False)
class Optional(Value):
    """A key whose value may be null, which is None to `build`; what it is otherwise, `of` says, and a default too."""

    _: KW_ONLY
    of: type[Value] = Size
    default: Any = None

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> Any:  # noqa: ANN401
        """Returns the value, None for null."""
        if reader.given(self.key):
            return self.of(self.key, self.into).get(reader, REQUIRED, REFUSED, values)
        return None if self.key in reader.config else default


class Declared:
    """Keys that are read and never written: what was carried of them is kept."""

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns nothing."""
        return {}


class Irrelevant(Declared):
    """Keys that do not change the model, for `reason`; they are carried."""

    def __init__(self, reason: str, *keys: str) -> None:
        self.reason, self.keys = reason, keys

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Declares them."""
        for key in self.keys:
            reader.irrelevant(key, self.reason)


class Only(Declared):
    """A key that may only be one of `allowed`, for `reason`, or missing; it is carried."""

    def __init__(self, key: str, *allowed: Any, reason: str) -> None:  # noqa: ANN401
        self.key, self.allowed, self.reason = key, allowed, reason

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Refuses another value."""
        reader.only(self.key, *(resolved(value, values) for value in self.allowed), reason=self.reason)


class Fixed(Only):
    """A key with one value that is allowed, which is always written."""

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the key."""
        return {self.key: self.allowed[0]}


class Carried(Declared):
    """A key that is carried with the class's own `value` where a config has none."""

    def __init__(self, key: str, value: Any) -> None:  # noqa: ANN401
        self.key, self.value = key, value

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Carries the value."""
        reader.carried.setdefault(self.key, self.value)


class Check(Declared):
    """What the keys read so far must be together: `must` names what is allowed, `key` the one at fault."""

    def __init__(self, key: str, must: Must) -> None:
        self.key, self.must = key, must

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Raises InputError naming the key unless the values are allowed."""
        reader.require(self.key, self.must[0](values), resolved(self.must[1], values))


class Group:
    """Keys whose values `make` one argument of `build`, beside those that are `given` of what was read before."""

    def __init__(
        self,
        into: str,
        make: Callable[..., Any],
        keys: tuple[Key, ...],
        given: Callable[[Values], Values] = lambda values: {},
    ) -> None:
        self.into, self.make, self.keys, self.given = into, make, keys, given

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the keys, in order."""
        own = self.given(values)
        for key in self.keys:
            key.read(reader, own)
        values[self.into] = self.make(**own)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns all the keys."""
        return written(self.keys, parts)


class Headed:
    """Whether a model ends in a head, which the first of two classes has and the second has not; `into` an argument."""

    def __init__(self, heads: tuple[str, str], into: str) -> None:
        self.heads, self.into = heads, into

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the class, which is the first where none is named."""
        values[self.into] = reader.config.get("architectures") != [self.heads[1]]

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the class."""
        return {"architectures": [self.heads[parts.model.head is None]]}


def but(keys: Iterable[Key], **others: Any) -> tuple[Key, ...]:  # noqa: ANN401
    """Returns the keys, but for those that go into the arguments named.

    In place of such a key is another, what a function makes of it, the same with other fields (a mapping), or none.
    """
    kept = []
    for key in keys:
        other = others.pop(getattr(key, "into", ""), key)
        if isinstance(other, Mapping):
            other = replace(cast(Any, key), **other)
        elif callable(other):
            other = other(key)
        kept += [] if other is None else [other]
    assert not others, f"no key goes into {[*others]}"
    return tuple(kept)


def defaults(keys: Iterable[Key], **others: Any) -> tuple[Key, ...]:  # noqa: ANN401
    """Returns the keys with other defaults, by the arguments that they go into."""
    return but(keys, **{into: {"default": other} for into, other in others.items()})


def written(keys: tuple[Key, ...], parts: Parts) -> dict[str, Any]:
    """Returns what all the keys write; raises InputError where one is the size of a part that the spec lacks."""
    try:
        return {name: value for key in keys for name, value in key.write(parts).items()}
    except StopIteration:  # no block has the part that a key is found in
        raise InputError(f"{parts.family} needs a part that no block has", field="blocks") from None


def depth(key: str, default: int, *also: str) -> Size:
    """Returns the key of the number of layers, each of which is made."""
    return Size(key, "n_layers", default=default, most=MOST_LAYERS, also=also)


def eps(key: str, default: float) -> Number:
    """Returns the key of the norms' epsilon."""
    return Number(key, "eps", default=default, most=1.0)


def activation(key: str = "hidden_act", default: str = "silu", tanh: str = "gelu_pytorch_tanh") -> Choice:
    """Returns the key of the activation; `tanh` is how the tanh form of GELU is written."""
    return Choice(key, "activation", default=default, choices=ACTIVATION_NAMES, written={"gelu_tanh": tanh})


def tied(default: bool) -> Flag:
    """Returns the key that says whether the head shares the embedding's table."""
    return Flag("tie_word_embeddings", "tied", default=default)
