"""What the convolutions over frames save and need."""

from __future__ import annotations

import math

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.audio import TAPS, MelEmbedding, MelSubsampling
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


@memory_of(MelSubsampling)
class MelSubsamplingMemory(Memory[MelSubsampling]):
    """Memory of convolutions, their norms and activations."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The spectrogram; of each convolution its result, the norm's statistics, and the activation's result."""
        part = self.part
        kept = [] if part.ahead else [Saved(name="input", size=run.batch * part.n_frames * part.n_mels)]
        before = (part.n_frames, part.n_mels, 1)
        for i, sizes in enumerate(self._sizes()):
            if part.ahead:  # with zeros around, what a convolution reads is a copy
                frames, bands, channels = before
                kept.append(Saved(name=f"edged_{i}", size=run.batch * (frames + 2) * (bands + 2) * channels))
            kept.append(Saved(name=f"hidden_{i}", size=run.batch * math.prod(sizes)))
            kept += self._norm_saves(i, run, sizes)
            before = sizes
        return tuple(kept)

    def _norm_saves(self, i: int, run: Pass, sizes: tuple[int, int, int]) -> list[Saved]:
        """Returns what the norm saves: its input and statistics; or differences, before and after they are scaled."""
        frames, bands, channels = sizes
        rows = run.batch * frames * bands
        if not self.part.cumulative:
            statistics = [Saved(name=f"{name}_{i}", size=rows) for name in ("mean", "rstd")]
            return [Saved(name=f"conv_{i}", size=rows * channels), *statistics]
        each = [Saved(name=f"{name}_{i}", size=rows * channels, width="wide") for name in ("centred", "normed")]
        counts = Saved(name=f"counts_{i}", size=frames, width="int64")
        return [*each, Saved(name=f"rstd_{i}", size=run.batch * frames, width="wide"), counts]

    def recomputes(self) -> tuple[str, ...]:
        """The activations' results, from the norms' inputs."""
        return tuple(f"hidden_{i}" for i in range(len(self.part.channels)))

    def _sizes(self) -> list[tuple[int, int, int]]:
        """Returns the frames, bands and channels after each convolution."""
        part = self.part
        return [*zip(part.left(part.n_frames), part.bands, part.channels, strict=True)]

    def peak_bytes(self, run: Pass) -> int:
        """A convolution's input and result, and the library's copies of both and of the kernel; then norm and relu."""
        part, inside, most = self.part, run.batch * self.part.n_frames * self.part.n_mels, 0
        before = 1
        for frames, bands, channels in self._sizes():
            made = run.batch * frames * bands * channels
            most = max(most, 2 * (inside + made) + TAPS**2 * before * channels, inside + (3 + part.cumulative) * made)
            inside, before = made, channels
        return max(most, inside + run.batch * part.n_tokens * part.d_model) * run.width
