"""What blocks and their branches need while they run, and what their parts read in common."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, memory, memory_of
from asbuilt.spec.block import Block, Branch, Parallel
from asbuilt.spec.part import Pass


@memory_of(Parallel)
class ParallelMemory(Memory[Parallel]):
    """Memory of attention and feed-forward beside each other."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """Both read the normed stream."""
        return (("ffn", "attention"),)

    def peak_bytes(self, run: Pass) -> int:
        """The busier of the two, the attention's result being there while the other runs; or both and their sum."""
        part = self.part
        stream = run.rows * part.d_model * run.width
        return max(memory(part.attention).peak_bytes(run), stream + memory(part.ffn).peak_bytes(run), 3 * stream)


@memory_of(Branch)
class BranchMemory(Memory[Branch]):
    """Memory of one residual branch."""

    def recomputes(self) -> tuple[str, ...]:
        """The normed input, from the stream that the norm keeps."""
        part = self.part
        reader = "body.attention" if isinstance(part.body, Parallel) else "body"
        return () if part.norm is None else (f"{reader}:input",)

    def peak_bytes(self, run: Pass) -> int:
        """The busiest of norm, body with the normed input, post-norm, and the sum."""
        part = self.part
        stream = run.rows * part.body.d_model * run.width
        normed = stream if part.norm is not None else 0
        norms = [memory(norm).peak_bytes(run) for norm in (part.norm,) if norm is not None]
        after = [stream + memory(norm).peak_bytes(run) for norm in (part.post_norm, part.sum_norm) if norm is not None]
        return max(normed + memory(part.body).peak_bytes(run), 2 * stream, *norms, *after)


@memory_of(Block)
class BlockMemory(Memory[Block]):
    """Memory of branches one after the other."""

    def peak_bytes(self, run: Pass) -> int:
        """The busiest branch; from the second on its input is alive beside the block's."""
        part = self.part
        stream = run.rows * part.branches[0].body.d_model * run.width
        return max(memory(branch).peak_bytes(run) + (stream if i else 0) for i, branch in enumerate(part.branches))

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """What a parallel branch reads first is what the branch before it read first."""
        part = self.part
        pairs = zip(part.branches, part.branches[1:], strict=False)
        return tuple((_reader(second), _reader(first)) for first, second in pairs if second.parallel)


def _reader(branch: Branch) -> str:
    """The path, from the block, of the part that reads the stream."""
    first = "norm" if branch.norm is not None else "body.attention" if isinstance(branch.body, Parallel) else "body"
    return f"{branch.name}.{first}"
