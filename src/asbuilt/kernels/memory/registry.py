"""What our kernels keep for the backward pass and need while they run: one class beside each part that says anything.

A part says what it holds, multiplies and remembers; what computing that takes beyond it depends on how it is computed,
and stands here, in the file of the part's own name. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, Literal, TypeVar

from asbuilt.spec.part import Part, Pass

SPEC, HERE = "asbuilt.spec", "asbuilt.kernels.memory"

# How wide a number is: `activation` follows the run's dtype, `wide` is float32 or the run's dtype where that is wider,
# as statistics and probabilities are kept; the others are what the library always uses.
Width = Literal["activation", "wide", "int64", "bool"]
# What divides a tensor among the devices that share a layer: `tokens` where each token has a row of whole width, which
# sequence parallelism divides; `width` where it is as wide as a divided map, its heads or hidden numbers, so that a
# device has all tokens of its own share; `none` for what each device has whole, such as a mask.
Divided = Literal["tokens", "width", "none"]

P = TypeVar("P", bound=Part)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One tensor kept for the backward pass, `size` numbers of `width`.

    The name `input` stands for what the part reads; parts that read the same tensor keep it once (`same_input`).
    `shared` marks a tensor that is one and the same for every part of a stack that names it (token numbers, rotary
    tables). `divided` says what divides it among devices.
    """

    name: str
    size: int
    width: Width = "activation"
    shared: bool = False
    divided: Divided = "tokens"

    def nbytes(self, activation: int) -> int:
        """Bytes, at `activation` bytes for a number of the run's dtype."""
        return self.size * {"activation": activation, "wide": max(4, activation), "int64": 8, "bool": 1}[self.width]


class Memory(Generic[P]):
    """What computing one part takes beside its weights and its cache; the defaults say: it saves and needs nothing."""

    def __init__(self, part: P) -> None:
        self.part = part

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Returns the tensors autograd keeps for the backward pass, children excluded, weights excluded."""
        return ()

    def recomputes(self) -> tuple[str, ...]:
        """Returns which saved tensors selective checkpointing drops: own names, or `path:name` of parts below.

        Each is made again during the backward pass from what is kept: number by number, by a norm, by looking rows up,
        or from the scores of kept queries and keys; never by a product with a weight.
        """
        return ()

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """Returns pairs of paths below the part that read one and the same tensor, which is then kept once.

        The second of a pair is the one that is named; an empty path stands for the part itself.
        """
        return ()

    def of_heads(self) -> tuple[str, ...]:
        """Returns the names of parts below that work on heads: what they keep is divided as the heads are."""
        return ()

    def peak_bytes(self, run: Pass) -> int:
        """Returns the most bytes alive at once while the part runs without gradients, its input not counted."""
        return 0

    def mask_peak(self, run: Pass) -> tuple[str, int, int] | None:
        """Returns a mask's name, its bytes and what making it takes beside, None for none; a name is made once."""
        return None


MEMORIES: dict[type[Part], type[Memory[Any]]] = {}
K = TypeVar("K", bound=type[Memory[Any]])


def memory_of(*parts: type[Part]) -> Callable[[K], K]:
    """Registers a class as the memory of parts of these types, and of types made from them that have none."""

    def register(found: K) -> K:
        MEMORIES.update(dict.fromkeys(parts, found))
        registered.cache_clear()
        return found

    return register


def memory(part: P) -> Memory[P]:
    """Returns what computing `part` takes: as registered for its type or one it is made from, or nothing."""
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
    """Imports kernels/memory/x.py for parts of spec/x.py, where there is one: the classes in it register themselves."""
    package, _, name = module.rpartition(".")
    if package == SPEC and find_spec(f"{HERE}.{name}") is not None:
        import_module(f"{HERE}.{name}")
