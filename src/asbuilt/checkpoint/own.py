"""asbuilt's own checkpoint layout: `asbuilt.json` with the spec, and safetensors named by the spec's paths.

It needs no published family: any spec can be saved and loaded again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asbuilt.errors import InputError, near, one_of
from asbuilt.families import Reading, families_that_write, load_config_file
from asbuilt.families.shared.table import Entry, TensorTable
from asbuilt.spec import Model, from_dict, stored_weights, to_dict
from asbuilt.spec.whole import WHOLES

OWN = "asbuilt.json"
VERSION = 1
KEYS = ("asbuilt", "dtype", "model", "carried")


def own_document(spec: Model, carried: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the contents of `asbuilt.json`: the version, the stored dtype, the spec, and carried config keys."""
    return {"asbuilt": VERSION, "dtype": dtype, "model": to_dict(spec), "carried": carried}


def own_reading(path: Path) -> Reading:
    """Returns the reading of an `asbuilt.json`, with the first family that can express it, if any.

    Raises InputError for an unsupported version, an unknown or missing key, and a spec that is not a model.
    """
    data, where = load_config_file(path), str(path)
    version = data.get("asbuilt")
    if type(version) is not int or version != VERSION:
        fix = "a newer asbuilt may read it" if isinstance(version, int) and version > VERSION else ""
        raise InputError("unknown version", field=f"{where}: asbuilt", value=version, allowed=str(VERSION), fix=fix)
    for key in data:
        if key not in KEYS:
            raise InputError("unknown key", field=f"{where}: {key}", value=data[key], fix=near(key, KEYS))
    spec = from_dict(data.get("model"), f"{where}: model")
    if not isinstance(spec, Model):
        names = one_of(part.__name__ for part in WHOLES)
        raise InputError(field=f"{where}: model.part", value=type(spec).__name__, allowed=names)
    dtype, carried = data.get("dtype"), data.get("carried", {})
    if not isinstance(dtype, str | None):
        raise InputError(field=f"{where}: dtype", value=dtype, allowed="the name of a dtype, or null")
    if not isinstance(carried, dict):
        raise InputError(field=f"{where}: carried", value=carried, allowed="a JSON object")
    family = next(iter(families_that_write(spec)), "")
    return Reading(spec=spec, carried=carried, dtype=dtype, family=family)


def own_table(spec: Model) -> TensorTable:
    """Returns the table of such a folder: each tensor under its own path, unchanged."""
    found = ((path, weight.format is not None) for path, weight, _ in stored_weights(spec))
    return TensorTable(entries=tuple(Entry(paths=(path,), names=(path,), packed=packed) for path, packed in found))
