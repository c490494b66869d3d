"""What Mamba saves and needs."""

from __future__ import annotations

import math

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.mamba import Mamba
from asbuilt.spec.part import Pass


@memory_of(Mamba)
class MambaMemory(MappedMemory[Mamba]):
    """Memory of `kernels.mamba`, whose backward pass computes the states again."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the gate (x before the convolution is the convolution's), x, b, c, steps, A and results."""
        part = self.part
        inner, state = run.rows * part.d_inner, run.rows * part.d_state
        return (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="gate", size=inner, divided="width"),
            Saved(name="x", size=inner, divided="width"),
            Saved(name="steps' vector", size=run.rows * part.dt_rank, divided="width"),
            Saved(name="b", size=state, divided="width"),
            Saved(name="c", size=state, divided="width"),
            Saved(name="steps before", size=inner, width="wide", divided="width"),
            Saved(name="steps", size=inner, width="wide", divided="width"),
            Saved(name="a", size=2 * part.d_inner * part.d_state, width="wide", divided="width"),
            Saved(name="y", size=inner, width="wide", divided="width"),
            Saved(name="mixed", size=inner, divided="width"),
            *self.maps_keep(run),
        )

    def recomputes(self) -> tuple[str, ...]:
        """Steps, and what the output map reads."""
        return ("steps", "mixed")

    def peak_bytes(self, run: Pass) -> int:
        """x and the gate, beside the convolution; or beside steps, their products with x, and the states of blocks."""
        part, wide = self.part, max(4, run.width)
        inner, selected = run.rows * part.d_inner, run.rows * sum(part.selected)
        held = 2 * inner * run.width
        convolving = held + memory(part.conv).peak_bytes(run)
        size = math.isqrt(max(0, run.tokens - 1)) + 1
        blocks = math.ceil(run.tokens / size)
        states = run.batch * blocks * part.d_inner * part.d_state
        copied = 2 * run.rows * part.d_state + (inner if run.width < wide else 0)
        last = (1 + run.batch) * part.d_inner * part.d_state  # A, and the state after the pass
        scanning = (5 * inner + 4 * states + copied + last) * wide
        reading = held + (inner + selected) * run.width + max(scanning, 3 * inner * wide)
        norming = held + 2 * inner * wide + (inner * run.width if run.width < wide else 0)
        out = held + run.rows * (part.d_inner + part.d_model) * run.width
        return max(convolving, reading, norming, out) + self.peak_beside(run)
