"""What convolutional networks over images save and need."""

from __future__ import annotations

from math import isqrt

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.convolved import ConvolvedPatches, GridAttention, GridConvolution, InvertedResidual
from asbuilt.spec.part import Pass

BLOCK = 16  # channels that the library convolves together


@memory_of(GridConvolution)
class GridConvolutionMemory(Memory[GridConvolution]):
    """Memory of a convolution and its activation."""

    def _edged(self, run: Pass) -> int:
        """Returns the numbers of what is convolved, if that is a copy with unequal edges; else 0."""
        part, side = self.part, isqrt(run.tokens)
        before, after = part.edges(side)
        return run.batch * (side + before + after) ** 2 * part.d_in if before != after else 0

    def _made(self, run: Pass) -> int:
        return self.part.child_run("norm", run).rows * self.part.d_out

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What is convolved, and what the activation reads."""
        part, edged = self.part, self._edged(run)
        name, size = ("edged", edged) if edged else ("input", run.rows * part.d_in)
        read = (Saved(name="normed", size=self._made(run)),) if part.activated else ()
        return (Saved(name=name, size=size), *read)

    def peak_bytes(self, run: Pass) -> int:
        """What is convolved, its result, and the library's copy of the larger of both; or the result and its norm."""
        part, made, edged = self.part, self._made(run), self._edged(run)
        norm = memory(part.norm).peak_bytes(part.child_run("norm", run))
        read, out = (edged or run.rows * part.d_in) // part.d_in, made // part.d_out
        copied = 0 if part.plain else max(read * blocked(part.d_in), out * blocked(part.d_out))
        return max((edged + made + copied) * run.width, made * run.width + norm, 2 * made * run.width)


def blocked(channels: int) -> int:
    """Returns the channels of the library's copy of a grid, which come in blocks."""
    return -(-channels // BLOCK) * BLOCK


@memory_of(InvertedResidual)
class InvertedResidualMemory(Memory[InvertedResidual]):
    """Memory of convolutions one after the other."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What is scaled."""
        part = self.part
        left = run.batch * part.left(isqrt(run.tokens)) ** 2
        return (Saved(name="unscaled", size=left * part.d_out),) if part.scaled else ()

    def peak_bytes(self, run: Pass) -> int:
        """The convolution that needs most, beside what it reads; or the result, scaled and added."""
        part, most = self.part, 0
        for i, step in enumerate(part.steps):
            seen = part.child_run(f"steps.{i}", run)
            read = seen.rows * step.d_in * run.width if i else 0
            most = max(most, read + memory(step).peak_bytes(seen))
        left = run.batch * part.left(isqrt(run.tokens)) ** 2
        return max(most, 2 * left * part.d_out * run.width)


@memory_of(GridAttention)
class GridAttentionMemory(MappedMemory[GridAttention]):
    """Memory of the reference kernel: all scores of all heads."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """What leaves fewer keys and values reads what queries are made of."""
        return (("k_reduced", ""), ("v_reduced", ""))

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The normalised vectors and, if fewer are left, those too; queries, keys, values, probabilities; the rest."""
        part = self.part
        keys, wide = run.batch * part.n_keys(run.tokens), part.n_heads * part.d_head
        left = {"k_read": part.k_reduced, "v_read": part.v_reduced}
        sizes = {"input": run.rows * part.d_model}
        sizes |= {name: keys * part.d_model for name, one in left.items() if one is not None}
        sizes |= {"q": run.rows * wide, "k": keys * part.d_head, "v": keys * part.d_head}
        sizes |= {"probabilities": run.rows * part.n_heads * part.n_keys(run.tokens), "mixed": run.rows * wide}
        sizes |= {"unscaled": run.rows * part.d_model}
        return (*(Saved(name=name, size=size) for name, size in sizes.items()), *self.maps_keep(run))

    def peak_bytes(self, run: Pass) -> int:
        """Scores three times, beside the vectors, their norm, queries and what is left of them; or the output."""
        part = self.part
        wide, scores = part.n_heads * part.d_head, part.n_heads * part.n_keys(run.tokens)
        beside = run.rows * (part.d_model + wide)
        return (beside + max(2 * run.rows * scores + run.rows * wide, 3 * run.rows * part.d_model)) * run.width


@memory_of(ConvolvedPatches)
class ConvolvedPatchesMemory(Memory[ConvolvedPatches]):
    """Memory of all blocks, and of the fusion."""

    def peak_bytes(self, run: Pass) -> int:
        """The block that needs most beside what it reads, and later beside the grid that is fused; or the fusion."""
        part = self.part
        pixels = run.batch * part.image_size**2 * part.channels * run.width
        most = pixels + memory(part.stem).peak_bytes(part.child_run("stem", run))
        early = run.batch * part.side**2 * part.fuse.d_in * run.width
        for i, block in enumerate(part.blocks):
            seen = part.child_run(f"blocks.{i}", run)
            width = block.d_in if isinstance(block, InvertedResidual) else block.d_model
            read = seen.rows * width * run.width + (early if i > part.fused + 1 else 0)
            most = max(most, read + memory(block).peak_bytes(seen))
        fused = memory(part.fuse).peak_bytes(part.child_run("fuse", run))
        return max(most, early + fused)
