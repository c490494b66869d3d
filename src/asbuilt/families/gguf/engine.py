"""GGUF as a second set of keys and names on a family: a header becomes the family's config, its table other names.

An `Architecture` says what one `general.architecture` means: which family it is, which of its keys is which key of that
family's config.json, and what llama.cpp's converter does to tensors. The config goes through the family's own reader,
so every check and default of the family applies; what that refuses is said in the file's own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from asbuilt.errors import InputError
from asbuilt.families.gguf.scaling import (
    carried_tokens,
    gguf_reader,
    read_gguf_rotary,
    shortest,
    stored_dtype,
    vocabulary,
    write_gguf_rotary,
)
from asbuilt.families.shared.reader import REQUIRED, ConfigReader, Reading, Unset
from asbuilt.families.shared.rotary import partial_factor, write_rotary
from asbuilt.families.shared.table import Entry
from asbuilt.spec import Attention, LatentAttention, Model, Rotary, walk
from asbuilt.spec.part import LARGEST_SIZE

if TYPE_CHECKING:
    from asbuilt.formats.gguf import GGUFFile


@dataclass
class Header:
    """A file's metadata as an architecture reads it: `config` is what it says so far, in the family's keys.

    `names` has the GGUF key of each of them, for messages; `d_head` is the width of a head, once it is read.
    """

    file: GGUFFile
    reader: ConfigReader
    architecture: str
    d_head: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def key(self, suffix: str) -> str:
        """Returns the whole GGUF key, `llama.block_count`."""
        return f"{self.architecture}.{suffix}"

    def given(self, suffix: str) -> bool:
        """Returns whether the file has the key, and counts it as read."""
        return self.reader.given(self.key(suffix))

    def says(self, to: str, value: object, suffix: str) -> None:
        """Sets a key of the config, which `suffix` says in the file."""
        self.config[to] = value
        self.names[to] = self.key(suffix)

    def stores(self, *names: str) -> bool:
        """Returns whether the file has any of these tensors."""
        return any(name in self.file.tensors for name in names)


@dataclass
class Writing:
    """A header in the making: `config` is the family's, of `spec`, and `metadata` what the keys have said so far.

    `values` are tensors beside the model's own, divisors of rotary frequencies.
    """

    architecture: str
    config: Mapping[str, Any]
    spec: Model
    metadata: dict[str, Any] = field(default_factory=dict)
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def says(self, suffix: str, value: object) -> None:
        """Sets a key, unless the value is None."""
        if value is not None:
            self.metadata[f"{self.architecture}.{suffix}"] = value

    def says_number(self, suffix: str, value: float | None) -> None:
        """Sets a key to a number with a fraction."""
        self.says(suffix, value if value is None else float(value))

    def turns(self, rotary: Rotary, log_multiplier: float | None = None) -> None:
        """Sets the keys of rotary positions."""
        said, values = write_gguf_rotary(rotary, log_multiplier=log_multiplier)
        for suffix, value in said.items():
            self.says(f"rope.{suffix}", value)
        self.values |= values

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions of the first layer that has any and attends to all tokens, or that has any."""
        attentions = [part for _, part in walk(self.spec) if isinstance(part, Attention | LatentAttention)]
        attentions.sort(key=lambda part: getattr(part, "window", None) is not None)
        found = (getattr(part, "positions", None) for part in attentions)
        return next((positions for positions in found if isinstance(positions, Rotary)), None)


class Key(Protocol):
    """Some of the header, read into the family's config and written from it."""

    def __call__(self, header: Header, /) -> None:
        """Reads it into the config; raises InputError naming the key at fault."""
        ...

    def write(self, writing: Writing, /) -> None:
        """Says it, as the config has it."""
        ...


@dataclass(frozen=True)
class Both:
    """Keys that need code of their own, to read and to write; to write nothing where tensors or others say it."""

    read: Callable[[Header], None]
    wrote: Callable[[Writing], None] = lambda writing: None

    def __call__(self, header: Header) -> None:
        """Reads them."""
        self.read(header)

    def write(self, writing: Writing) -> None:
        """Says them."""
        self.wrote(writing)


@dataclass(frozen=True)
class Size:
    """A whole number that the config says as `to`; without a default the file must have it.

    `otherwise` is what a config means that does not say it.
    """

    suffix: str
    to: str
    default: int | Unset = REQUIRED
    least: int = 1
    most: int = LARGEST_SIZE
    otherwise: Callable[[Mapping[str, Any]], int | None] = lambda config: None

    def __call__(self, header: Header) -> None:
        """Reads it."""
        key = header.key(self.suffix)
        header.says(
            self.to, header.reader.size(key, default=self.default, least=self.least, most=self.most), self.suffix
        )

    def write(self, writing: Writing) -> None:
        """Says it."""
        said = writing.config.get(self.to)
        writing.says(self.suffix, self.otherwise(writing.config) if said is None else said)


@dataclass(frozen=True)
class Number:
    """A float32 that the config says as `to`, in the decimal that it was written as; without a default it is needed."""

    suffix: str
    to: str
    default: float | Unset = REQUIRED
    most: float = 1e15
    made: Callable[[float], float] = lambda x: x

    def __call__(self, header: Header) -> None:
        """Reads it."""
        said = header.reader.number(header.key(self.suffix), default=self.default, most=self.most)
        header.says(self.to, self.made(shortest(said)), self.suffix)

    def write(self, writing: Writing) -> None:
        """Says it."""
        writing.says_number(self.suffix, writing.config.get(self.to))


@dataclass(frozen=True)
class Flag:
    """True or false, which the config says as `to`."""

    suffix: str
    to: str
    default: bool | Unset = REQUIRED

    def __call__(self, header: Header) -> None:
        """Reads it."""
        header.says(self.to, header.reader.flag(header.key(self.suffix), default=self.default), self.suffix)

    def write(self, writing: Writing) -> None:
        """Says it."""
        writing.says(self.suffix, writing.config.get(self.to))


@dataclass(frozen=True)
class Window:
    """How many tokens are seen; 0 or nothing means all of them, and leaves the config without the key."""

    suffix: str = "attention.sliding_window"
    to: str = "sliding_window"

    def __call__(self, header: Header) -> None:
        """Reads it."""
        window = header.reader.size(header.key(self.suffix), default=0, least=0)
        if window:
            header.says(self.to, window, self.suffix)

    def write(self, writing: Writing) -> None:
        """Says it."""
        writing.says(self.suffix, writing.config.get(self.to))


@dataclass(frozen=True)
class Only:
    """A key that is missing or says one of `allowed`: the family is so, whatever a file says."""

    suffix: str
    allowed: tuple[object, ...]
    reason: str

    def __call__(self, header: Header) -> None:
        """Refuses another value."""
        header.reader.only(header.key(self.suffix), *self.allowed, reason=self.reason)

    def write(self, writing: Writing) -> None:
        """Says the usual value, unless it is the 0 that a missing key means too."""
        if type(self.allowed[0]) is not int or self.allowed[0]:
            writing.says(self.suffix, self.allowed[0])


@dataclass(frozen=True)
class Irrelevant:
    """A key that does not change the model, for a reason."""

    suffix: str
    reason: str

    def __call__(self, header: Header) -> None:
        """Passes it over."""
        header.reader.irrelevant(header.key(self.suffix), self.reason)

    def write(self, writing: Writing) -> None:
        """Says nothing."""


@dataclass(frozen=True)
class Stored:
    """A flag of the config, true where the file has any of these tensors."""

    to: str
    names: tuple[str, ...]
    absent: bool = False  # true where the flag says that there are none

    def __call__(self, header: Header) -> None:
        """Looks them up."""
        header.config[self.to] = header.stores(*self.names) != self.absent
        header.names[self.to] = self.names[0]

    def write(self, writing: Writing) -> None:
        """Says nothing: the tensors do."""


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the token table, and whether the head has a matrix of its own."""

    to: str = "vocab_size"
    tied: str = "tie_word_embeddings"

    def __call__(self, header: Header) -> None:
        """Reads both."""
        header.says(self.to, vocabulary(header.reader, header.file, header.architecture), "vocab_size")
        header.config[self.tied] = not header.stores("output.weight")
        header.names[self.tied] = "output.weight"

    def write(self, writing: Writing) -> None:
        """Says it."""
        writing.says("vocab_size", writing.config.get(self.to))


@dataclass(frozen=True)
class Heads:
    """How many heads there are and how wide they are, in the config's keys.

    `kv` empty means that the family has as many key heads as heads, `width` empty that heads are d_model / n_heads
    wide.
    """

    d_model: str = "hidden_size"
    n_heads: str = "num_attention_heads"
    kv: str = "num_key_value_heads"
    width: str = "head_dim"

    def __call__(self, header: Header) -> None:
        """Reads the numbers of heads, then the width."""
        reader, d_model = header.reader, header.config[self.d_model]
        heads, kv = header.key("attention.head_count"), header.key("attention.head_count_kv")
        n_heads = reader.size(heads)
        n_kv_heads = reader.size(kv, default=n_heads)
        reader.require(kv, n_heads % n_kv_heads == 0, f"a divisor of {heads} = {n_heads}")
        reader.require(kv, bool(self.kv) or n_kv_heads == n_heads, f"{heads} = {n_heads}")
        header.says(self.n_heads, n_heads, "attention.head_count")
        if self.kv:
            header.says(self.kv, n_kv_heads, "attention.head_count_kv")
        width = header.key("attention.key_length")
        if not header.given("attention.key_length"):
            divides = f"a divisor of {header.names[self.d_model]} = {d_model}"
            reader.require(heads, d_model % n_heads == 0, divides)
        header.d_head = reader.size(width, default=d_model // n_heads)
        usual = bool(self.width) or header.d_head * n_heads == d_model
        reader.require(width, usual, f"{header.names[self.d_model]} / {heads}")
        d_value = header.key("attention.value_length")
        reader.require(d_value, reader.size(d_value, default=header.d_head) == header.d_head, f"{width}")
        if self.width:
            header.says(self.width, header.d_head, "attention.key_length")

    def write(self, writing: Writing) -> None:
        """Says them, the width only where it is not d_model / n_heads."""
        config = writing.config
        n_heads, d_model = config[self.n_heads], config[self.d_model]
        kv = config.get(self.kv)
        writing.says("attention.head_count", n_heads)
        writing.says("attention.head_count_kv", n_heads if kv is None else kv)
        width = config.get(self.width)
        if width is not None and width * n_heads != d_model:
            writing.says("attention.key_length", width)
            writing.says("attention.value_length", width)


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `fraction` is the config's key of how much of a head turns, empty where all of it does."""

    context: str = "max_position_embeddings"
    theta: str = "rope_theta"
    fraction: str = ""

    def __call__(self, header: Header) -> None:
        """Reads base, scaling and divisors."""
        context, partial = header.config[self.context], bool(self.fraction)
        even = header.d_head % 2 == 0
        allowed = f"an even number, not {header.d_head}: rotary positions turn pairs"
        header.reader.require(header.key("attention.key_length"), even or partial, allowed)
        rotary = read_gguf_rotary(
            header.reader, header.file, header.architecture, header.d_head, context, partial=partial
        )
        written = write_rotary(rotary, context)
        header.says(self.theta, written["rope_theta"], "rope.freq_base")
        if written["rope_scaling"] is not None:
            header.says("rope_scaling", written["rope_scaling"], "rope.scaling")
        if partial:
            header.says(self.fraction, partial_factor(rotary.d_rotary, header.d_head), "rope.dimension_count")

    def write(self, writing: Writing) -> None:
        """Says it."""
        if (rotary := writing.rotary) is not None:
            writing.turns(rotary)


@dataclass(frozen=True)
class Join:
    """Maps of the model that lie in one tensor `name`, one after the other along their outputs."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What files of one `general.architecture` mean; where families share one, `when` tells them apart.

    `adjacent` says that llama.cpp turns adjacent numbers of a head, so that the rows of q and k of a family that pairs
    halves are stored in another order. `plus_one` says that gains of norms are stored with the 1 added that the family
    adds when it applies them. `joined` are maps that always lie in one tensor, `may_join` those that do in some files.
    `names` are stems of GGUF names that differ from the usual ones. `more` makes the entries of weights that need
    layouts of their own, from the model, a prefix of paths, one of names, and what the file has. Where the family
    `predicts`, but a file has its prediction layers only in part, they are passed over. `sides` is what names of the
    decoder and of the encoder begin with. `unsaid` are fields of the spec that no key says, and what those who read a
    file compute instead.
    """

    name: str
    family: str
    keys: tuple[Key, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    adjacent: bool = False
    plus_one: bool = False
    joined: tuple[Join, ...] = ()
    may_join: tuple[Join, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Model, str, str, Collection[str]], list[Entry]] | None = None
    predicts: bool = False
    sides: tuple[str, str] = ("", "")
    unsaid: Mapping[str, str] = field(default_factory=dict)
    when: Callable[[GGUFFile], bool] = lambda file: True
    finish: Callable[[Model, GGUFFile], Model] = lambda spec, file: spec


ReadConfig = Callable[[dict[str, Any], str], Reading]
FIRST_MAPS = tuple(
    f"{stem}.weight" for stem in ("blk.0.attn_q", "blk.0.attn_qkv", "blk.0.attn_q_a", "enc.blk.0.attn_q")
)


def read(architecture: Architecture, file: GGUFFile, name: str, read_config: ReadConfig) -> Reading:
    """Returns what a file's header says, by way of a config of the family.

    Raises InputError naming the GGUF key at fault, one that nobody reads included.
    """
    header = Header(file, gguf_reader(file, name), architecture.name)
    header.config.update({"model_type": architecture.family, **architecture.constants})
    for key in architecture.keys:
        key(header)
    header.reader.finish()
    try:
        reading = read_config(header.config, name)
    except InputError as error:
        raise _with_file_keys(error, header.names, name) from error
    dtype = next((dtype for tensor in FIRST_MAPS if (dtype := stored_dtype(file, tensor))), None)
    return replace(
        reading,
        spec=architecture.finish(reading.spec, file),
        carried=reading.carried | carried_tokens(file),
        dtype=dtype,
        defaults={},
        notes={},
    )


def _with_file_keys(error: InputError, names: Mapping[str, str], name: str) -> InputError:
    """Returns the error with the config's keys in it as the file spells them."""

    def own(text: str) -> str:
        return re.sub(r"[a-z0-9_]+", lambda found: names.get(found.group(), found.group()), text)

    where = f"{name}: " if error.field.startswith(f"{name}: ") else ""
    return InputError(
        own(error.problem),
        field=where + own(error.field.removeprefix(where)),
        value=error.value,
        allowed=own(error.allowed),
        fix=own(error.fix),
    )


@dataclass(frozen=True, kw_only=True)
class Written:
    """A header to be written: its keys, those of the tokenizer and of the file aside, and small tensors of its own.

    `notes` say by the path of a field what whoever reads the file computes instead.
    """

    architecture: Architecture
    metadata: dict[str, Any]
    values: dict[str, tuple[float, ...]]
    notes: Mapping[str, str] = field(default_factory=dict)


def write(architecture: Architecture, spec: Model, config: Mapping[str, Any]) -> Written:
    """Returns what the header of a file says of the model that `config` describes, in the family's keys."""
    writing = Writing(architecture.name, config, spec)
    for key in architecture.keys:
        key.write(writing)
    return Written(architecture=architecture, metadata=writing.metadata, values=writing.values)
