"""What asbuilt's kernels save for the backward pass and need while they run: one class per part.

A part declares what it holds, multiplies and remembers; the additional memory of computing it depends on the kernel,
and is declared here, in the file of the same name. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from asbuilt.spec.part import Part, Pass

SPEC, HERE = "asbuilt.spec", "asbuilt.kernels.memory"

# The width of a number: `activation` is the pass's dtype, `wide` is float32 or the pass's dtype if wider, for
# statistics and probabilities; the others are fixed by the library.
Width = Literal["activation", "wide", "int64", "bool"]
# How a tensor is divided over the devices that share a layer: `tokens` if its rows are tokens at full width, which
# sequence parallelism divides; `width` if it is as wide as a divided map (heads or hidden width), so that a device has
# all tokens of its own share; `none` if it is replicated, such as a mask.
Divided = Literal["tokens", "width", "none"]

P = TypeVar("P", bound=Part)


class Room(NamedTuple):
    """Bytes that a part needs in training beside all that it saves, which may not be there yet, or no longer.

    `forward`, in a pass that computes everything; `backward`, beside the gradient of its result; `again`, in one that
    selective checkpointing repeats, to which results of products are given; `first`, in the one before, which keeps
    them.
    """

    forward: int
    backward: int
    again: int = 0
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One tensor saved for the backward pass, `size` numbers of `width`.

    The name `input` denotes the part's input; parts with the same input save it once (`same_input`). `shared` marks a
    tensor that all parts of a stack share by name (token ids, RoPE tables). `divided` tells how devices divide it.
    """

    name: str
    size: int
    width: Width = "activation"
    shared: bool = False
    divided: Divided = "tokens"

    def nbytes(self, activation: int) -> int:
        """Returns the bytes, with `activation` bytes per number of the pass's dtype."""
        return self.size * {"activation": activation, "wide": max(4, activation), "int64": 8, "bool": 1}[self.width]


class Memory(Generic[P]):
    """The memory of computing one part besides weights and cache; by default it saves and needs nothing."""

    def __init__(self, part: P) -> None:
        self.part = part

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Returns the tensors that autograd saves for the backward pass, those of children and weights excluded."""
        return ()

    def lends(self, run: Pass) -> tuple[Saved, ...]:
        """Returns the tensors made for all layers that autograd does not save: repeated blocks need them again."""
        return ()

    def lent_bytes(self, run: Pass) -> dict[str, int]:
        """Returns by name the bytes that repeated blocks keep for each other, less those of what making them saves."""
        lent = self.lends(run)
        made = [tensor for tensor in self.saves(run) if tensor.shared] if lent else []
        return {one.name: one.nbytes(run.width) for one in lent} | {one.name: -one.nbytes(run.width) for one in made}

    def awaits(self, run: Pass) -> int:
        """Returns the bytes of gradients that add up over the blocks of a stack: of what all of them read."""
        return 0

    def recomputes(self) -> tuple[str, ...]:
        """Returns which saved tensors selective checkpointing drops: own names, or `path:name` of parts below.

        Each is recomputed in the backward pass from saved tensors: elementwise, by a norm, by a lookup, or from the
        scores of saved queries and keys; never by a product with a weight.
        """
        return ()

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """Returns pairs of paths below the part with the same input tensor, which is then saved once.

        It is named after the second of a pair; an empty path denotes the part itself.
        """
        return ()

    def of_heads(self) -> tuple[str, ...]:
        """Returns the names of children that operate on heads: what they save is divided like the heads."""
        return ()

    def peak_bytes(self, run: Pass) -> int:
        """Returns the peak bytes while the part runs without gradients, its input excluded."""
        return 0

    def room(self, run: Pass) -> Room | None:
        """Returns what a norm, or the body of a branch, needs in training; None where only `peak_bytes` is known."""
        return None

    def resident(self, tokens: int, width: int) -> int:
        """Returns the bytes of tables for sequences of `tokens` that an engine keeps; equal parts share them."""
        return 0

    def workspace(self, run: Pass) -> int:
        """Returns the bytes, among those of the peak, that some engines keep for all parts between passes."""
        return 0

    def mask_peak(self, run: Pass) -> tuple[str, int, int] | None:
        """Returns a mask's name, its bytes and the extra bytes of building it, or None; each name is built once."""
        return None


MEMORIES: dict[type[Part], type[Memory[Any]]] = {}
K = TypeVar("K", bound=type[Memory[Any]])


def memory_of(*parts: type[Part]) -> Callable[[K], K]:
    """Registers a class as the memory of parts of these types, and of subclasses without their own."""

    def register(found: K) -> K:
        MEMORIES.update(dict.fromkeys(parts, found))
        registered.cache_clear()
        return found

    return register


def memory(part: P) -> Memory[P]:
    """Returns the memory of `part`, as registered for its type or a base class; by default nothing."""
    return registered(type(part))(part)


@cache
def registered(kind: type[Part]) -> type[Memory[Any]]:
    """Returns the class of the memory of parts of this type."""
    for base in kind.__mro__:
        if base not in MEMORIES:
            _import_mirror(base.__module__)
        if base in MEMORIES:
            return MEMORIES[base]
    return Memory


@cache
def _import_mirror(module: str) -> None:
    """Imports kernels/memory/x.py for parts of spec/x.py, if it exists: its classes register themselves."""

    package, _, name = module.rpartition(".")
    if package == SPEC and find_spec(f"{HERE}.{name}") is not None:
        import_module(f"{HERE}.{name}")
