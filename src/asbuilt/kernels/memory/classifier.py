"""What classifiers save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.classifier import Classifier
from asbuilt.spec.encoder import Pooler
from asbuilt.spec.part import Pass


@memory_of(Classifier)
class ClassifierMemory(Memory[Classifier]):
    """Memory of choosing what is labelled, and of one product."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, unless a pooler saves it as its output, and the chosen positions if padding is skipped."""
        part = self.part
        by_pooler = isinstance(part.transform, Pooler) and memory(part.transform).saves_output  # type: ignore[attr-defined]
        read = () if by_pooler else (Saved(name="input", size=run.rows * part.d_model),)
        return read if part.padding is None else (*read, Saved(name="places", size=2 * run.rows, width="int64"))

    def peak_bytes(self, run: Pass) -> int:
        """The transform; or its output, and the result."""
        part = self.part
        result = run.rows * part.n_labels * run.width
        if part.transform is None:
            return result
        return max(memory(part.transform).peak_bytes(run), run.rows * part.d_model * run.width + result)
