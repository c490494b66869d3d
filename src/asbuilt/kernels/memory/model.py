"""What a whole model needs while it runs."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, memory, memory_of
from asbuilt.spec.block import Block
from asbuilt.spec.model import Model
from asbuilt.spec.part import Part, Pass, walk
from asbuilt.spec.positions import Rotary
from asbuilt.spec.vision import Vision


@memory_of(Model)
class ModelMemory(Memory[Model]):
    """Memory of a pass through the whole stack."""

    def peak_bytes(self, run: Pass) -> int:
        """The stream with the busiest block or with the head; positions (int64) and rotary tables stay throughout.

        An encoder or a tower runs before, and what it made stays.
        """
        model = self.part
        run = model._own(run)
        stream = run.rows * model.d_model * run.width
        blocks = model.blocks[: run.depth]
        tables, making = self._tables(blocks, run)
        above = model._above(run)
        normed = above.rows * model.d_model * run.width if model.norm is not None else 0
        after = model.pooler if run.logits == "pooled" else model.head
        head = max(_peak(model.norm, above), normed + _peak(after, above))
        own = (
            tables
            + stream
            + max(
                head,
                stream + making if making else 0,
                _peak(model.embedding, run),
                *(_peak(block, run) for block in blocks),
            )
        )
        return max(own, self._peak_before(run, own))

    def _tables(self, blocks: tuple[Block, ...], run: Pass) -> tuple[int, int]:
        """Bytes of what layers share for the whole pass, and the most that making one of the masks takes."""
        parts = [part for block in blocks for _, part in walk(block)]
        rotary = {part for part in parts if isinstance(part, Rotary)}
        masks = {mask[0]: mask[1:] for part in parts if (mask := memory(part).mask_peak(run))}
        kept = run.tokens * 8 + sum(_peak(part, run) for part in rotary) + sum(kept for kept, _ in masks.values())
        return kept, max((made for _, made in masks.values()), default=0)

    def _peak_before(self, run: Pass, own: int) -> int:
        """The busiest of an encoder or tower, and of what comes after it beside what it made."""
        model = self.part
        source, seen = model.child_run("encoder", run), model.child_run("vision", run)
        if model.encoder is not None and source is not None:
            return max(_peak(model.encoder, source), source.rows * model.encoder.d_model * run.width + own)
        if model.vision is None or seen is None:
            return 0
        made = model.vision.n_tokens * model.d_model if isinstance(model.vision, Vision) else 0
        return max(_peak(model.vision, seen), seen.batch * made * run.width + own)


def _peak(part: Part | None, run: Pass) -> int:
    return 0 if part is None else memory(part).peak_bytes(run)
