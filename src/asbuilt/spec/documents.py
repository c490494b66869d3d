"""Which models can keep the documents of one row apart: all that looks at other tokens must do so through a mask."""

from __future__ import annotations

from functools import lru_cache

from asbuilt.errors import InputError
from asbuilt.spec.attention import Attention
from asbuilt.spec.latent import LatentAttention
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.model import Model
from asbuilt.spec.part import Part, walk
from asbuilt.spec.positions import Alibi, RelativeBuckets, Rotary


@lru_cache(maxsize=64)
def require_separable(model: Model) -> None:
    """Raises InputError naming the first part through which one document of a row would reach another."""
    for path, part in walk(model):
        if why := _reaches(part):
            problem = f"{path} ({type(part).__name__}): {why}"
            fix = "leave it out, or put one document into a row (data.packing=single)"
            raise InputError(problem, field="documents of one row", fix=fix)


def _reaches(part: Part) -> str:
    """Returns how a part reaches from one document to another; empty if it does not."""
    if isinstance(part, Rotary) and part.depends_on_length:
        return "its frequencies depend on the length of the row"
    if isinstance(part, Attention | LatentAttention):
        if part.indexer is not None:
            return "its indexer chooses keys of any document"
        if not isinstance(part.positions, Rotary | Alibi | RelativeBuckets | None):
            return f"positions of the kind {type(part.positions).__name__} have a mask of their own"
        return ""
    if isinstance(part, Mixer) or part.remembers():
        return "its state, or window, passes from one document to the next"
    return ""
