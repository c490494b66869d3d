"""What RWKV-4's mixers save and need."""

from __future__ import annotations

import math

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.time_mixing import PIECE, ChannelMixing, TimeMixing, TokenShift


@memory_of(TokenShift)
class TokenShiftMemory(Memory[TokenShift]):
    """Memory of an interpolation for each target."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Each token, and the one before it."""
        size = run.rows * self.part.d_model
        return (Saved(name="input", size=size), Saved(name="before", size=size))

    def recomputes(self) -> tuple[str, ...]:
        """The tokens before."""
        return ("before",)

    def peak_bytes(self, run: Pass) -> int:
        """The tokens before, and the results."""
        return (1 + len(self.part.targets)) * run.rows * self.part.d_model * run.width


@memory_of(TimeMixing)
class TimeMixingMemory(MappedMemory[TimeMixing]):
    """Memory of `kernels.wkv`, which is recomputed in the backward pass."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """The token shift reads the stream."""
        return (("shift", ""),)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What the maps read; keys, values and receptance; the averages, and o's input."""
        part = self.part
        read, wide = run.rows * part.d_model, run.rows * part.d_state
        mixed = tuple(Saved(name=f"{name} mixed", size=read) for name in part.shift.targets)
        inside = tuple(Saved(name=name, size=wide, divided="width") for name in ("k", "v", "r", "mixed"))
        averages = Saved(name="averages", size=wide, divided="width")
        decay = Saved(name="decay", size=2 * part.d_state, width="wide", divided="width")
        return (*mixed, *inside, averages, decay, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """What the maps read, and o's input."""
        return (*(f"{name} mixed" for name in self.part.shift.targets), "mixed")

    def peak_bytes(self, run: Pass) -> int:
        """What the maps read and give, and the averages of a piece, for each token 15 numbers in float32 or wider.

        A block of tokens has 11 more, for what is handed from block to block.
        """
        part, wide = self.part, max(4, run.width)
        piece = min(run.tokens, PIECE)
        inside = 15 * piece + 11 * (piece // math.isqrt(piece)) + (2 * piece if run.width < wide else 0)
        done = (run.tokens - 1) // PIECE * PIECE
        read = 3 * run.rows * (part.d_model + part.d_state) * run.width
        return read + run.batch * part.d_state * (inside + done) * wide + self.peak_beside(run)


@memory_of(ChannelMixing)
class ChannelMixingMemory(MappedMemory[ChannelMixing]):
    """Memory of a feed-forward of the shifted stream."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """The token shift reads the stream."""
        return (("shift", ""),)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What the maps read; relu's result and its square; both factors of the result, if there is a receptance."""
        part = self.part
        read, wide = run.rows * part.d_model, run.rows * part.d_ff
        mixed = tuple(Saved(name=f"{name} mixed", size=read) for name in part.shift.targets)
        inside = tuple(Saved(name=name, size=wide, divided="width") for name in ("up", "hidden"))
        factors = tuple(Saved(name=name, size=read) for name in ("r", "down") if part.receptance)
        return (*mixed, *inside, *factors, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """What the maps read, and the square."""
        return (*(f"{name} mixed" for name in self.part.shift.targets), "hidden")

    def peak_bytes(self, run: Pass) -> int:
        """What the maps read; relu's result and its square, or that and the result, or the result's factors and it."""
        part = self.part
        read, wide = run.rows * part.d_model, run.rows * part.d_ff
        inside = max(2 * wide, wide + read, 3 * read if part.receptance else 0)
        return (len(part.shift.targets) * read + inside) * run.width + self.peak_beside(run)
