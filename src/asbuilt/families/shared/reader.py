"""Total reading of a config: every key is consumed, declared irrelevant with a reason, or refused by name.

A key that nobody reads is how a config goes silently wrong, so `ConfigReader.finish` refuses whatever is left over.
A missing key and an explicit null are different things: the family states the default of the one and the meaning of
the other, and where it states none, the key is required or the null refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from asbuilt import files
from asbuilt.errors import InputError, near, one_of
from asbuilt.spec import Model
from asbuilt.spec.part import LARGEST_SIZE

# The largest published config.json (label names of a classifier) is below 1 MiB.
LARGEST_CONFIG = 16 * 2**20
LARGEST_NUMBER = 1e15  # rotary bases of million-token models reach 1e11
# How like a known key an unknown one must be to be taken for a slip of the pen: `num_expert` for `num_experts`.
SLIP = 0.85

# The sizes that make a model the one it is; vocabulary and the width of a head are often the same in a whole family.
_SHAPING = """
    hidden_size n_embd n_embed d_model num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
    num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_key_value_heads
    intermediate_size intermediate_size_mlp ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim moe_intermediate_size
    n_routed_experts num_local_experts num_experts num_experts_per_tok
"""
SHAPING = frozenset(_SHAPING.split())
# No size, and yet said with those that are defaults: whether the head has a matrix of its own.
TIED = "tie_word_embeddings"
NO_SIZES = ("_token_id", "_token_index", "num_labels")


class Unset(Enum):
    """What a getter does where the family states no value."""

    REQUIRED = "required"
    REFUSED = "refused"


REQUIRED, REFUSED = Unset.REQUIRED, Unset.REFUSED
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a config says: the model, the keys that do not change the model (verbatim), and the stored dtype.

    `quantization` says how the weights beside it are packed, verbatim; None where they are plain numbers. `text_packed`
    tells that it stands in `text_config`, and so is said of the text's weights alone. `defaults`
    are the sizes that the config does not say, by key, with what transformers' class has for them. `notes` say by key
    what a program other than transformers would do otherwise.
    """

    spec: Model
    carried: dict[str, Any]
    dtype: str | None
    family: str
    quantization: dict[str, Any] | None = None
    text_packed: bool = False
    defaults: dict[str, int | bool] = field(default_factory=dict, compare=False)
    notes: dict[str, str] = field(default_factory=dict, compare=False)


class UnreadKeys(InputError):
    """A config has keys that nobody reads; `keys` are their paths in it, `rope_scaling.attn_factor`."""

    def __init__(self, problem: str, *, field: str, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        options = " ".join(f"--allow-unread {shown(key)}" for key in self.keys[:10])
        super().__init__(problem, field=field, fix=f"if the model is the same without, pass over it: {options}")


class ConfigReader:
    """Reads one object of a config key by key; `where` names it in messages, as in `smollm2/config.json`.

    Every getter takes the key, then its other spellings. Two spellings may be present only if they agree. All raise
    InputError naming the key for a value of another type or outside the bounds; true and false are not numbers, and
    text is never turned into one.
    """

    def __init__(self, config: object, where: str, prefix: str = "", within: ConfigReader | None = None) -> None:
        if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
            field = f"{where}: {prefix.rstrip('.')}" if prefix else where
            raise InputError(field=field, value=config, allowed="a JSON object")
        self.config: dict[str, Any] = config
        self.where, self.prefix = where, prefix
        self.known: set[str] = set()
        self.carried: dict[str, Any] = {}
        # sizes that are missing, by path, shared with the readers of objects inside; those that are there, by key
        self.defaults: dict[str, int | bool] = {} if within is None else within.defaults
        self.notes: dict[str, str] = {} if within is None else within.notes
        self.names: dict[str, str] = {}  # what a key is for -> how it was spelled
        self._usual: dict[str, tuple[int, int | None]] = {}

    def error(
        self, key: str, problem: str = "", *, value: object = None, allowed: str = "", fix: str = ""
    ) -> InputError:
        """Returns the InputError that names `key` and the file."""
        return InputError(problem, field=f"{self.where}: {self.prefix}{key}", value=value, allowed=allowed, fix=fix)

    def require(self, key: str, ok: bool, allowed: str) -> None:
        """Raises InputError naming `key` and its value unless `ok`: for what one key must be beside another."""
        if not ok:
            raise self.error(key, value=self.config.get(key), allowed=allowed)

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
            raise self.error(name, value="null" if value is None else value, allowed=allowed)
        return cast(T, value)  # `ok` has seen to it

    def size(
        self,
        *keys: str,
        default: int | Unset = REQUIRED,
        null: int | Unset = REFUSED,
        least: int = 1,
        most: int = LARGEST_SIZE,
        derived: bool = False,
    ) -> int:
        """Returns a whole number from `least` to `most`.

        A default is the class's own figure, unless it is `derived` from what other keys say of this model.
        """
        ok: Callable[[Any], bool] = lambda x: is_whole(x) and least <= x <= most  # noqa: E731
        value = self._get(keys, default, null, ok, f"a whole number, {least} to {most}")
        if not isinstance(default, Unset):
            missing = self.spelled(*keys) is None
            if missing:
                self._note_default(keys[0], default)
            if keys[0] in SHAPING and not derived:
                self._usual[keys[0]] = default, None if missing else value
        return value

    def overruled(self, key: str, by: str) -> None:
        """Says that a size counts for nothing where `by` is given, so that its default is none of the model's."""
        if self.config.get(by) is not None:
            self.defaults.pop(self.prefix + key, None)

    def _note_default(self, key: str, value: int | bool) -> None:
        if not key.endswith(NO_SIZES):
            self.defaults[self.prefix + key] = value

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
        if keys[0] == TIED and not isinstance(default, Unset) and self.spelled(*keys) is None:
            self._note_default(TIED, default)
        return self._get(keys, default, null, lambda x: isinstance(x, bool), "true or false")

    def text(self, *keys: str, default: str | Unset = REQUIRED) -> str:
        """Returns a text."""
        return self._get(keys, default, REFUSED, lambda x: isinstance(x, str), "a text")

    def choice(self, *keys: str, choices: Mapping[str, T], default: str | Unset = REQUIRED) -> T:
        """Returns what `choices` makes of the value; `default` is one of its names."""
        ok: Callable[[Any], bool] = lambda x: isinstance(x, str) and x in choices  # noqa: E731
        return choices[self._get(keys, default, REFUSED, ok, one_of(choices))]

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
        return ConfigReader(self.config[name], self.where, f"{self.prefix}{name}.", within=self)

    def irrelevant(self, key: str, reason: str) -> None:
        """Declares that `key` does not change the model, for `reason`; its value is carried along verbatim."""
        assert reason, f"say why {key} is irrelevant"
        self.known.add(key)
        if key in self.config:
            self.carried[key] = self.config[key]

    def unused(self, key: str, reason: str) -> None:
        """Declares that no part of this model reads `key`, so that neither its value nor its default is the model's."""
        self.irrelevant(key, reason)
        self.defaults.pop(self.prefix + key, None)
        self._usual.pop(key, None)

    def note(self, key: str, reason: str, note: str) -> None:
        """Declares `key` irrelevant for `reason`, and where it is given leaves a `note` for whoever reads the model."""
        self.irrelevant(key, reason)
        if self.config.get(key) is not None:
            self.notes[self.prefix + key] = note

    def only(self, key: str, *allowed: object, reason: str) -> None:
        """Declares that `key` may only be one of `allowed` (or missing), and carries it; otherwise says `reason`."""
        self.irrelevant(key, reason)
        if key in self.config and not any(same(self.config[key], value) for value in allowed):
            value = self.config[key]
            raise self.error(key, reason, value="null" if value is None else value, allowed=say(allowed))

    def finish(self) -> None:
        """Raises InputError naming every key that nobody read, and where a missing size is not that of the class.

        A class's defaults are the sizes of one model. transformers writes all of them, so a config without some is
        either that model's or was cut short: where others of its sizes differ, a default would be a guess. Objects
        inside a config are not held to this, as published ones hold only what differs from the class.
        """
        unread = [key for key in self.config if key not in self.known]
        if unread:
            said = [f"{shown(key)!r} {self._suggestion(key)}".strip() for key in unread[:10]]
            more = f" and {len(unread) - 10} more" if len(unread) > 10 else ""
            field = f"{self.where}: {self.prefix.rstrip('.')}" if self.prefix else self.where
            raise UnreadKeys(
                f"unknown key {', '.join(said)}{more}", field=field, keys=[f"{self.prefix}{key}" for key in unread]
            )
        if not self.prefix:
            self._require_own_sizes()

    def _suggestion(self, key: str) -> str:
        """A hint where the key is nearly one that is read and is not there."""
        return near(key[:80], [name for name in self.known if name not in self.config], cutoff=SLIP)

    def _require_own_sizes(self) -> None:
        missing = [key for key, (_, value) in self._usual.items() if value is None]
        other = [key for key, (usual, value) in self._usual.items() if value not in (None, usual)]
        if missing and other:
            usual, value = self._usual[other[0]]
            problem = f"missing, and {self._usual[missing[0]][0]}, the class's default, is that of a model"
            raise self.error(
                missing[0],
                f"{problem} with {other[0]} = {usual}, where this one has {value}",
                fix="say it in the config",
            )


def shown(key: str) -> str:
    """Returns a key cut to what a message can hold, since a stranger chose it."""
    return key[:80]


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
    """Returns the values as JSON writes them, as a choice."""
    return one_of(json.dumps(value) for value in values)


def load_config_file(path: str | Path) -> dict[str, Any]:
    """Returns the JSON object in a config.json.

    `Infinity` and `NaN` are read as Python writes them: published configs hold them where they mean no limit, and what
    reads a size refuses them. Raises InputError for a file that cannot be read or is larger than 16 MiB, for text that
    is not UTF-8 or not JSON, for keys given twice, nesting too deep to parse, and anything but an object.
    """
    return files.read_object(Path(path), LARGEST_CONFIG, finite=False)
