"""What sounds in a text save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.hearing import Hearing
from asbuilt.spec.part import Pass


@memory_of(Hearing)
class HearingMemory(Memory[Hearing]):
    """Memory of an audio encoder and its projector."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Which tokens of the text are placeholders; of what fills sounds up, the map's input, and what norms keep."""
        places = Saved(name="places", size=run.batch // run.images * run.tokens, width="bool")
        if not self.part.filled:
            return (places,)
        wide, out = self.part.projector.widths
        statistics = (Saved(name=f"{name}_rstd", size=1, width="wide", divided="none") for name in ("row", "filling"))
        made = (Saved(name="row", size=wide, divided="none"), Saved(name="filling", size=out, divided="none"))
        return (places, *made, *statistics)

    def peak_bytes(self, run: Pass) -> int:
        """The encoder; or the projector beside its output."""
        part = self.part
        heard = run.batch * part.tower.max_positions * part.tower.d_model * run.width
        projected = memory(part.projector).peak_bytes(part.child_run("projector", run))
        return max(memory(part.tower).peak_bytes(part.child_run("tower", run)), heard + projected)
