"""Which positions attention attends to, one by one."""

from __future__ import annotations

from asbuilt.spec import Attention


def attends(part: Attention, q: int, k: int) -> bool:
    """Whether position q attends to position k, which is not hidden for being later."""
    if part.chunk is not None:
        summed = part.summary is not None and k % part.chunk >= part.chunk - part.summary
        return q // part.chunk == k // part.chunk or summed
    if part.stride is not None:
        return (q - k) % part.stride == 0 or (part.window is not None and q - k < part.window)
    return part.window is None or abs(q - k) < part.window
