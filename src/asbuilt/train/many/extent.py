"""Where the tensor that a rank holds lies in the whole one: a checkpoint names the place, so that any rank finds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from asbuilt.spec import Model
from asbuilt.spec.part import stored_weights


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A block of a weight of `shape`, from `offsets`, of `sizes`; `copies` of the ranks that divide layers hold it.

    The rank's own tensor may be larger: a vocabulary is padded.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int = 1

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this block of the whole tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole


def extents(whole: Model, own: Model, rank: int, ranks: int) -> dict[str, Extent]:
    """Returns the extent of each weight and buffer of `own` by path: that of rank `rank` of `ranks`, in their order."""
    shapes = {path: weight.shape for path, weight, _ in stored_weights(whole)}
    return {path: _extent(shapes[path], weight.shape, rank, ranks) for path, weight, _ in stored_weights(own)}


def spread(extent: Extent, rank: int, ranks: int) -> Extent:
    """Returns the extent of a stack of experts, of which each of `ranks` holds as many neighbours."""
    each = extent.sizes[0] // ranks
    offsets = (extent.offsets[0] + rank * each, *extent.offsets[1:])
    return replace(extent, offsets=offsets, sizes=(each, *extent.sizes[1:]))


def _extent(whole: tuple[int, ...], own: tuple[int, ...], rank: int, ranks: int) -> Extent:
    divided = [n != mine for n, mine in zip(whole, own, strict=True)]
    offsets = [min(rank * mine, n) if cut else 0 for n, mine, cut in zip(whole, own, divided, strict=True)]
    sizes = [min(mine, n - offset) for n, mine, offset in zip(whole, own, offsets, strict=True)]
    return Extent(shape=whole, offsets=tuple(offsets), sizes=tuple(sizes), copies=1 if any(divided) else ranks)


def whole_of(shape: tuple[int, ...]) -> Extent:
    """Returns the extent of a tensor that is not divided."""
    return Extent(shape=shape, offsets=(0,) * len(shape), sizes=shape)
