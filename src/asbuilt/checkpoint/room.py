"""Memory checks before loading a model, and the message if it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asbuilt import cost, memory
from asbuilt.errors import InputError
from asbuilt.shown import size
from asbuilt.spec import stored_weights, weights

if TYPE_CHECKING:
    from asbuilt.spec import Model

# How PyTorch's allocators report a failed allocation.
REFUSED = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


def built_bytes(spec: Model, dtype: str) -> int:
    """Returns the bytes of a built model, including parameters that no pass uses."""
    found = [weight for _, weight, _ in stored_weights(spec)]
    found += [weight for _, weight, _ in weights(spec) if not weight.learned]
    number = cost.dtype(dtype).block_bytes
    held = sum(weight.size * number for weight in found if weight.format is None)
    return math.ceil(held) + sum(math.prod(weight.stored_shape) for weight in found if weight.format is not None)


def require_room(needed: int, name: str, *, what: str = "to be loaded", fix: str = "") -> None:
    """Raises InputError if `needed` bytes are not free; call it before anything is allocated."""
    have = memory.free()
    if have is not None and needed > have:
        raise too_large(needed, have, name, what, fix)


def too_large(needed: int, have: int | None, name: str, what: str = "to be loaded", fix: str = "") -> InputError:
    """Returns the InputError for a model that does not fit, with the needed and the free memory."""
    free = "less is free" if have is None else f"{size(have)} are free"
    return InputError(
        f"needs {size(needed)} of memory {what}, {free}",
        field="MODEL",
        value=name,
        fix=fix or "free some, use a machine with more, or a narrower --dtype; `asbuilt describe` needs none",
    )


@contextmanager
def memory_errors(needed: int, name: str, what: str = "to be loaded") -> Iterator[None]:
    """Turns failed allocations into the same message, since some memory limits cannot be queried."""
    try:
        yield
    except MemoryError as error:
        raise too_large(needed, memory.free(), name, what) from error
    except RuntimeError as error:
        if not any(said in str(error) for said in REFUSED):
            raise
        raise too_large(needed, memory.free(), name, what) from error
