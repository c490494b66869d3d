"""What the Python functions accept as a model: a spec, a built model, a source, a name or a path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asbuilt.checkpoint.source import Source, open_model
from asbuilt.errors import InputError
from asbuilt.families import Reading, families_that_write
from asbuilt.spec import Model as Spec

if TYPE_CHECKING:
    from asbuilt.nn.model import Model

    Given = Source | Spec | Model | str | Path


def source_of(model: Given, *, weights: bool = False, allow_unread: Sequence[str] = ()) -> Source:
    """Returns a model's source: itself, that of a spec or a built model, or the one found by `open_model`.

    Raises InputError as `open_model` does, and for an argument that is not a model.
    """
    if isinstance(model, Source):
        return model
    if isinstance(model, str | Path):
        return open_model(model, weights=weights, allow_unread=allow_unread)
    spec = model if isinstance(model, Spec) else getattr(model, "spec", None)
    if not isinstance(spec, Spec):
        kinds = "a spec, a built model, a source, a catalogue name, or a path"
        raise InputError(field="model", value=model, allowed=kinds)
    return described(spec)


def described(spec: Spec) -> Source:
    """Returns a spec as a source without weights, with the first family that can express it, if any."""
    family = next(iter(families_that_write(spec)), "")
    return Source(kind="spec", name=spec.name, reading=Reading(spec=spec, carried={}, dtype=None, family=family))
