"""What attention to the last tokens and to entries of earlier blocks saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.compressed import CompressedAttention, Compressor, EntryIndexer
from asbuilt.spec.indexer import QUERIES
from asbuilt.spec.part import Pass


@memory_of(Compressor)
class CompressorMemory(MappedMemory[Compressor]):
    """Memory of `kernels.compressed`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input; values and the shares of the tokens of full blocks; RoPE tables of their positions."""
        part = self.part
        count = part.entries(run)
        common = (Saved(name="input", size=run.rows * part.d_model), *self.maps_keep(run))
        if not count:
            return common
        each = run.batch * count * part.open_tokens * part.d_head
        values = each if part.overlap else run.rows * 2 * part.width
        kept = [
            Saved(name="values", size=values, divided="none"),
            Saved(name="shares", size=each, width="wide", divided="none"),
        ]
        if run.width < 4:
            kept.append(Saved(name="shares cast", size=each, divided="none"))
        if part.overlap:
            kept.append(Saved(name="start", size=count * part.open_tokens, width="bool", divided="none"))
        if part.positions is not None:
            tables = 2 * count * part.positions.d_rotary
            kept.append(Saved(name=f"{part.positions} {part.ratio}", size=tables, shared=True, divided="none"))
        return (*common, *kept)

    def recomputes(self) -> tuple[str, ...]:
        """Nothing: shares would need products with weights."""
        return ()

    def peak_bytes(self, run: Pass) -> int:
        """kv and gate, again in one tensor, and gates, shares and values of full blocks."""
        part = self.part
        count = part.entries(run) - run.past // part.ratio
        each = run.batch * count * part.open_tokens * part.d_head
        both = 2 * run.rows * part.width * run.width
        return 2 * both + each * (3 * run.width + max(4, run.width)) + self.peak_beside(run)


@memory_of(EntryIndexer)
class EntryIndexerMemory(MappedMemory[EntryIndexer]):
    """Memory of choosing entries; it saves nothing, since it has no gradient."""

    def peak_bytes(self, run: Pass) -> int:
        """Its compressor; or queries, and scores in float32; or finding the largest."""
        part = self.part
        compressing = memory(part.compressor).peak_bytes(run)
        if not part.chooses(run):
            return compressing + self.peak_beside(run)
        wide, seen = max(4, run.width), part.compressor.entries(run)
        pairs, queries = run.rows * seen, run.rows * part.n_heads * part.d_head * run.width
        block = run.batch * min(run.tokens, QUERIES) * part.n_heads * (seen + part.d_head) * wide
        finding = pairs * (wide + 8 + 4)
        return max(compressing, 4 * queries, queries + block + pairs * wide, finding) + self.peak_beside(run)


@memory_of(CompressedAttention)
class CompressedAttentionMemory(MappedMemory[CompressedAttention]):
    """Memory of the reference kernel over keys and entries."""

    def of_heads(self) -> tuple[str, ...]:
        """The norm of queries."""
        return ("head_norm",)

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """The compressor reads the stream too."""
        return (("compressor", ""),) if self.part.compressor is not None else ()

    def recomputes(self) -> tuple[str, ...]:
        """Tensors as large as the scores."""
        return ("mask", "probabilities", "probabilities cast")

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The maps' inputs, q, keys, the mask, the probabilities, and each head's output before its group's map."""
        part = self.part
        heads, keys = run.rows * part.n_heads, part.recent(run) + part.entries(run)
        scores = heads * keys
        kept = [
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="q latent", size=run.rows * part.q_rank),
            Saved(name="q", size=heads * part.d_head, divided="width"),
            Saved(name="keys", size=run.batch * keys * part.d_head, divided="none"),
            Saved(name="mixed", size=heads * part.d_head, divided="width"),
            Saved(name="grouped", size=run.rows * part.groups * part.o_rank, divided="width"),
            Saved(name="probabilities", size=scores + heads, width="wide", divided="width"),
        ]
        if run.width < 4:
            kept.append(Saved(name="probabilities cast", size=scores, divided="width"))
        if run.tokens > 1:
            kept.append(Saved(name="mask", size=self._masked(run), width="bool", divided="none"))
        if part.positions is not None:
            back = run.tokens * part.positions.d_rotary
            kept.append(Saved(name=f"{part.positions} back", size=back, shared=True, divided="none"))
        return (*kept, *self.maps_keep(run))

    def _masked(self, run: Pass) -> int:
        """Returns the size of the mask, which each sequence has its own of if entries are chosen."""
        part = self.part
        chosen = part.indexer is not None and part.indexer.chooses(run)
        return run.tokens * (part.recent(run) + part.entries(run)) * (run.batch if chosen else 1)

    def mask_peak(self, run: Pass) -> tuple[str, int, int] | None:
        """Returns the mask of the window, which layers share; those with entries are their layers' own."""
        if run.tokens == 1:
            return None
        pairs = run.tokens * self.part.recent(run)
        return f"window {self.part.window}", pairs, 9 * pairs

    def peak_bytes(self, run: Pass) -> int:
        """Queries, normalised and with RoPE; keys and entries being made; scores; or the output of heads and groups."""
        part = self.part
        heads, keys = run.rows * part.n_heads, part.recent(run) + part.entries(run)
        query, scores = heads * part.d_head * run.width, heads * keys
        own = run.rows * (part.q_rank + part.d_head) * run.width + run.batch * keys * part.d_head * run.width
        inner = [memory(one).peak_bytes(run) for one in (part.compressor, part.indexer) if one is not None]
        masked = 2 * self._masked(run) if run.tokens > 1 else 0
        softmax = scores * (run.width + max(run.width, 2 * 4 if run.width < 4 else 0)) + query
        scoring = max(2 * scores * run.width + masked, softmax)
        out = 2 * query + run.rows * (2 * part.groups * part.o_rank + part.d_model) * run.width
        return own + max(4 * query, query + max((scoring, *inner)), out) + self.peak_beside(run)
