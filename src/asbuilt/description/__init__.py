"""A model's structure and costs, from its description alone: `asbuilt.describe(model)`.

The command `asbuilt describe` prints the same object; its figures are folds over the parts' declarations (`bill`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from asbuilt import tables as plain
from asbuilt.description import bill, tables
from asbuilt.dtypes import short_name
from asbuilt.errors import InputError, near
from asbuilt.shown import line
from asbuilt.spec import Model, walk
from asbuilt.spec.edit import matches
from asbuilt.spec.part import LARGEST_SIZE

if TYPE_CHECKING:
    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.cost import Row

__all__ = ["Description", "describe"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Description:
    """A model's costs at `batch` sequences of `seq` tokens, computed on first use.

    Prints as the command does, and displays as tables in a notebook.
    """

    source: Source
    seq: int
    batch: int
    images: int
    sounds: int
    dtype: str
    kv_dtype: str

    @property
    def spec(self) -> Model:
        """The model's description."""
        return self.source.spec

    @cached_property
    def _document(self) -> dict[str, Any]:
        return bill.describe(
            self.source,
            seq=self.seq,
            batch=self.batch,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            images=self.images,
            sounds=self.sounds,
        )

    def document(self) -> dict[str, Any]:
        """Returns the document that `asbuilt describe --json` prints: plain data, whose keys are never removed."""
        return self._document

    @property
    def parameters(self) -> dict[str, int]:
        """Parameter counts: `total`, `active` per token, and one for each kind of part."""
        return self._document["parameters"]

    @property
    def flops(self) -> dict[str, int | float]:
        """FLOPs per token, averaged over `seq`: `forward_per_token`, `training_per_token`, ..."""
        return self._document["flops"]

    @property
    def cache(self) -> dict[str, Any]:
        """Bytes of the cache: `bytes_per_token`, `bytes_at_seq`, ..."""
        return self._document["cache"]

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights by dtype."""
        return self._document["weight_bytes"]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The costs by path, equal blocks folded: `blocks.0-31.attention.body`, with the figures of one of them."""
        from asbuilt.cost import Row

        return tuple(Row(**row) for row in self._document["rows"])

    def at(self, path: str) -> Row:
        """Returns the row of a path, either as printed or for a single block that the row covers.

        Raises InputError, with similar paths, for a path without a row.
        """
        for row in self.rows:
            if row.path == path or matches(row.path, path):
                return row
        parents = (".".join(path.split(".")[:n]) for n in range(path.count("."), 0, -1))
        held = next((r for p in parents for r in self.rows if r.path and (r.path == p or matches(r.path, p))), None)
        if held is not None and any(found == path for found, _ in walk(self.spec)):
            raise InputError(
                "has no row of its own", field="path", value=path, fix=f"it is counted in the row of {held.path}"
            )
        known = [row.path for row in self.rows]
        raise InputError("no row has this path", field="path", value=path, fix=near(path, known))

    def tables(self) -> list[plain.Table]:
        """Returns the description as tables."""
        return [item for item in tables.printed(self._document) if isinstance(item, plain.Table)]

    def markdown(self) -> str:
        """Returns the tables as Markdown."""
        return plain.markdown(self.tables())

    def __str__(self) -> str:
        return plain.joined(tables.printed(self._document))

    def __repr__(self) -> str:
        return line(f"<Description of {tables.headline(self._document)}>")

    def _repr_html_(self) -> str:
        return f"<p>{plain.escaped(tables.headline(self._document))}</p>{plain.html(self.tables())}"


def describe(
    model: Given,
    *,
    seq: int | None = None,
    batch: int = 1,
    images: int = 0,
    sounds: int = 0,
    dtype: object = "bf16",
    kv_dtype: object = None,
    allow_unread: Sequence[str] = (),
) -> Description:
    """Returns a model's structure and costs: parameters, FLOPs, bytes, cache, shapes. Nothing is run.

    `model` is a spec, a built model, a source, a catalogue name or a path. `seq` None means 1024 tokens, or the context
    length if shorter; an image model has its own number. `images` are those of each sequence, or sounds of a model that
    hears alone; `sounds` those beside images, all as long as they may be. `dtype` is that of weights and activations,
    or a block format; `kv_dtype` None means `dtype` if that is a float of 16 bits or more, else bf16. Raises InputError
    for invalid values.
    """
    from asbuilt.checkpoint.given import source_of

    source = source_of(model, allow_unread=allow_unread)
    sizes = ("seq", 1 if seq is None else seq, 1), ("batch", batch, 1), ("images", images, 0), ("sounds", sounds, 0)
    for name, value, least in sizes:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST_SIZE:
            raise InputError(field=name, value=value, allowed=f"a whole number from {least} to 2^31-1")
    weights = short_name(dtype)
    return Description(
        source=source,
        seq=bill.length(source.spec, seq),
        batch=batch,
        images=images,
        sounds=sounds,
        dtype=weights,
        kv_dtype=bill.activation_dtype(weights) if kv_dtype is None else short_name(kv_dtype),
    )
