"""What adaptive embeddings and heads save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.adaptive import AdaptiveEmbedding, AdaptiveHead, ClusterHead, TokenCluster
from asbuilt.spec.part import Pass


@memory_of(TokenCluster)
class TokenClusterMemory(MappedMemory[TokenCluster]):
    """Memory of a lookup in one cluster, and of the map after it."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Each token's place in the table, whether it is in another cluster, and its row."""
        return (
            Saved(name="places", size=run.rows, width="int64"),
            Saved(name="outside", size=run.rows, width="bool"),
            Saved(name="rows", size=run.rows * self.part.d_table),
            *self.maps_keep(run),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The rows, as looked up and with zeros; or their product."""
        part, places = self.part, run.rows * (2 * 8 + 1)
        rows = run.rows * part.d_table * run.width
        return places + rows + max(rows, run.rows * part.d_model * run.width + self.peak_beside(run))


@memory_of(AdaptiveEmbedding)
class AdaptiveEmbeddingMemory(Memory[AdaptiveEmbedding]):
    """Memory of the sum of clusters."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The scale, if any."""
        return () if self.part.scale == 1.0 else (Saved(name="scale", size=1, divided="none"),)

    def peak_bytes(self, run: Pass) -> int:
        """The sum so far beside the next cluster, or beside its result and the new sum."""
        part, stream = self.part, run.rows * self.part.d_model * run.width
        making = max((stream if i else 0) + memory(one).peak_bytes(run) for i, one in enumerate(part.clusters))
        sums = 3 if len(part.clusters) > 1 else 1 if part.scale == 1.0 else 2
        return max(making, sums * stream)


@memory_of(ClusterHead)
class ClusterHeadMemory(MappedMemory[ClusterHead]):
    """Memory of a cluster's logits."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, in both widths, and the log-probabilities."""
        part = self.part
        return (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="narrow", size=run.rows * part.d_table),
            Saved(name="log-probabilities", size=self._classes(run), width="wide", divided="width"),
            *self.maps_keep(run),
        )

    def _classes(self, run: Pass) -> int:
        return run.rows * (self.part.n_vocab + self.part.n_clusters)

    def peak_bytes(self, run: Pass) -> int:
        """The narrow input, and the logits, again beside those of other clusters, or in float32 for the softmax."""
        part, wide = self.part, max(4, run.width)
        logits = self._classes(run) * run.width
        cast = self._classes(run) * wide if run.width < wide else 0
        narrow = run.rows * part.d_table * run.width
        made = max(narrow + logits * (2 if part.n_clusters else 1), logits + cast + self._classes(run) * wide)
        return made + self.peak_beside(run)


@memory_of(AdaptiveHead)
class AdaptiveHeadMemory(Memory[AdaptiveHead]):
    """Memory of the log-probabilities of all tokens."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """All clusters read the stream."""
        return tuple((f"clusters.{i}", "clusters.0") for i in range(1, len(self.part.clusters)))

    def peak_bytes(self, run: Pass) -> int:
        """The log-probabilities so far beside the next cluster's, or all of them twice when they are joined."""
        part, wide = self.part, max(4, run.width)
        first = run.rows * (part.clusters[0].n_vocab + part.clusters[0].n_clusters) * wide
        kept = first + (run.rows * part.clusters[0].n_vocab * run.width if run.width < wide else 0)
        most = memory(part.clusters[0]).peak_bytes(run)
        for one in part.clusters[1:]:
            sums = run.rows * one.n_vocab * (2 * wide + run.width)
            most = max(most, kept + max(memory(one).peak_bytes(run), sums))
            kept += run.rows * one.n_vocab * run.width
        return max(most, kept + run.rows * part.n_vocab * run.width)
