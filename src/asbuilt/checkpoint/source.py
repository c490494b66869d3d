"""Resolving MODEL: a catalogue name, a config, a checkpoint folder, a GGUF file, a spec, or a hub id.

Opening reads only descriptions: JSON and headers. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asbuilt.checkpoint import hub
from asbuilt.checkpoint.own import OWN, own_reading
from asbuilt.errors import InputError, near
from asbuilt.families import (
    Reading,
    families_that_write,
    load_config_file,
    read_config,
    read_gguf,
    saved_alone,
    tensor_table,
)
from asbuilt.families.shared.table import as_stored
from asbuilt.formats.gguf import GGUFFile, read_header
from asbuilt.formats.safetensors import PICKLES, has_weights, pickle_error, read_folder
from asbuilt.packing import CACHE
from asbuilt.spec import Model, from_dict
from asbuilt.spec.whole import WHOLES
from asbuilt.text.ends import declared_ends
from asbuilt.text.spoken import NO_TIMES, heard_tokens, languages, task_tokens, without_times

if TYPE_CHECKING:
    from asbuilt.catalog import Entry
    from asbuilt.text.tokenizer import Tokenizer

Kind = Literal["catalogue", "config", "folder", "gguf", "spec"]
CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
PACKING = "hf_quant_config.json"  # how NVIDIA's modelopt packed the weights, if config.json does not state it
OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # the same of AutoGPTQ and AutoAWQ, at first


@dataclass(frozen=True, kw_only=True)
class Source:
    """A resolved model: its description (`reading`), and the location of its weights, if any (`path`).

    A folder in asbuilt's `own` layout stores tensors under the spec's paths, whichever family could express it.
    """

    kind: Kind
    name: str
    reading: Reading
    path: Path | None = None
    gguf: GGUFFile | None = field(default=None, repr=False)
    own: bool = False

    @property
    def spec(self) -> Model:
        """The model's description."""
        return self.reading.spec

    @property
    def family(self) -> str:
        """The `model_type`; empty for a spec that no published family can express."""
        return self.reading.family

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to load."""
        return self.gguf is not None or (self.kind == "folder" and self.path is not None and has_weights(self.path))

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer, None if the source has none; raises InputError if it is unusable."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        # The tokenizers library is part of the torch extra, so it is imported only if there is a tokenizer.
        if self.gguf is not None:
            if self.gguf.metadata.get("tokenizer.ggml.model") in (None, "no_vocab"):
                return None
            from asbuilt.text.tokenizer import Tokenizer

            return Tokenizer.from_gguf(self.gguf)
        if self.kind != "folder" or self.path is None or not os.path.lexists(self.path / TOKENIZER):
            return None
        from asbuilt.text.tokenizer import Tokenizer

        return Tokenizer.from_file(self.path)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The contents of a generation_config.json beside the config."""
        file = None if self.kind != "folder" or self.path is None else self.path / GENERATION
        return load_config_file(file) if file is not None and os.path.lexists(file) else {}

    @property
    def _generation(self) -> dict[str, Any]:
        """Generation settings: those of the config, overridden by a generation_config.json beside it."""
        return self.reading.carried | {key: value for key, value in self._settings.items() if value is not None}

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All end tokens, from the tokenizer, the generation settings and the config.

        Raises InputError for anything but token ids.
        """
        tokenizer = self.tokenizer()
        told = (declared_ends(self._settings, GENERATION), declared_ends(self.reading.carried, CONFIG))
        return tuple(dict.fromkeys([*(tokenizer.eos_ids if tokenizer is not None else ()), *chain(*told)]))

    @property
    def decoder_start(self) -> tuple[int, ...]:
        """The first tokens of an encoder-decoder model's text: its start token, and the forced tokens after it.

        The language and the task of a speech model that are set, and that it writes no times, overrule forced tokens.

        Raises InputError if neither config has a start token.
        """
        return self.begun()

    @property
    def languages(self) -> tuple[int, ...]:
        """The tokens of languages of which a speech model is to hear one, as no setting says which; none otherwise."""
        return tuple(languages(self._generation, self.name).values())

    @property
    def timed(self) -> bool:
        """Whether the settings want times in a speech model's text."""
        return self._generation.get("return_timestamps") is True

    @property
    def times(self) -> tuple[int, int | None]:
        """The first token that says a time, and the last time with which a text may begin, None for any.

        Raises InputError for a model without such tokens.
        """
        said = self._generation
        token, latest = said.get(NO_TIMES), said.get("max_initial_timestamp_index")
        if type(token) is not int or type(latest) not in (int, type(None)):
            raise InputError(
                "the folder's settings say no tokens of times", field=f"{self.name}: {NO_TIMES}", value=token
            )
        return token + 1, latest

    def begun(self, language: int | None = None, times: bool | None = None) -> tuple[int, ...]:
        """Returns `decoder_start` in the `language` of this token, if it was heard, and with `times` or without.

        None is for what the settings say.
        """
        said = self._generation | ({} if times is None else {"return_timestamps": times})
        start = said.get("bos_token_id") if (own := said.get("decoder_start_token_id")) is None else own
        if type(start) is not int:
            raise InputError(
                field=f"{self.name}: decoder_start_token_id",
                value=start,
                allowed="a token id, in config.json or generation_config.json",
            )
        if language is not None:
            return start, *heard_tokens(said, self.name, language)
        spoken = () if self.languages else task_tokens(said, self.name)
        if spoken:
            return start, *spoken
        forced = said.get("forced_bos_token_id")
        first = (start,) if type(forced) is not int else (start, forced)
        first = first if (later := said.get("forced_decoder_ids")) is None else (*first, *_forced(later, len(first)))
        return without_times(said, first)

    @property
    def suppressed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that generation never chooses, and those that it does not choose first.

        Raises InputError for anything but token ids; numbers that no token has say nothing.
        """
        found = []
        for key in ("suppress_tokens", "begin_suppress_tokens"):
            said = self._generation.get(key) or []
            if not isinstance(said, list) or not all(type(token) is int for token in said):
                raise InputError(field=f"{self.name}: {key}", value=said, allowed="a list of token ids, or null")
            found.append(tuple(token for token in said if 0 <= token < self.spec.n_vocab))
        return found[0], found[1]

    @property
    def chat_template(self) -> str | None:
        """The chat template, None if there is none."""
        tokenizer = self.tokenizer()
        return None if tokenizer is None else tokenizer.chat_template


def _forced(given: object, place: int) -> list[int]:
    """Returns the tokens of `forced_decoder_ids`, pairs [place, token], from `place` to the first that is left open."""
    allowed = "a list of pairs [place, token id or null]"
    found: list[int] = []
    for pair in given if isinstance(given, list) else [None]:
        at, token = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if at != place + len(found) or type(token) not in (int, type(None)):
            raise InputError(field="forced_decoder_ids", value=given, allowed=allowed)
        if token is None:
            break
        found.append(token)
    return found


def open_model(model: str | Path, *, weights: bool = False, allow_unread: Sequence[str] = ()) -> Source:
    """Returns the source that `model` names; `allow_unread` is as in `read_config`.

    Tried in this order: a file; a folder with a config.json, or in asbuilt's own layout; a catalogue name; a hub id,
    ORG/MODEL@REVISION. Of a hub model only the descriptions are downloaded, unless `weights`, in which case the hub
    comes before a catalogue name, which has no weights. Raises InputError, with similar catalogue names, if nothing is
    found, and for an invalid description.
    """
    path = Path(model)
    try:
        if path.is_dir():
            if any((path / name).exists() for name in (CONFIG, OWN)) or _catalogued(str(model)) is None:
                return _open_folder(path, allow_unread)
        elif "\0" not in str(path) and path.exists():
            return _open_file(path, allow_unread)
    except OSError as error:  # a name too long for the file system, or a folder without permission
        raise InputError(f"cannot be read: {error.strerror}", field="MODEL", value=str(model)) from error
    return _open_name(str(model), weights, allow_unread)


def _open_file(path: Path, allow_unread: Sequence[str]) -> Source:
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _open_json(path, allow_unread)
    if suffix == ".gguf":
        file = read_header(path)
        _require_blocks(file)
        reading = read_gguf(file, file.name, allow_unread)
        return Source(kind="gguf", name=file.name, reading=reading, path=path, gguf=file)
    if suffix in PICKLES:
        raise pickle_error(str(path.parent), path.name)
    fix = "give the folder that holds it and its config.json" if suffix == ".safetensors" else ""
    raise InputError(field="MODEL", value=str(path), allowed="a .json or .gguf file, or a folder", fix=fix)


def _require_blocks(file: GGUFFile) -> None:
    """Raises InputError for more blocks than tensors: building them would waste time and memory before an error."""
    key = f"{file.metadata.get('general.architecture')}.block_count"
    said, held = file.metadata.get(key), len(file.tensors)
    if held and isinstance(said, int) and said > held:
        raise InputError(
            "more blocks than tensors",
            field=f"{file.path}: {key[:80]}",
            value=said,
            allowed=f"at most {held}",
        )


def _open_json(path: Path, allow_unread: Sequence[str]) -> Source:
    if path.name == OWN:  # the description alone: a folder with weights is named itself
        return replace(_open_own(path, allow_unread), kind="spec", path=path)
    data = load_config_file(path)
    name = path.resolve().parent.name if path.name == CONFIG else path.stem
    if "part" not in data:
        return Source(
            kind="config", name=name, reading=_with_packing(read_config(data, name, allow_unread), path), path=path
        )
    if allow_unread:
        raise _nothing_to_pass_over(path.name, allow_unread)
    spec = from_dict(data, path.name)
    if not isinstance(spec, Model):
        names = ", ".join(part.__name__ for part in WHOLES)
        raise InputError(field=f"{path}: part", value=data["part"], allowed=names)
    family = next(iter(families_that_write(spec)), "")
    return Source(
        kind="spec", name=spec.name, reading=Reading(spec=spec, carried={}, dtype=None, family=family), path=path
    )


def _nothing_to_pass_over(name: str, allow_unread: Sequence[str]) -> InputError:
    return InputError(
        "applies only to a config.json, a checkpoint folder or a GGUF file",
        field="allow-unread",
        value=", ".join(allow_unread),
        fix=f"{name} is none of these",
    )


def _open_folder(path: Path, allow_unread: Sequence[str] = ()) -> Source:
    if not (path / CONFIG).exists():
        if (path / OWN).exists():
            return _open_own(path / OWN, allow_unread)
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        fix = f"give the file: {path / ggufs[0]}" if ggufs else ""
        raise InputError(f"the folder has no {CONFIG}", field="MODEL", value=str(path), fix=fix)
    name = path.resolve().name
    reading = _with_packing(read_config(load_config_file(path / CONFIG), name, allow_unread), path / CONFIG)
    return Source(kind="folder", name=name, reading=_as_stored(reading, path), path=path)


def _open_own(path: Path, allow_unread: Sequence[str]) -> Source:
    if allow_unread:
        raise _nothing_to_pass_over(OWN, allow_unread)
    folder = path.parent
    return Source(kind="folder", name=folder.resolve().name, reading=own_reading(path), path=folder, own=True)


def _with_packing(reading: Reading, config: Path) -> Reading:
    """Returns the reading with the packing of the weights stated in a file beside the config."""
    if reading.quantization is not None or config.name != CONFIG:
        return reading
    for name, method in OLDER.items():
        if (config.parent / name).exists():
            said = load_config_file(config.parent / name)
            return replace(reading, quantization={"quant_method": method, **said})
    file = config.parent / PACKING
    if not file.exists():
        return reading
    said = load_config_file(file).get("quantization")
    if not isinstance(said, dict):
        raise InputError(field=f"{file}: quantization", value=said, allowed="a JSON object")
    states = any(said.get(key) is not None for key in ("quant_algo", "quantized_layers", *CACHE))
    return replace(reading, quantization={"quant_method": "modelopt", **said}) if states else reading


def _as_stored(reading: Reading, path: Path) -> Reading:
    """Returns the reading without what the folder's files have no tensor of: the predictors, or the head of a trunk.

    transformers omits predictors when saving, but keeps the config key; and a trunk is often saved with the config of
    a class that has a head. If only some are missing, the folder is broken, and loading reports it. What the config
    says of them is carried, so that a folder written again has it too.
    """
    extras = tuple(f"{name}." for name, _ in reading.spec.extras())
    if (not extras and reading.spec.head is None) or not has_weights(path):
        return reading
    stored = read_folder(path)
    reading = saved_alone(reading, stored.keys())
    if not extras:
        return reading
    entries = as_stored(tensor_table(reading.family, reading.spec), stored).entries
    names = (name for entry in entries if entry.paths[0].startswith(extras) for name in entry.names)
    return reading if not stored.keys().isdisjoint(names) else replace(reading, spec=reading.spec.without_extras)


def _catalogued(name: str) -> Entry | None:
    from asbuilt import catalog

    try:
        return catalog.find(name)
    except InputError:
        return None


def _open_name(name: str, weights: bool, allow_unread: Sequence[str]) -> Source:
    row = _catalogued(name)
    if hub.ID.fullmatch(name) and (weights or row is None):
        folder = _fetched(name, weights, row)
        return Source(kind="folder", name=name, reading=_open_folder(folder, allow_unread).reading, path=folder)
    if row is None:
        raise _unknown(name)
    if allow_unread:
        raise _nothing_to_pass_over(name, allow_unread)
    reading = Reading(spec=row.spec(), carried={}, dtype=row.dtype, family=row.family, quantization=row.quantization)
    return Source(kind="catalogue", name=row.name, reading=reading)


def _fetched(name: str, weights: bool, row: Entry | None) -> Path:
    try:
        return hub.fetch(name, weights=weights)
    except InputError as error:
        from asbuilt import catalog

        hint = f"{row.name} in the catalogue describes it" if row else near(name[:80], catalog.names())
        fix = "; ".join(filter(None, (error.fix, hint)))
        raise InputError(error.problem, field=error.field, value=error.value, allowed=error.allowed, fix=fix) from error


def _unknown(name: str, problem: str = "no such model") -> InputError:
    from asbuilt import catalog

    allowed = "a catalogue name, a config.json, a checkpoint folder, a .gguf file, a spec, a hub id when online"
    return InputError(problem, field="MODEL", value=name, allowed=allowed, fix=near(name[:80], catalog.names()))
