"""Parts from outside the package: once registered, one is costed, planned, built, saved and loaded like ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asbuilt.kernels.memory import Memory, memory_of
from asbuilt.spec.json import register_part
from asbuilt.spec.part import Part

if TYPE_CHECKING:
    from torch import nn

    from asbuilt.nn.cache import Makes


def register(
    part: type[Part],
    module: Callable[..., nn.Module] | None = None,
    memory: type[Memory[Any]] | None = None,
    *,
    cache: Makes | None = None,
) -> type[Part]:
    """Makes a part known that stands where a mixer or a feed-forward does: the body of a branch.

    `part` is a frozen keyword-only dataclass, a `Part` with a `d_model`, that declares what it holds, multiplies and
    remembers (CONTRIBUTING.md, "Adding a part"); its name stands in spec JSON. `module` makes its module of
    (part, path): `module(x_BTM, step)` gives (B, T, M), and its parameters are named as `holds` names them. Without it
    the part is described and planned, and not built. `memory` says what that module saves for the backward pass and
    needs while it runs; without it the part is taken to save and need nothing. `cache` makes its cache of (what it
    remembers, batch, capacity, dtype, device), where that is none of the usual ones. Returns the part. Raises
    InputError for what is no such part, and for a name that one of ours has.
    """
    register_part(part)
    if memory is not None:
        memory_of(part)(memory)
    if module is not None:
        from asbuilt.nn.registry import computes

        computes(part)(module)
    if cache is not None:
        from asbuilt.nn.cache import CACHES

        CACHES[part] = cache
    return part
