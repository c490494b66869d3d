"""What the real-gated linear recurrent unit saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.rg_lru import RGLRU


@memory_of(RGLRU)
class RGLRUMemory(MappedMemory[RGLRU]):
    """Memory of `nn.rg_lru` and `kernels.scan`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input; what the gates and the recurrence read and give; both factors of o's input, and that."""
        part = self.part
        wide = run.rows * part.d_rnn
        names = [*([] if part.activation == "relu" else ["y"]), "activated", "u", "r", "i", "mixed"]
        names += ["h cast"] if run.width < 4 else []
        inside = (Saved(name=name, size=wide, divided="width") for name in names)
        return (
            Saved(name="input", size=run.rows * part.d_model),
            *inside,
            Saved(name="h", size=wide, width="wide", divided="width"),
            Saved(name="first", size=run.tokens, width="bool", divided="none"),
            *self.maps_keep(run),
        )

    def recomputes(self) -> tuple[str, ...]:
        """The activated branch and what it multiplies, what the convolution gives."""
        return (*(() if self.part.activation == "relu" else ("activated",)), "u", "h cast", "mixed")

    def peak_bytes(self, run: Pass) -> int:
        """Beside y and x: the convolution; or u, both gates and five wide tensors, six with a cast; or what follows."""
        part = self.part
        wide, held = run.rows * part.d_rnn * max(4, run.width), run.rows * part.d_rnn * run.width
        cast = held if run.width < 4 else 0
        after = wide + held + max(held + cast, run.rows * part.d_model * run.width)
        inside = max(memory(part.conv).peak_bytes(run), 3 * held + (6 if cast else 5) * wide, after)
        return 2 * held + inside + self.peak_beside(run)
