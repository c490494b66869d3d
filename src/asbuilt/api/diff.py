"""`asbuilt.diff(a, b)`: two models run on one text, and the first path whose activations differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from asbuilt import inspect
from asbuilt.checkpoint.given import described, source_of
from asbuilt.checkpoint.load import Contents, load
from asbuilt.checkpoint.room import require_room
from asbuilt.errors import InputError
from asbuilt.inspect import Difference
from asbuilt.nn.model import Model
from asbuilt.shown import number
from asbuilt.spec import Model as Spec
from asbuilt.tables import Table, escaped, html, joined

if TYPE_CHECKING:
    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source

TEXT = "An as-built drawing records what was really built."
TOLERANCE = 1e-4
SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences of two models at every path that both have, in order of computation, the logits last (path "").

    `first` is the first difference beyond the tolerance, None if there is none; `read` describes the input of both, and
    `unread` lists the parts of the model that it did not reach. Displays as a table in a notebook.
    """

    differences: tuple[Difference, ...]
    first: Difference | None
    tolerance: float
    read: str
    unread: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return self.first is None

    def document(self) -> dict[str, Any]:
        """Returns the document that `asbuilt diff --json` prints."""
        rows = [{"path": d.path or "logits", "relative": d.relative} for d in self.differences]
        first = self.first and (self.first.path or "logits")
        return {"same": self.same, "first": first, "rows": rows, "read": self.read, "unread": list(self.unread)}

    def table(self) -> Table:
        """Returns the verdict and the paths around the first difference."""
        at, found = self.first, self.differences
        rows = [
            (d.path or "logits", "different shape" if d.relative is None else number(float(d.relative), 3))
            for d in found
        ]
        start = 0 if at is None else found.index(at)
        verdict = (
            f"first divergence at {at.path or 'the logits'}" if at else f"equal within {number(self.tolerance, 6)}"
        )
        title = f"{verdict}; {len(found):,} paths compared"
        return Table(title, ("path", "relative difference"), rows[max(0, start - 2) :][:SHOWN] if at else rows[-1:])

    @property
    def note(self) -> str:
        """What both models read, and what that did not cover."""
        return f"read: {self.read}" + ("; no image, so nothing below vision was compared" if self.unread else "")

    def __str__(self) -> str:
        return joined([self.table(), self.note])

    def _repr_html_(self) -> str:
        return f"{html([self.table()])}<p>{escaped(self.note)}</p>"


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two: its source, and the built model if one was given."""

    source: Source
    built: Model | None = None

    @property
    def spec(self) -> Spec:
        """The model's description."""
        return self.source.spec

    def model(self) -> Model:
        """The model as given, or loaded."""
        return self.built or load(self.source, "float32")


def diff(
    first: Given,
    second: Given | None = None,
    *,
    transformers: bool = False,
    text: str | None = None,
    tolerance: float = TOLERANCE,
    allow_unread: Sequence[str] = (),
) -> Comparison:
    """Returns the differences of two models on the same token ids, and the first path at which they diverge.

    Each is a built model, run as it is, or anything with weights, which is loaded in float32; with `transformers` the
    checkpoint folder `second`, or else `first` itself, is run by transformers. `text` None means a built-in sentence,
    or fixed ids if neither has a tokenizer. Raises InputError for models that cannot be compared.
    """
    if second is None and not transformers:
        raise InputError("missing", field="SECOND", fix="give a second checkpoint, or --transformers")
    if math.isnan(tolerance):
        raise InputError(field="tolerance", value=tolerance, allowed="a number of at least 0")
    one = _side(first, allow_unread)
    sides = [one, one if second is None else _side(second, allow_unread)]
    ids, read = tokens([side.source for side in sides], text)
    found, at = (_against_transformers if transformers else _between)(sides, ids, tolerance)
    unread = ("vision",) if any("images" in side.spec.reads for side in sides) else ()
    unread += ("hearing",) if any(side.spec.heard is not None for side in sides) else ()
    return Comparison(differences=tuple(found), first=at, tolerance=tolerance, read=read, unread=unread)


def _side(model: Given, allow_unread: Sequence[str]) -> _Side:
    if isinstance(model, Model):
        return _Side(source=described(model.spec), built=model)
    return _Side(source=source_of(model, weights=True, allow_unread=allow_unread))


def _require_room(sides: list[_Side]) -> None:
    """Raises InputError if the two models do not fit into memory together."""
    needed = sum(Contents(side.source).needs("float32") for side in sides if side.built is None)
    names = " and ".join(dict.fromkeys(side.source.name for side in sides))
    require_room(needed, names, what="to run both in float32", fix="`asbuilt describe` needs none")


Found = tuple[list[Difference], Difference | None]


def _between(sides: list[_Side], ids: list[int], tolerance: float) -> Found:
    """Returns the differences of two models, and the first beyond the tolerance."""
    _require_room(sides)
    found = inspect.diff(sides[0].model(), sides[1].model(), torch.tensor([ids]))
    return found, next((d for d in found if d.beyond(tolerance)), None)


def _against_transformers(sides: list[_Side], ids: list[int], tolerance: float) -> Found:
    """Returns the differences between asbuilt and transformers on the second model, and the lasting divergence."""
    ours, theirs = sides
    source = theirs.source
    if source.kind != "folder" or source.path is None or source.own:
        raise InputError(
            "cannot be run by transformers", field="MODEL", value=source.name, allowed="a checkpoint folder"
        )
    if source.spec.gives == "similarities":
        raise InputError(
            "reads images beside texts, and only text models are compared", field="MODEL", value=source.name
        )
    _require_room(sides)
    if theirs is not ours:
        theirs.model()  # raises with the name of any tensor that does not match
    found = inspect.diff_transformers(ours.model(), source.path, ours.source.family, torch.tensor([ids]))
    return found, inspect.first_divergence(found, tolerance)


def tokens(sources: list[Source], text: str | None) -> tuple[list[int], str]:
    """Returns the text's ids from the first tokenizer found, else ids that both know; and what they are."""
    for source in sources:
        if "tokens" not in source.spec.reads:
            raise InputError("reads images, and only text models are compared", field="MODEL", value=source.name)
    n_vocab = min(source.spec.n_vocab for source in sources)
    context = min(source.spec.max_positions for source in sources)
    tokenizer = next((t for source in sources if (t := source.tokenizer()) is not None), None)
    if tokenizer is None:
        if text is not None:
            raise InputError(
                "neither model has a tokenizer", field="text", value=text, fix="leave it out to compare fixed token ids"
            )
        ids = [i * 7919 % n_vocab for i in range(32)][:context]
        return ids, f"{len(ids)} fixed token ids, since there is no tokenizer"
    said = TEXT if text is None else text
    ids = tokenizer.encode(said)
    if not ids or max(ids) >= n_vocab:
        raise InputError("has no token that both models know", field="text", value=said)
    return ids[:context], f"the text's first {len(ids[:context])} tokens of {len(ids)}"
