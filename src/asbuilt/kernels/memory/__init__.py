"""What asbuilt's kernels save and need, per part: `memory(part).saves(run)`, `memory(part).peak_bytes(run)`."""

from typing import TYPE_CHECKING

from asbuilt.packages import on_first_use

if TYPE_CHECKING:
    from asbuilt.kernels.memory.registry import Memory, Saved, Width, memory, memory_of

PUBLIC = {
    "Memory": "asbuilt.kernels.memory.registry",
    "Saved": "asbuilt.kernels.memory.registry",
    "Width": "asbuilt.kernels.memory.registry",
    "memory": "asbuilt.kernels.memory.registry",
    "memory_of": "asbuilt.kernels.memory.registry",
}
__all__ = ["Memory", "Saved", "Width", "memory", "memory_of"]

if not TYPE_CHECKING:  # a checker would take every name for one
    __getattr__ = on_first_use(__name__, PUBLIC)
