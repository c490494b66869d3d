"""Layouts that only GGUF files have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asbuilt.families.shared.table import Layout, Shape, T


@dataclass(frozen=True)
class PlusOne:
    """Gains stored as what the norm multiplies by, while the model holds how far they are from 1."""

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        return list(built)

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each less 1."""
        return [tensor - 1 for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each plus 1."""
        return [tensor + 1 for tensor in built]


@dataclass(frozen=True)
class PerHead:
    """Matrices stored as one for each of `n_heads` heads: the first dimension as two."""

    n_heads: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Each with its first dimension as heads and rows of a head."""
        return [(self.n_heads, shape[0] // self.n_heads, *shape[1:]) for shape in built]

    def load(self, stored: Sequence[T]) -> list[T]:
        """The heads one below the other."""
        return [tensor.flatten(0, 1) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """The heads apart."""
        return [tensor.unflatten(0, (self.n_heads, -1)) for tensor in built]


@dataclass(frozen=True)
class Each:
    """Several tensors, each through its own layout of one tensor to one."""

    layouts: tuple[Layout, ...]

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Each layout's shape."""
        return [shape for layout, one in zip(self.layouts, built, strict=True) for shape in layout.stored_shapes([one])]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each loaded."""
        return [t for layout, one in zip(self.layouts, stored, strict=True) for t in layout.load([one])]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each saved."""
        return [t for layout, one in zip(self.layouts, built, strict=True) for t in layout.save([one])]
