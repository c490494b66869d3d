"""What Mamba-2 saves and needs, chunk by chunk."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, Width, memory, memory_of
from asbuilt.spec import mamba2 as spec
from asbuilt.spec.part import Pass


@memory_of(spec.Mamba2)
class Mamba2Memory(MappedMemory[spec.Mamba2]):
    """Memory of `kernels.mamba2`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the input map's result (beside what the convolution saves), x, b, c, steps, chunks and states."""
        part = self.part
        inner, steps, shared = (run.rows * n for n in (part.d_inner, part.n_heads, part.n_groups * part.d_state))
        limited = part.dt_min > 0 or part.dt_max is not None
        cast = part.n_heads if run.width < 4 else 0
        wide = {
            "steps before": steps,
            "steps": steps,
            "steps before limits": steps if limited else 0,
            "decay": 2 * part.n_heads,
            "d": cast,
            "x": inner,
            "x times steps": inner,
            "b": shared,
            "c": shared,
            **self._chunks_save(run),
            "y": inner,
        }
        rest = inner + steps
        narrow = {"gate and steps": rest, "scales": sum(part.widths) if part.scales else 0, "mixed": inner}
        first = min(run.tokens, spec.CHUNK)
        return (
            Saved(name="input", size=run.rows * part.d_model),
            *_saved(narrow, "activation"),
            *_saved(wide, "wide"),
            Saved(name="future", size=first * first, width="bool", divided="none"),
            *self.maps_keep(run),
        )

    def _chunks_save(self, run: Pass) -> dict[str, int]:
        """Returns the numbers that the chunks save: scores, decays and their products, and what states take part in."""
        part, chunks = self.part, self.part.chunks(run)
        heads, groups = run.batch * part.n_heads, run.batch * part.n_groups
        pairs = sum(n * size * size for size, n in chunks)
        n_chunks = sum(n for _, n in chunks)
        read, updating = part.n_read(run), run.tokens - chunks[-1][0]
        held = n_chunks if run.past else n_chunks - 1
        return {
            "scores": groups * pairs,
            "decays": heads * pairs,
            "mixing": heads * pairs,
            "read": heads * read * part.d_head,
            "decays from start": heads * read,
            "decays to end": heads * updating,
            "moved": heads * updating * part.d_head,
            "states": heads * part.d_head * part.d_state * held,
            "decays of states": heads * max(0, held - 1),
        }

    def recomputes(self) -> tuple[str, ...]:
        """What follows elementwise from other saved tensors, and the scores from b and c."""
        return (
            "steps",
            "steps before limits",
            "x times steps",
            "scores",
            "decays",
            "mixing",
            "decays from start",
            "decays to end",
            "moved",
            "decays of states",
            "mixed",
        )

    def peak_bytes(self, run: Pass) -> int:
        """The input map's result, beside the convolution; or beside x, b, c and the chunks; or beside the norm's."""
        part, wide = self.part, max(4, run.width)
        inner, shared = run.rows * part.d_inner, run.rows * part.n_groups * part.d_state
        projected, mixed = run.rows * sum(part.widths) * run.width, run.rows * part.channels * run.width
        steps = run.rows * part.n_heads * wide
        held = projected + steps
        convolving = held + memory(part.conv).peak_bytes(run)
        copying = mixed + (inner + 2 * shared) * wide
        need = chunks_need(run, part.n_heads, part.n_groups, part.d_state, part.d_head)
        chunks = max((2 * shared + need) * wide, copying)
        scanning = held + steps + chunks
        norming = held + 2 * inner * wide + (inner * run.width if run.width < wide else 0)
        out = held + run.rows * (part.d_inner + part.d_model) * run.width
        scaled = 2 * projected if part.scales else 0
        return max(convolving, scanning, norming, out, scaled) + self.peak_beside(run)


def chunks_need(run: Pass, n_heads: int, n_groups: int, d_state: int, d_head: int) -> int:
    """Returns the peak in numbers beside b and c: in the last full chunk, or when joining results.

    A chunk has x twice, earlier results, scores and decays; reading has a state, two results and what is read;
    updating has states three times.
    """
    size = min(run.tokens, spec.CHUNK)
    heads, groups = run.batch * n_heads, run.batch * n_groups
    inner, before = run.tokens * heads * d_head, max(0, run.tokens - size) * heads * d_head
    pairs, tokens = heads * size * size, heads * size * d_head
    within = max(pairs + groups * size * size, pairs + tokens)
    if not run.past and run.tokens == size:
        return 2 * inner + max(within, inner)
    state = heads * d_head * d_state
    chunk = before + max(2 * state + tokens + within, 3 * state + 3 * tokens)
    return 2 * inner + max(chunk, 2 * inner + 2 * state + 2 * tokens)


def _saved(sizes: dict[str, int], width: Width) -> tuple[Saved, ...]:
    return tuple(Saved(name=name, size=size, width=width, divided="width") for name, size in sizes.items())
