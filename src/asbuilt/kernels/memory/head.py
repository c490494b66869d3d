"""What language heads save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory, product_beside
from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.head import Head, SharedHead, TiedHead
from asbuilt.spec.part import Pass


@memory_of(Head, TiedHead)
class HeadMemory(MappedMemory[Head | TiedHead]):
    """Memory of logits."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, in both widths, and the capped logits if there is a cap."""
        part = self.part
        made = part.d_model if part.transform is None else part.transform.width
        read = (Saved(name="input", size=run.rows * made),)
        if part.maps:
            read += (Saved(name="narrow", size=run.rows * part.width), *self.maps_keep(run))
        return (
            read
            if part.softcap is None
            else (*read, Saved(name="capped", size=run.rows * part.n_vocab, divided="width"))
        )

    def peak_bytes(self, run: Pass) -> int:
        """The logits, twice if scaled or shifted, three times if capped, beside their input; or the transform.

        A packed matrix is dequantised beside the logits, which are then allocated once.
        """
        part = self.part
        times = 3 if part.softcap is not None else 2 if part.scale != 1.0 or part.shift else 1
        once = run.rows * part.n_vocab * run.width
        logits = once * times
        if part.format is not None:
            logits = max(logits, once + product_beside(part.format, part.n_vocab, part.width, run.rows, run.width))
        if part.transform is None:
            return run.rows * (part.d_table or 0) * run.width + logits + self.peak_beside(run)
        return max(memory(part.transform).peak_bytes(run), run.rows * part.width * run.width + logits)


@memory_of(SharedHead)
class SharedHeadMemory(Memory[SharedHead]):
    """Memory of logits made with another part's matrix, which are never trained."""

    def peak_bytes(self, run: Pass) -> int:
        """The logits."""
        return run.rows * self.part.n_vocab * run.width
