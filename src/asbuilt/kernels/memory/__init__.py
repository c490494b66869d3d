"""What asbuilt's kernels save and need, per part: `memory(part).saves(run)`, `memory(part).peak_bytes(run)`."""

from asbuilt.kernels.memory.registry import Memory, Saved, Width, memory, memory_of

__all__ = ["Memory", "Saved", "Width", "memory", "memory_of"]
