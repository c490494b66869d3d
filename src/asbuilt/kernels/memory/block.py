"""What blocks and branches need while they run, and which of their parts share an input."""

from __future__ import annotations

from asbuilt.kernels.memory.altup import AlternatingUpdatesMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.block import Block, Branch, Parallel
from asbuilt.spec.part import Pass


@memory_of(Parallel)
class ParallelMemory(Memory[Parallel]):
    """Memory of attention and feed-forward in parallel."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """Both read the normalised stream, unless one of them reads it scaled, which is another tensor."""
        return (("ffn", "attention"),) if self.part.input_scales == (1.0, 1.0) else ()

    def peak_bytes(self, run: Pass) -> int:
        """The larger peak of the two, with attention's result beside the other; or both results and their sum."""
        part = self.part
        stream = run.rows * part.d_model * run.width
        first, second = (stream if scale != 1.0 else 0 for scale in part.input_scales)
        attending, other = memory(part.attention).peak_bytes(run), memory(part.ffn).peak_bytes(run)
        return max(first + attending, stream + second + other, 3 * stream)


@memory_of(Branch)
class BranchMemory(Memory[Branch]):
    """Memory of one residual branch."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What learned factors multiply, if any, and which tokens come before an image, where they get nothing."""
        part, size = self.part, run.rows * self.part.body.d_model
        after = Saved(name="after the image", size=run.rows, shared=True)
        gated = (Saved(name="ungated", size=size), Saved(name="gate", size=1, divided="none"))
        return (
            *((after,) if part.after_source and run.images else ()),
            *((Saved(name="unscaled", size=size),) if part.layer_scale else ()),
            *(gated if part.gated else ()),
        )

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """What is beside the body reads the same as the body, unless both of a pair read it scaled."""
        read = self._read
        return () if self.part.beside is None or read is None else (("beside", read),)

    @property
    def _read(self) -> str | None:
        """Returns the path of what reads the body's input as it is; None where it is scaled first."""
        body = self.part.body
        if not isinstance(body, Parallel):
            return "body"
        names = zip(("attention", "ffn"), body.input_scales, strict=True)
        return next((f"body.{name}" for name, scale in names if scale == 1.0), None)

    def recomputes(self) -> tuple[str, ...]:
        """The normalised input, from the stream that the norm saves."""
        part = self.part
        if part.norm is None:
            return ()
        more = ("beside:input",) if part.beside is not None and self._read is None else ()
        return (*self._of_body(part), *more)

    @staticmethod
    def _of_body(part: Branch) -> tuple[str, ...]:
        if not isinstance(part.body, Parallel):
            return ("body:input",)
        beside = () if part.body.input_scales == (1.0, 1.0) else ("body.ffn:input",)
        return ("body.attention:input", *beside)

    def peak_bytes(self, run: Pass) -> int:
        """The peak of norm, body with its normalised input, post-norm, and the sum."""
        part = self.part
        stream = run.rows * part.body.d_model * run.width
        normed = stream if part.norm is not None else 0
        norms = [memory(norm).peak_bytes(run) for norm in (part.norm,) if norm is not None]
        if part.streams is not None:
            numbers = part.streams.n_streams * stream
            reading = memory(part.streams).peak_bytes(run)
            return max(
                reading, stream + normed + max((memory(part.body).peak_bytes(run), *norms)), 2 * numbers + stream
            )
        beside = 0 if part.side is None else stream  # the sum of the input and what the side gives
        side = 0 if part.side is None else memory(part.side).peak_bytes(run)
        after = [stream + memory(norm).peak_bytes(run) for norm in (part.post_norm, part.sum_norm) if norm is not None]
        if part.beside is not None:  # beside the body's input and output
            after.append(normed + stream + max(memory(part.beside).peak_bytes(run), 2 * stream))
        summing = 2 * stream + (stream if part.normed else 0) + (stream if part.stream_scale != 1.0 else 0)
        most = max(normed + memory(part.body).peak_bytes(run), summing, *norms, *after)
        return max(side, beside + most)


@memory_of(Block)
class BlockMemory(Memory[Block]):
    """Memory of consecutive branches."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The factor on the stream, if any."""
        return (Saved(name="scale", size=1, divided="none"),) if self.part.scaled else ()

    def peak_bytes(self, run: Pass) -> int:
        """The branch with the highest peak; from the second on, its input is allocated beside the block's."""
        part = self.part
        if part.updates is not None:
            return self._updating(AlternatingUpdatesMemory(part.updates), run)
        stream = run.rows * part.stream_width * run.width
        return max(memory(branch).peak_bytes(run) + (stream if i else 0) for i, branch in enumerate(part.branches))

    def _updating(self, updates: AlternatingUpdatesMemory, run: Pass) -> int:
        """Returns the peak of branches beside the predicted streams, or of what comes before and after them."""
        branches = self.part.branches
        stream = run.rows * branches[0].body.d_model * run.width
        inside = max(memory(branch).peak_bytes(run) + (stream if i else 0) for i, branch in enumerate(branches))
        return max(updates.peak_bytes(run), updates.read(run) + inside)

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """A parallel branch has the same input as the branch before it; some read that of the first."""
        part = self.part
        first = part.branches[0]
        pairs = zip(part.branches, part.branches[1:], strict=False)
        after = tuple((reader(second), reader(one)) for one, second in pairs if second.parallel)
        return after + tuple((reader(one), reader(first)) for one in part.branches if one.block_input)


def reader(branch: Branch) -> str:
    """Returns the path, from the block, of the part that reads the stream; of the body, if that scales it first.

    A part that joins it with others, or adds to it, saves that.
    """
    if branch.side is not None:
        return f"{branch.name}.side"
    if branch.norm is not None:
        return f"{branch.name}.norm"
    scales = branch.body.input_scales if isinstance(branch.body, Parallel) else ()
    read = next((name for name, scale in zip((".attention", ".ffn"), scales, strict=False) if scale == 1.0), "")
    return f"{branch.name}.body{read}"
