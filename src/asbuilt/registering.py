"""Registering parts from outside the package, to be costed, planned, built, saved and loaded like asbuilt's own."""

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
    """Registers a part that can be the body of a branch, in place of a mixer or feed-forward, and returns it.

    `part` is a frozen keyword-only dataclass, a `Part` with a `d_model`, that declares what it holds, multiplies and
    remembers (CONTRIBUTING.md, "Adding a part"); spec JSON uses its class name. `module(part, path)` returns its
    module, which maps (x_BTM, step) to (B, T, M) and names its parameters as `holds` does; without it the part can be
    described and planned but not built. `memory` declares what that module saves for backward and needs while it runs;
    without it both count as zero. `cache(remembered, batch, capacity, dtype, device)` returns its cache, if none of the
    standard ones fits. Raises InputError for an invalid part, and for the name of a built-in part.
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
