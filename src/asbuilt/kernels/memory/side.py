"""What transformers beside the stream save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.part import Part, Pass
from asbuilt.spec.side import SharedTransformer, SideTransformer


@memory_of(SharedTransformer)
class SharedTransformerMemory(Memory[SharedTransformer]):
    """Memory of one use, whether the weights are its own or another's."""

    def recomputes(self) -> tuple[str, ...]:
        """What the norms give, from what they save."""
        part = self.part
        names = (("attention", part.norm), ("ffn", part.ffn_norm))
        return tuple(f"{name}:input" for name, norm in names if norm is not None)

    def attending(self, run: Pass) -> int:
        """Returns the peak up to the feed-forward's input: the norms, or attention beside what it reads."""
        part, stream = self.part, run.rows * self.part.d_model * run.width
        after = 2 * stream + memory(part.attention).peak_bytes(run)
        return max(2 * stream + _peak(part.norm, run), after, stream + _peak(part.ffn_norm, run))

    def peak_bytes(self, run: Pass) -> int:
        """Attention, or the feed-forward beside its input."""
        stream = run.rows * self.part.d_model * run.width
        return max(self.attending(run), stream + memory(self.part.ffn).peak_bytes(run))


@memory_of(SideTransformer)
class SideTransformerMemory(MappedMemory[SideTransformer]):
    """Memory of the maps of one depth, and of what they stand beside."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The inputs of project and of the second low-rank maps; the first read what is saved beside them."""
        part, names = self.part, ()
        if part.rank is not None:
            names = (("low-rank", part.rank),)
        if part.attention_rank is not None:
            names = (*names, *((f"low-rank {name}", part.attention_rank) for name in part.shared.attention.inward))
        low = (Saved(name=name, size=run.rows * rank) for name, rank in names)
        return (Saved(name="transformed", size=run.rows * part.d_model), *low, *self.maps_keep(run))

    def peak_bytes(self, run: Pass) -> int:
        """The shared transformer's; with low-rank maps gate and up, or q, k and v, beside what is added to them."""
        part, shared = self.part, SharedTransformerMemory(self.part.shared)
        row, attention = run.rows * run.width, part.shared.attention
        beside = 0 if part.rank is None else row * (part.d_model + 4 * part.shared.ffn.d_ff + part.rank)
        heads = attention.d_query + attention.n_kv_heads * (attention.d_head + attention.value_width)
        also = 0 if part.attention_rank is None else row * (part.d_model + attention.input_width + 3 * heads)
        return max(shared.peak_bytes(run), max(beside, also) + self.peak_beside(run), 2 * row * part.d_model)


def _peak(part: Part | None, run: Pass) -> int:
    return 0 if part is None else memory(part).peak_bytes(run)
