"""The stored tensors of which a packed matrix is made, checked in their headers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from asbuilt.errors import InputError, one_of
from asbuilt.formats.safetensors import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[str], "Tensor"]
HALVES = ("F16", "BF16", "F32")  # dtypes of scales that are numbers
LARGEST_GROUP = 2**16


class Holdable(Protocol):
    """A matrix that may be held as blocks of one of some formats, which expand to its numbers (kernels/integers.py)."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats, the smallest first; none where blocks would round."""
        ...

    def blocks(self, format: str) -> Tensor:
        """Returns the rows as blocks of one of them."""
        ...

    def expand(self) -> Tensor:
        """Returns the numbers in float32."""
        ...


@dataclass(frozen=True, kw_only=True)
class Module:
    """A packed matrix, or a stack: the name and shape that it has when it is plain, and how it is expanded.

    `held` are the matrices of a stack, or the one, that can be held as blocks; None where none can.
    """

    name: str
    shape: tuple[int, ...]
    of: StoredTensor
    expand: Callable[[Read], Tensor]
    held: Callable[[Read], Sequence[Holdable]] | None = None

    def formats(self, read: Read) -> tuple[str, ...]:
        """Returns the block formats that hold all of it exactly, the smallest first; reads its scales."""
        each = [] if self.held is None else [one.formats for one in self.held(read)]
        return tuple(name for name in each[0] if all(name in others for others in each)) if each else ()

    def blocks(self, read: Read, format: str) -> Tensor:
        """Returns its rows (..., bytes) as blocks of one of these formats."""
        import torch

        assert self.held is not None
        made = torch.cat([one.blocks(format) for one in self.held(read)])
        return made.view(*self.shape[:-1], -1)


def held_module(name: str, shape: tuple[int, ...], of: StoredTensor, make: Callable[[Read], Holdable]) -> Module:
    """Returns the module of rows that `make` expands and holds as blocks, a stack's one after the other."""
    return Module(
        name=name,
        shape=shape,
        of=of,
        expand=lambda read: make(read).expand().view(shape),
        held=lambda read: (make(read),),
    )


@dataclass
class Finder:
    """The stored tensors, those that are `taken` as part of a packed matrix, and what the config says of packing.

    `biases` are those that quantisers may have added.
    """

    stored: Mapping[str, StoredTensor]
    said: Mapping[str, Any]
    read: Read
    taken: set[str] = field(default_factory=set)
    biases: set[str] = field(default_factory=set)

    @property
    def method(self) -> str:
        """The way of packing, in lower case; empty where it is not named."""
        return str(self.said.get("quant_method") or "").lower()

    def take(self, name: str, dtypes: tuple[str, ...], rank: int | None = None) -> StoredTensor:
        """Returns a tensor and marks it as taken; raises InputError where it is missing or not of the kind."""
        found = self.stored.get(name)
        if found is None:
            raise InputError("missing beside a packed matrix", field=name)
        if found.dtype not in dtypes:
            raise self.error(found, found.dtype, one_of(dtypes))
        if rank is not None and len(found.shape) != rank:
            raise self.error(found, found.shape, f"of {rank} dimensions")
        self.taken.add(name)
        return found

    def maybe(self, name: str, dtypes: tuple[str, ...], rank: int | None = None) -> StoredTensor | None:
        """Returns the tensor as `take` does, None where it is not stored."""
        return self.take(name, dtypes, rank) if name in self.stored else None

    def require(self, tensor: StoredTensor, ok: bool, allowed: str) -> None:
        """Raises InputError naming the tensor and its shape unless `ok`."""
        if not ok:
            raise self.error(tensor, tensor.shape, allowed)

    @staticmethod
    def error(tensor: StoredTensor, value: object, allowed: str) -> InputError:
        """Returns the InputError that names a tensor of a packed matrix."""
        return InputError(field=f"{tensor.path}: {tensor.name}", value=value, allowed=allowed)

    @property
    def schemes(self) -> list[Mapping[str, Any]]:
        """How the weights of each group of modules are packed, as compressed-tensors says it."""
        groups = self.said.get("config_groups")
        members = groups.values() if isinstance(groups, dict) else ()
        found = [group.get("weights") for group in members if isinstance(group, dict)]
        return [one for one in found if isinstance(one, dict)]

    def usual_group(self, inputs: int, groups: int) -> int:
        """Returns how many inputs share a scale, if their groups follow each other: as the config says if that fits."""
        said = [
            self.said.get("group_size"),
            self.said.get("q_group_size"),
            *(s.get("group_size") for s in self.schemes),
        ]
        fitting = (n for n in said if type(n) is int and 0 < n <= LARGEST_GROUP and math.ceil(inputs / n) == groups)
        return next(fitting, max(1, inputs // groups))

    def group(self, tensor: StoredTensor, inputs: int, groups: int) -> int:
        """Returns the same; raises InputError naming the tensor of the scales where groups are not equal either."""
        size = self.usual_group(inputs, groups)
        self.require(tensor, math.ceil(inputs / size) == groups, f"scales of equal groups of {inputs} inputs")
        return size
