"""The training state of each weight: the weight, its gradient, a master copy, and the optimizer's state.

It follows from the weight's declared shape and role alone, independent of parts and families.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asbuilt.errors import InputError, near, one_of

if TYPE_CHECKING:
    from asbuilt.spec.part import Kind, Weight

# bitsandbytes' 8-bit optimizers (arXiv 2110.02861): one byte per moment, an fp32 scale for every 256 numbers, and
# tensors of fewer than 4096 numbers in fp32. Their table of 256 code values, one per optimizer, is not counted.
EIGHT_BIT_BLOCK = 256
EIGHT_BIT_LEAST = 4096
# QLoRA (arXiv 2305.14314, section 3): 4 bits, an 8-bit scale per 64 numbers, an fp32 scale of those per 256 of them.
NF4_BLOCK, NF4_SECOND_BLOCK = 64, 256

Pieces = dict[str, int]


def nf4_bytes(size: int) -> int:
    """Returns the bytes of `size` numbers in NF4 with double quantisation, 0.516 per number, without code tables."""
    scales = math.ceil(size / NF4_BLOCK)
    return math.ceil(size / 2) + scales + 4 * math.ceil(scales / NF4_SECOND_BLOCK)


def _adamw(weight: Weight, kind: Kind, width: int) -> Pieces:
    """Two moments of the weight's size (arXiv 1711.05101)."""
    return {"first moment": weight.size * width, "second moment": weight.size * width}


def _adamw_8bit(weight: Weight, kind: Kind, width: int) -> Pieces:
    """Two moments of one byte each, with scales; small tensors in fp32."""
    if weight.size < EIGHT_BIT_LEAST:
        return {"first moment": 4 * weight.size, "second moment": 4 * weight.size}
    one = weight.size + 4 * math.ceil(weight.size / EIGHT_BIT_BLOCK)
    return {"first moment": one, "second moment": one}


def _adafactor(weight: Weight, kind: Kind, width: int) -> Pieces:
    """Second moments by row and column of each matrix, in full for vectors; no first moment (arXiv 1804.04235)."""
    if len(weight.shape) < 2:
        return {"second moment of vectors": weight.size * width}
    *stack, rows, columns = weight.shape
    matrices = math.prod(stack)
    return {"row factors": matrices * rows * width, "column factors": matrices * columns * width}


def _sgd_momentum(weight: Weight, kind: Kind, width: int) -> Pieces:
    """One buffer of the weight's size."""
    return {"momentum": weight.size * width}


def orthogonal(weight: Weight, kind: Kind) -> bool:
    """Returns whether Muon updates this weight: all matrices except those of embeddings and the head."""
    return weight.role == "matrix" and kind not in ("embedding", "head")


def _muon(weight: Weight, kind: Kind, width: int) -> Pieces:
    """One momentum for matrices; AdamW's two moments for vectors, tables and the head (Jordan 2024, arXiv 2502.16982).

    A stack of experts is a stack of matrices.
    """
    return _sgd_momentum(weight, kind, width) if orthogonal(weight, kind) else _adamw(weight, kind, width)


OPTIMIZERS: dict[str, Callable[[Weight, Kind, int], Pieces]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "sgd-momentum": _sgd_momentum,
    "muon": _muon,
}
# These need shapes, which a bare number of parameters does not have.
BY_SHAPE = ("adafactor", "muon")


def optimizer(name: str) -> Callable[[Weight, Kind, int], Pieces]:
    """Returns the rule of this name; raises InputError for an unknown name."""
    if name not in OPTIMIZERS:
        raise InputError(
            "unknown optimizer",
            field="optimizer",
            value=name,
            allowed=one_of(OPTIMIZERS),
            fix=near(name, OPTIMIZERS),
        )
    return OPTIMIZERS[name]


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes of state that persist between steps, on one device or in total; `optimizer` by component."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    optimizer: Pieces = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The total."""
        return self.weights + self.gradients + self.master + sum(self.optimizer.values())

    def __add__(self, other: State) -> State:
        names = dict.fromkeys((*self.optimizer, *other.optimizer))
        return State(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            master=self.master + other.master,
            optimizer={n: self.optimizer.get(n, 0) + other.optimizer.get(n, 0) for n in names},
        )

    def times(self, count: int) -> State:
        """Returns the state of `count` of them."""
        return State(
            weights=count * self.weights,
            gradients=count * self.gradients,
            master=count * self.master,
            optimizer={name: count * nbytes for name, nbytes in self.optimizer.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The widths of the state in bytes (weight, gradient, master copy or 0), and the optimizer's rule.

    The optimizer's state has the width of what it updates: the master copy, or the weight if there is none.
    """

    optimizer: str
    weight_width: int
    gradient_width: int
    master_width: int

    @property
    def state_width(self) -> int:
        """Bytes of one number of the optimizer's state."""
        return self.master_width or self.weight_width

    def trained(self, weight: Weight, kind: Kind) -> State:
        """Returns the state of a trained weight."""
        return State(
            weights=weight.size * self.weight_width,
            gradients=weight.size * self.gradient_width,
            master=weight.size * self.master_width,
            optimizer=OPTIMIZERS[self.optimizer](weight, kind, self.state_width),
        )

    def frozen(self, weight: Weight, *, nf4: bool) -> State:
        """Returns the state of a frozen weight."""
        if weight.format is not None:
            return State(weights=math.prod(weight.stored_shape))
        return State(weights=nf4_bytes(weight.size) if nf4 else weight.size * self.weight_width)
