"""What a model needs while it runs."""

from __future__ import annotations

from typing import TypeVar

from asbuilt.kernels.memory.block import reader
from asbuilt.kernels.memory.per_layer import PerLayerEmbeddingMemory
from asbuilt.kernels.memory.registry import Memory, memory, memory_of
from asbuilt.spec.altup import ProjectedStreams
from asbuilt.spec.attention import Attention
from asbuilt.spec.block import Block
from asbuilt.spec.delta_time_mixing import DeltaTimeMixing
from asbuilt.spec.model import Model
from asbuilt.spec.part import Part, Pass, runs, walk
from asbuilt.spec.positions import Rotary

M = TypeVar("M", bound=Model)


@memory_of(Model)
class ModelMemory(Memory[M]):
    """Memory of a pass through the whole stack."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """Per-layer embeddings project what the first block reads, or of several streams what projects them."""
        part = self.part
        if not part.blocks:
            return ()
        first = part.blocks[0].branches[0]
        if part.per_layer is not None and isinstance(part.streams, ProjectedStreams):
            return (("per_layer", "streams"),)
        alone = part.per_layer is None or part.streams is not None
        return () if alone else (("per_layer", f"blocks.0.{reader(first)}"),)

    def peak_bytes(self, run: Pass) -> int:
        """The stream with the block of highest peak or the head; positions (int64) and RoPE tables stay throughout."""
        model = self.part
        run = model._own(run)
        stream = run.rows * model.stream_width * run.width
        blocks = tuple(block for block in model.blocks[: run.depth] if not model.passes_over(block, run))
        tables, making = self._tables(blocks, run)
        above, norm = model._above(run, "head"), model._above(run, "norm")
        normed = norm.rows * model.d_model * run.width if model.norm is not None else 0
        merged = peak(model.streams, run) if run.depth is None else 0
        head = max(merged, peak(model.norm, norm), normed + peak(model.end(run), above))
        narrow = getattr(model, "embedding_projection", None)
        before = max(peak(model.embedding, run), peak(narrow, run), peak(model.per_layer, run))
        busiest = max(head, stream + making if making else 0, before, *(peak(block, run) for block in blocks))
        vectors = 0 if model.per_layer is None else PerLayerEmbeddingMemory(model.per_layer).kept(run)
        tables += peak(model.relative, run)
        sides = any(branch.side is not None for block in blocks for branch in block.branches)
        entered = run.rows * model.d_model * run.width if sides else 0
        return tables + stream + vectors + entered + self._lent(blocks, run) + busiest

    def _lent(self, blocks: tuple[Block, ...], run: Pass) -> int:
        """Returns the bytes of keys and values that stay allocated for later layers."""
        parts = [part for block in blocks for _, part in walk(block)]
        lenders = {part.kv_name: part for part in parts if isinstance(part, Attention) and part.kv_name is not None}
        numbers = sum(part.n_kv_heads * (part.d_head + part.value_width) for part in lenders.values())
        numbers += sum(part.d_output for part in parts if isinstance(part, DeltaTimeMixing) and part.value_name)
        return run.rows * numbers * run.width

    def _tables(self, blocks: tuple[Block, ...], run: Pass) -> tuple[int, int]:
        """Returns the bytes that layers share for the whole pass, and the peak of building a mask."""
        parts = [(part, seen) for block in blocks for _, part, seen in runs(block, run)]
        rotary = {(part, seen) for part, seen in parts if isinstance(part, Rotary)}
        masks = {(mask[0], seen): mask[1:] for part, seen in parts if (mask := memory(part).mask_peak(seen))}
        kept = run.tokens * 8 + sum(peak(*one) for one in rotary) + sum(kept for kept, _ in masks.values())
        return kept, max((made for _, made in masks.values()), default=0)


def peak(part: Part | None, run: Pass | None) -> int:
    """Returns the peak bytes of a part that may be absent, or may not run."""
    return 0 if part is None or run is None else memory(part).peak_bytes(run)
