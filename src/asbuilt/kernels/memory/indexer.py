"""What choosing keys needs; it saves nothing, since it has no gradient."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import memory, memory_of
from asbuilt.spec.indexer import QUERIES, BlockIndexer, Indexer
from asbuilt.spec.part import Pass


@memory_of(Indexer)
class IndexerMemory(MappedMemory[Indexer]):
    """Memory of `kernels.indexer`."""

    def mask_peak(self, run: Pass) -> tuple[str, int, int] | None:
        """Returns the choice, which stays for the layers that share it, and the mask of past keys."""
        pairs = run.tokens * (run.past + run.tokens)
        return ("choice", (run.batch + 1) * pairs, 0) if self.part.chooses(run) else None

    def peak_bytes(self, run: Pass) -> int:
        """Keys, normalised and with RoPE applied; queries, keys and scores in float32; or finding the largest."""
        part = self.part
        keys = run.rows * part.d_head * run.width
        norming = 0 if part.k_norm is None else keys + memory(part.k_norm).peak_bytes(run)
        making = max(norming, 4 * keys)
        if not part.chooses(run):
            return making + self.peak_beside(run)
        wide, seen = max(4, run.width), run.past + run.tokens
        pairs, queries = run.rows * seen, run.rows * part.n_heads * part.d_head * run.width
        held = keys + run.rows * part.n_heads * run.width
        block = run.batch * min(run.tokens, QUERIES) * part.n_heads * (seen + part.d_head) * wide
        scoring = queries + run.batch * seen * part.d_head * wide + block + pairs * wide
        joining = queries + 2 * pairs * wide if run.tokens > QUERIES else 0
        finding = pairs * (wide + 8 + 4)  # counts in int64 beside scores and masks
        return max(making, held + max(4 * queries, scoring, joining, finding)) + self.peak_beside(run)


@memory_of(BlockIndexer)
class BlockIndexerMemory(MappedMemory[BlockIndexer]):
    """Memory of `kernels.indexer`, where blocks of keys are chosen."""

    def mask_peak(self, run: Pass) -> tuple[str, int, int] | None:
        """Returns the mask of past keys, which all layers that choose share."""
        pairs = run.tokens * (run.past + run.tokens)
        return ("seen", pairs, 9 * pairs) if self.part.chooses(run) else None

    def peak_bytes(self, run: Pass) -> int:
        """Keys, normalised and with RoPE applied; queries, keys and scores in float32; or the choice and its mask."""
        part = self.part
        keys = run.rows * part.d_head * run.width
        if not part.chooses(run):
            return 4 * keys + self.peak_beside(run)
        wide, seen = max(4, run.width), run.past + run.tokens
        blocks = -(-seen // part.block)
        padded, queries = blocks * part.block, run.rows * part.n_heads * part.d_head * run.width
        scores = run.batch * min(run.tokens, QUERIES) * part.n_heads * (seen + padded) * wide
        best = run.rows * part.n_heads * blocks
        scoring = queries + run.batch * seen * part.d_head * wide + scores + best * wide
        finding = best * (wide + 8 + 4) + run.rows * part.n_heads * padded
        return keys + max(4 * keys, 4 * queries, scoring, finding) + self.peak_beside(run)
