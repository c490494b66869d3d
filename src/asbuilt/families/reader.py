"""Total reading of a config: every key is consumed, declared irrelevant with a reason, or refused by name.

A key that nobody reads is how a config goes silently wrong, so `ConfigReader.finish` refuses whatever is left over.
A missing key and an explicit null are different things: the family states the default of the one and the meaning of
the other, and where it states none, the key is required or the null refused.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from asbuilt.errors import InputError, near
from asbuilt.spec import Model
from asbuilt.spec.part import LARGEST_SIZE

# The largest published config.json (label names of a classifier) is below 1 MiB.
LARGEST_CONFIG = 16 * 2**20
LARGEST_NUMBER = 1e15  # rotary bases of million-token models reach 1e11


class Unset(Enum):
    """What a getter does where the family states no value."""

    REQUIRED = "required"
    REFUSED = "refused"


REQUIRED, REFUSED = Unset.REQUIRED, Unset.REFUSED
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a config says: the model, the keys that do not change the model (verbatim), and the stored dtype.

    `quantization` says how the weights beside it are packed, verbatim; None where they are plain numbers.
    """

    spec: Model
    carried: dict[str, Any]
    dtype: str | None
    family: str
    quantization: dict[str, Any] | None = None


class ConfigReader:
    """Reads one object of a config key by key; `where` names it in messages, as in `smollm2/config.json`.

    Every getter takes the key, then its other spellings. Two spellings may be present only if they agree. All raise
    InputError naming the key for a value of another type or outside the bounds; true and false are not numbers, and
    text is never turned into one.
    """

    def __init__(self, config: object, where: str, prefix: str = "") -> None:
        if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
            field = f"{where}: {prefix.rstrip('.')}" if prefix else where
            raise InputError("not a JSON object", field=field, value=config)
        self.config: dict[str, Any] = config
        self.where, self.prefix = where, prefix
        self.known: set[str] = set()
        self.carried: dict[str, Any] = {}

    def error(self, key: str, problem: str, *, value: object = None, allowed: str = "", fix: str = "") -> InputError:
        """Returns the InputError that names `key` and the file."""
        return InputError(problem, field=f"{self.where}: {self.prefix}{key}", value=value, allowed=allowed, fix=fix)

    def require(self, key: str, ok: bool, allowed: str) -> None:
        """Raises InputError naming `key` and its value unless `ok`: for what one key must be beside another."""
        if not ok:
            raise self.error(key, "not allowed", value=self.config.get(key), allowed=allowed)

    def given(self, key: str) -> bool:
        """Returns whether `key` is there and not null."""
        self.known.add(key)
        return self.config.get(key) is not None

    def spelled(self, key: str, *others: str) -> str | None:
        """Returns which of the spellings is used, None where none is; raises InputError where two disagree."""
        self.known.update((key, *others))
        found = [name for name in (key, *others) if name in self.config]
        for name in found[1:]:
            if not same(self.config[found[0]], self.config[name]):
                raise self.error(name, f"disagrees with {self.prefix}{found[0]}", value=self.config[name])
        return found[0] if found else None

    def _get(
        self, keys: tuple[str, ...], default: T | Unset, null: T | Unset, ok: Callable[[Any], bool], allowed: str
    ) -> T:
        name = self.spelled(*keys)
        if name is None:
            if isinstance(default, Unset):
                raise self.error(keys[0], "missing", allowed=allowed)
            return default
        value = self.config[name]
        if value is None and not isinstance(null, Unset):
            return null
        if not ok(value):
            raise self.error(name, "not allowed", value="null" if value is None else value, allowed=allowed)
        return cast(T, value)  # `ok` has seen to it

    def size(
        self,
        *keys: str,
        default: int | Unset = REQUIRED,
        null: int | Unset = REFUSED,
        least: int = 1,
        most: int = LARGEST_SIZE,
    ) -> int:
        """Returns a whole number from `least` to `most`."""
        ok: Callable[[Any], bool] = lambda x: is_whole(x) and least <= x <= most  # noqa: E731
        return self._get(keys, default, null, ok, f"a whole number, {least} to {most}")

    def number(
        self,
        *keys: str,
        default: float | Unset = REQUIRED,
        null: float | Unset = REFUSED,
        above: float = 0.0,
        most: float = LARGEST_NUMBER,
    ) -> float:
        """Returns a finite number greater than `above` and at most `most`."""
        ok: Callable[[Any], bool] = lambda x: is_number(x) and above < x <= most  # noqa: E731
        return float(self._get(keys, default, null, ok, f"a number above {above:g}, at most {most:g}"))

    def flag(self, *keys: str, default: bool | Unset = REQUIRED, null: bool | Unset = REFUSED) -> bool:
        """Returns true or false."""
        return self._get(keys, default, null, lambda x: isinstance(x, bool), "true or false")

    def text(self, *keys: str, default: str | Unset = REQUIRED) -> str:
        """Returns a text."""
        return self._get(keys, default, REFUSED, lambda x: isinstance(x, str), "a text")

    def choice(self, *keys: str, choices: Mapping[str, T], default: str | Unset = REQUIRED) -> T:
        """Returns what `choices` makes of the value; `default` is one of its names."""
        ok: Callable[[Any], bool] = lambda x: isinstance(x, str) and x in choices  # noqa: E731
        return choices[self._get(keys, default, REFUSED, ok, ", ".join(choices))]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Returns a list of `length` finite numbers above 0."""

        def ok(x: object) -> bool:
            return isinstance(x, list) and len(x) == length and all(is_number(n) and n > 0 for n in x)

        return tuple(map(float, self._get((key,), REQUIRED, REFUSED, ok, f"a list of {length} numbers above 0")))

    def nested(self, *keys: str) -> ConfigReader | None:
        """Returns a reader of an object inside, None where it is missing or null; call its `finish` too."""
        name = self.spelled(*keys)
        if name is None or self.config[name] is None:
            return None
        return ConfigReader(self.config[name], self.where, f"{self.prefix}{name}.")

    def irrelevant(self, key: str, reason: str) -> None:
        """Declares that `key` does not change the model, for `reason`; its value is carried along verbatim."""
        assert reason, f"say why {key} is irrelevant"
        self.known.add(key)
        if key in self.config:
            self.carried[key] = self.config[key]

    def only(self, key: str, *allowed: object, reason: str) -> None:
        """Declares that `key` may only be one of `allowed` (or missing), and carries it; otherwise says `reason`."""
        self.irrelevant(key, reason)
        if key in self.config and not any(same(self.config[key], value) for value in allowed):
            value = self.config[key]
            raise self.error(key, reason, value="null" if value is None else value, allowed=say(allowed))

    def finish(self) -> None:
        """Raises InputError naming every key that nobody read, each with the nearest known key."""
        unread = [key for key in self.config if key not in self.known]
        if unread:
            said = [f"{key[:80]!r} {hint}".strip() for key in unread[:10] for hint in [near(key[:80], self.known)]]
            more = f" and {len(unread) - 10} more" if len(unread) > 10 else ""
            field = f"{self.where}: {self.prefix.rstrip('.')}" if self.prefix else self.where
            raise InputError(
                f"unknown key {', '.join(said)}{more}", field=field, fix="remove it if it does not change the model"
            )


def is_whole(value: object) -> bool:
    """Returns whether `value` is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether `value` is a finite number that a float can hold; true and false are not."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def same(a: object, b: object) -> bool:
    """Returns whether two JSON values are equal, where false is not 0 and true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def say(values: tuple[object, ...]) -> str:
    """Returns the values as JSON would write them."""
    return ", ".join(json.dumps(value) for value in values)


def load_config_file(path: str | Path) -> dict[str, Any]:
    """Returns the JSON object in a config.json.

    Raises InputError for a file that cannot be read or is larger than 16 MiB, for text that is not UTF-8 or not JSON,
    for keys given twice, numbers without a finite value, nesting too deep to parse, and anything but an object.
    """
    text = _read_text(Path(path))

    def refuse(problem: str) -> InputError:
        return InputError(problem, field=str(path))

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise refuse(f"{number[:40]} is not a finite number")
        return float(number)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise refuse(f"key given twice: {twice[:80]!r}")
        return made

    try:
        config = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except ValueError as error:
        raise refuse(f"not JSON: {error}") from error
    except RecursionError as error:
        raise refuse("nested too deeply to be a config") from error
    if not isinstance(config, dict):
        raise InputError("not a JSON object", field=str(path), value=config)
    return config


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():  # a pipe would never end, a folder has a file inside that is meant
            raise InputError("not a file", field=str(path), fix="give the path of a config.json")
        with path.open("rb") as file:
            data = file.read(LARGEST_CONFIG + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be read: {error}", field=str(path)) from error
    if len(data) > LARGEST_CONFIG:
        raise InputError("too large for a config", field=str(path), allowed="16 MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}", field=str(path)) from error
