"""What feed-forwards save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Room, Saved, memory_of
from asbuilt.spec.feedforward import MLP, XIELU, GatedMLP
from asbuilt.spec.part import Pass

# What a clamped gate saves, each as wide as the hidden width: the maps' results, and what follows from them.
CLAMPED = ("gate", "up", "gate cut", "up cut", "opened", "hidden")
# Activations that save what they read.
SMOOTH = ("gelu", "gelu_tanh", "silu")
# What xIELU saves beside its input, each as wide: x^2, e^x - 1, and the difference from x.
LEARNED = ("squared", "exponential", "below")


@memory_of(XIELU)
class XIELUMemory(Memory[XIELU]):
    """Memory of a learned activation: its owner, which knows the width, declares it."""


@memory_of(MLP)
class MLPMemory(MappedMemory[MLP]):
    """Memory of two linear maps and an activation."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the activation's input (or relu's output) and down's input."""
        part = self.part
        wide = run.rows * part.d_ff
        before = () if part.activation == "relu" else (Saved(name="up", size=wide, divided="width"),)
        if isinstance(part.activation, XIELU):
            before += tuple(Saved(name=name, size=wide, divided="width") for name in LEARNED)
            before += (Saved(name="positive", size=wide, width="bool", divided="width"),)
            before += (Saved(name="scales", size=4, divided="none"),)
        kept = (
            Saved(name="input", size=run.rows * part.d_model),
            *before,
            Saved(name="hidden", size=wide, divided="width"),
        )
        return kept + self.maps_keep(run)

    def recomputes(self) -> tuple[str, ...]:
        """Down's input, from the activation's; not for relu, which saves only its output."""
        learned = (*LEARNED, "positive") if isinstance(self.part.activation, XIELU) else ()
        return () if self.part.activation == "relu" else (*learned, "hidden")

    def peak_bytes(self, run: Pass) -> int:
        """The activation's input and output, for quick_gelu also its scaled input; or its output and the result.

        xIELU has both sides, the chosen one, beta x, and their sum beside its input.
        """
        part = self.part
        between = part.d_ff if part.activation == "quick_gelu" else 0
        between = 4 * part.d_ff if isinstance(part.activation, XIELU) else between
        return run.rows * run.width * (part.d_ff + max(part.d_ff + between, part.d_model)) + self.peak_beside(run)

    def room(self, run: Pass) -> Room | None:
        """Up's result where the activation saves another, and for quick_gelu what it scales; gradients of the hidden.

        Two of these are there at once in an activation's backward pass, the second where down's input has been, unless
        it is relu's too; and down's new gradient beside the first.
        """
        part = self.part
        forward = {"gelu": 0, "gelu_tanh": 0, "silu": 0, "relu": 1, "quick_gelu": 2}.get(str(part.activation))
        if forward is None or not self.plain:
            return None
        wide = run.rows * part.d_ff * run.width
        matrix = part.d_ff * part.d_model * run.width
        backward = wide + max(matrix, wide if part.activation == "relu" else 0)
        return Room(forward * wide, backward, forward * wide)


@memory_of(GatedMLP)
class GatedMLPMemory(MappedMemory[GatedMLP]):
    """Memory of three linear maps, an activation and a product."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the activation's input (or relu's output), both factors and down's input."""
        part = self.part
        wide = run.rows * part.d_ff
        before = () if part.activation == "relu" else ("gate",)
        names = (*before, "activated", "up", "hidden") if part.clamp is None else CLAMPED
        spread = ()
        if part.sparsity is not None:
            # the activation reads what is left of the gate; some keep another tensor
            names += ("uncut",) if part.activation in SMOOTH else ("uncut", "cut")
            spread = (Saved(name="spread", size=run.rows),)
        return (
            Saved(name="input", size=run.rows * part.d_model),
            *(Saved(name=name, size=wide, divided="width") for name in names),
            *spread,
            *self.maps_keep(run),
        )

    def recomputes(self) -> tuple[str, ...]:
        """Down's input, and the activated gate unless relu saves nothing else."""
        if self.part.clamp is not None:
            return CLAMPED[2:]
        return ("hidden",) if self.part.activation == "relu" else ("activated", "hidden")

    def peak_bytes(self, run: Pass) -> int:
        """gate and up, their product and the result, or the scaled gate beside what is activated."""
        part = self.part
        between = 3 if part.clamp is None else 5
        between += part.sparsity is not None
        scaled = 4 if part.gate_scale != 1.0 else 0
        return run.rows * run.width * max(between * part.d_ff + part.d_model, scaled * part.d_ff) + self.peak_beside(
            run
        )

    def room(self, run: Pass) -> Room | None:
        """For relu the gate; then the gradient of the hidden, beside down's new one, or beside those of both factors.

        By the second moment down's input is gone.
        """
        part = self.part
        forward = {"gelu": 0, "gelu_tanh": 0, "silu": 0, "relu": 1}.get(part.activation)
        changed = part.clamp is not None or part.sparsity is not None or part.gate_scale != 1.0
        if forward is None or changed or not self.plain:
            return None
        wide = run.rows * part.d_ff * run.width
        matrix = part.d_ff * part.d_model * run.width
        return Room(forward * wide, wide + max(matrix, wide), forward * wide)
