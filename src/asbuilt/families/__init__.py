"""Published model families: one file per `model_type`, each with a `FAMILY` that reads, writes and names tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.errors import InputError, near, one_of
from asbuilt.families.shared.common import QUANTIZATION, difference
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.reader import SLIP, Reading, UnreadKeys, load_config_file
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Model, stored_weights

if TYPE_CHECKING:
    from asbuilt.families import gguf
    from asbuilt.formats.gguf import GGUFFile

# The `model_type`s that are read: each is a file here, imported when asked for; what a module's name cannot spell.
_HYPHENATED = {"xlm_roberta": "xlm-roberta", "deberta_v2": "deberta-v2", "transfo_xl": "transfo-xl"}
_FILES = [file.removesuffix(".py") for file in os.listdir(__path__[0]) if re.fullmatch(r"[a-z]\w*\.py", file)]
FAMILIES = tuple(sorted(_HYPHENATED.get(file, file) for file in _FILES))
USUAL = ("llama", "mistral")
KIN = 5  # families named as akin to an unknown one

__all__ = [
    "FAMILIES",
    "Reading",
    "UnreadKeys",
    "families_that_write",
    "gguf_family",
    "gguf_header",
    "gguf_table",
    "load_config_file",
    "read_config",
    "read_gguf",
    "reads_packed",
    "saved_alone",
    "tensor_table",
    "write_config",
]


def _family(name: object, field: str = "family") -> Family:
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            "missing" if name is None else "unknown family",
            field=field,
            value=name,
            allowed=one_of(FAMILIES),
            fix=_instead(name),
        )
    return import_module(f"{__name__}.{name.replace('-', '_')}").FAMILY


def _instead(family: object) -> str:
    """What can be done without a family: a slip corrected, its kin tried, a plan by size, the model described."""
    if not isinstance(family, str):
        return ""
    if f"{family}_text" in FAMILIES:
        return f"its text alone is read: put its text_config into a config.json, with model_type {family}_text"
    others = [name for name in FAMILIES if _unnumbered(name) != _unnumbered(family)]  # gemma7 is no slip of gemma
    if slip := near(family[:80], others, cutoff=SLIP):
        return slip
    stem = re.match("[a-z]{3,}", family)
    akin = sorted((name for name in FAMILIES if stem is not None and name.startswith(stem.group())), key=len)[:KIN]
    kin = f"akin, and right only where the model is built as theirs: {', '.join(akin)}; " if akin else ""
    return (
        f"{kin}--allow-unread passes over keys, not families: describe the model as a spec JSON (docs/parts.md), "
        "or plan its training by size alone, with `asbuilt plan train --parameters`"
    )


def _unnumbered(family: str) -> str:
    return re.sub(r"\d", "", family)


def read_config(config: dict[str, Any], name: str, allow_unread: Sequence[str] = ()) -> Reading:
    """Returns what a config.json says, by its `model_type`; `name` names the model, and the file in messages.

    `allow_unread` are keys that a person knows to be unknown to the family, and wants passed over; a path leads into
    objects, `rope_scaling.attn_factor`. Raises InputError naming the key that is missing, unknown, out of bounds or not
    supported, and for an allowed key that is absent or that the family does read.
    """
    if not isinstance(config, dict):
        raise InputError(field=name, value=config, allowed="a JSON object")
    read = _family(config.get("model_type"), f"{name}: model_type").read
    reading, inner = _ignoring(read, config, name, allow_unread), config.get("text_config")
    packed = _packing(config, name)
    within = _packing(inner, f"{name}: text_config") if packed is None and isinstance(inner, dict) else None
    return replace(reading, quantization=packed or within, text_packed=within is not None)


def _ignoring(
    read: Callable[[dict[str, Any], str], Reading], config: dict[str, Any], name: str, allow_unread: Sequence[str]
) -> Reading:
    """Returns what `read` makes of the config without the keys to pass over, each of which must be unknown to it."""
    kept = config
    for key in allow_unread:
        kept = _without(kept, key)
    reading = read(kept, name)
    for key in allow_unread:
        if _reads(read, kept, key, name):
            raise InputError("the family reads this key, so it cannot be ignored", field="allow-unread", value=key)
    return reading


def _packing(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """What a config says of how weights are packed, None where it is silent; InputError for what is no object."""
    for key in QUANTIZATION:
        said = config.get(key)
        if said is not None:
            if not isinstance(said, dict):
                raise InputError(field=f"{name}: {key}", value=said, allowed="a JSON object")
            # DeepSeek-V4 says beside it, and DeepSeek-V4.1 in it, how the experts' weights differ
            beside = {key: config[key] for key in ("expert_dtype",) if key in config and key not in said}
            return said | beside if said.get("quant_method") == "fp8" else said
    return None


def _split(config: dict[str, Any], path: str) -> list[str]:
    """Returns the keys that a path is made of; a key may have dots of its own, as those of a GGUF file do."""
    return [path] if path in config else path.split(".")


def _without(config: dict[str, Any], path: str, within: str = "") -> dict[str, Any]:
    """Returns the config without what is at `path`; raises InputError where there is nothing.

    `within` is the path of the config itself, where it is an object in another.
    """
    first, *rest = _split(config, path)
    if first not in config or (rest and not isinstance(config[first], dict)):
        raise InputError(
            "no such key in the config",
            field="allow-unread",
            value=f"{within}{path}",
            fix=near(first, config, cutoff=SLIP),
        )
    if not rest:
        return {key: value for key, value in config.items() if key != first}
    return {**config, first: _without(config[first], ".".join(rest), f"{within}{first}.")}


def _with_null(config: dict[str, Any], path: str) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    if rest and isinstance(config.get(first), dict):
        return {**config, first: _with_null(config[first], rest)}
    return {**config, path: None}


def _reads(read: Callable[[dict[str, Any], str], Reading], kept: dict[str, Any], path: str, name: str) -> bool:
    """Whether a key is known: an unknown one is refused as such whatever it holds."""
    try:
        read(_with_null(kept, path), name)
    except UnreadKeys as error:
        return path not in error.keys
    except InputError:
        pass
    return True


def write_config(family: str, spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json of the family that reads back as `spec`.

    Raises InputError naming the field of the spec that the family cannot express.
    """
    return _family(family).write(spec, carried, dtype)


def families_that_write(spec: Model) -> list[str]:
    """Returns the families whose config can express `spec`, those of `USUAL` first, which most programs read.

    A spec does not name its family, and one with more to say can say what a plainer one does.
    """
    return [
        family
        for family in sorted(FAMILIES, key=lambda name: [name != usual for usual in USUAL])
        if _writes(family, spec)
    ]


def _writes(family: str, spec: Model) -> bool:
    try:
        write_config(family, spec, {}, None)
    except InputError:
        return False
    return True


def tensor_table(family: str, spec: Model, quantization: dict[str, Any] | None = None) -> TensorTable:
    """Returns the names and layouts of the tensors in a checkpoint folder of the family, packed as `quantization` says.

    Raises InputError naming a weight of the spec that the family has no name for, or one that the spec lacks, and for
    weights packed in a way that is not read.
    """
    found, names = _family(family), None
    if quantization is None:
        names = found.names
    elif reads_packed(family, quantization):
        names = found.packed[quantization["quant_method"]]
    if names is None:
        raise InputError(
            f"this quantisation is not supported for {family}",
            field="quantization_config.quant_method",
            value=quantization and quantization.get("quant_method"),
            fix="use the unquantised checkpoint, or a GGUF file",
        )
    return replace(_covering(found.table(spec, names), spec, family), prefix=found.prefix)


def reads_packed(family: str, quantization: dict[str, Any]) -> bool:
    """Returns whether checkpoint folders of the family are read where their weights are packed so."""
    method = quantization.get("quant_method")
    return isinstance(method, str) and method in _family(family).packed


def saved_alone(reading: Reading, stored: Collection[str]) -> Reading:
    """Returns the reading without a head where the tensors of a folder are those of a trunk that was saved alone."""
    return _family(reading.family).alone(reading, stored)


def _covering(table: TensorTable, spec: Model, family: str) -> TensorTable:
    named = {path for entry in table.entries for path in entry.paths}
    held = {path for path, _, _ in stored_weights(spec)}
    if named != held:
        problem = (
            f"{family} files have no name for this weight" if held - named else f"{family} models have this weight"
        )
        raise InputError(problem, field=min(held - named or named - held))
    return table


def read_gguf(file: GGUFFile, name: str, allow_unread: Sequence[str] = ()) -> Reading:
    """Returns what a GGUF file's header says, by its `general.architecture`; arguments and errors as `read_config`."""
    from asbuilt.families import gguf  # a sixth of the time that describing another model takes

    def read(data: dict[str, Any], name: str) -> Reading:
        found = replace(file, metadata=data)
        return gguf.read(_architecture(found, name), found, name, read_config)

    return _ignoring(read, file.metadata, name, allow_unread)


def gguf_family(family: str, spec: Model) -> str:
    """Returns the family as which a GGUF file holds the model: its own, else the first that can say the same.

    Raises InputError naming the family where there is none.
    """
    from asbuilt.families import gguf

    known = dict.fromkeys(one.family for one in gguf.ARCHITECTURES)
    if family in known:
        return family
    found = next((one for one in known if _writes(one, spec)), None)
    if found is None:
        raise _no_gguf(family or "none", "family")
    return found


def gguf_header(family: str, spec: Model, carried: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> gguf.Written:
    """Returns the header of a GGUF file of the family with tensors of these `shapes`, by name.

    It is read again, with the tensors' names: raises InputError naming the part of the spec that it does not say.
    """
    from asbuilt.families import gguf
    from asbuilt.families.gguf.scaling import alike
    from asbuilt.formats.gguf import GGUFFile, GGUFTensor

    found = next(one for one in gguf.ARCHITECTURES if one.family == family)
    written = gguf.write(found, spec, write_config(family, spec, carried, None))
    shapes = shapes | {name: (len(values),) for name, values in written.values.items()}
    tensors = {
        name: GGUFTensor(name=name, shape=shape, type="F32", offset=0, nbytes=0) for name, shape in shapes.items()
    }
    said = {"general.architecture": found.name, **written.metadata}
    file = GGUFFile(path=Path(spec.name), metadata=said, tensors=tensors, values=written.values)
    try:
        again = read_gguf(file, spec.name).spec
    except InputError as error:
        problem = f"a GGUF file of {found.name} cannot hold this model: {error.problem}".rstrip(": ")
        raise InputError(problem, field=error.field, value=error.value, allowed=error.allowed) from error
    differs = difference(spec, again, "", alike, found.unsaid)
    if differs is not None:
        path, here, there = differs
        raise InputError(
            f"a GGUF file of {found.name} cannot say this", field=path, value=repr(here), allowed=repr(there)
        )
    unsaid = difference(spec, again, "", alike)
    if unsaid is None:
        return written
    path, here, there = unsaid
    reason = found.unsaid.get(path.rpartition(".")[2], repr(there))
    note = f"a GGUF file of {found.name} cannot say {here!r}: whoever reads it computes {reason}"
    return replace(written, notes={path: note})


def gguf_table(family: str, spec: Model, stored: Collection[str] = ()) -> TensorTable:
    """Returns the names and layouts of the tensors in a GGUF file of the family; raises as `tensor_table` does.

    `stored` are the tensors that a file has: some files hold apart what others hold in one.
    """
    from asbuilt.families import gguf

    found = next((one for one in gguf.ARCHITECTURES if one.family == family), None)
    if found is None:
        raise _no_gguf(family, "family")
    tensor_table(family, spec)  # refuses what is none of the family's
    return _covering(gguf.table(found, spec, stored), spec, family)


def _architecture(file: GGUFFile, name: str) -> gguf.Architecture:
    from asbuilt.families import gguf

    said, field = file.metadata.get("general.architecture"), f"{name}: general.architecture"
    found = [one for one in gguf.ARCHITECTURES if one.name == said and one.when(file)]
    if found:
        return found[0]
    if isinstance(said, str) and said in FAMILIES:
        raise _no_gguf(said, field)
    known = dict.fromkeys(one.name for one in gguf.ARCHITECTURES)
    problem = "missing" if said is None else "unknown architecture"
    raise InputError(problem, field=field, value=said, allowed=one_of(known), fix=_instead(said))


def _no_gguf(family: str, field: str) -> InputError:
    return InputError(
        "GGUF files of this family are not read or written", field=field, value=family, fix="use the checkpoint folder"
    )
