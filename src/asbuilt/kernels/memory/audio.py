"""What the convolutions over frames save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.audio import TAPS, MelEmbedding
from asbuilt.spec.part import Pass


@memory_of(MelEmbedding)
class MelEmbeddingMemory(Memory[MelEmbedding]):
    """Memory of two convolutions and their activations."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The spectrogram, both activations' inputs, and the second convolution's."""
        part = self.part
        frames, tokens = run.batch * part.n_frames * part.d_model, run.batch * part.n_tokens * part.d_model
        return (
            Saved(name="input", size=run.batch * part.n_frames * part.n_mels),
            Saved(name="first", size=frames),
            Saved(name="hidden", size=frames),
            Saved(name="second", size=tokens),
        )

    def recomputes(self) -> tuple[str, ...]:
        """The second convolution's input, from the activation's."""
        return ("hidden",)

    def peak_bytes(self, run: Pass) -> int:
        """The second convolution's input and result, and the library's copies of result and kernel."""
        part, copies = self.part, 1 if run.width >= 4 else 2
        frames = run.batch * part.n_frames * part.d_model
        return (copies * 2 * frames + TAPS * part.d_model**2) * run.width
