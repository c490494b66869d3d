"""What a mixture of experts saves and needs: its router, and the grouped product over rows sorted by expert."""

from __future__ import annotations

from asbuilt.kernels.memory.feedforward import CLAMPED, SMOOTH
from asbuilt.kernels.memory.linear import MappedMemory, of_map
from asbuilt.kernels.memory.registry import Memory, Room, Saved, memory, memory_of
from asbuilt.spec.experts import MixtureOfExperts, Router
from asbuilt.spec.feedforward import MLP, ClampedGate, GatedMLP
from asbuilt.spec.linear import Linear
from asbuilt.spec.part import Pass


@memory_of(Router)
class RouterMemory(Memory[Router]):
    """Memory of routing."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, all scores, the chosen experts, the divisor, and the resulting weights."""
        part = self.part
        picked = run.rows * part.top_k
        softmaxes = 1 if part.nearness is None else part.top_k
        common = (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="scores", size=run.rows * part.n_experts * softmaxes, width="wide"),
            Saved(name="chosen", size=picked, width="int64"),
            Saved(name="weights", size=picked),
        )
        if part.nearness is not None:
            common = (*common, Saved(name="closed", size=run.rows * part.n_experts * softmaxes, width="bool"))
        if part.scoring == "sqrt_softplus":
            common = (*common, Saved(name="logits", size=run.rows * part.n_experts, width="wide"))
        if part.expert_scale:
            common += tuple(Saved(name=name, size=picked, width="wide") for name in ("unscaled", "factors"))
        if not part.renormalise:
            return common
        return (
            *common,
            Saved(name="chosen scores", size=picked, width="wide"),
            Saved(name="sums", size=run.rows, width="wide"),
        )

    def peak_bytes(self, run: Pass) -> int:
        """Logits and scores of all experts, the scores used for the choice, and the chosen ones with their indices."""
        part = self.part
        wide = max(4, run.width)
        choosing = wide * (part.correction + (part.groups is not None))
        normed = 0 if part.norm is None else part.d_model * run.width
        if part.nearness is not None:
            widened = wide if run.width < wide else 0
            each = run.width + widened + 2 * wide + 2  # logits, a softmax and its input, and two masks
            return run.rows * (normed + part.n_experts * each + part.top_k * (2 * wide + 8))
        return run.rows * (normed + part.n_experts * (run.width + wide + choosing) + part.top_k * (wide + 8))


@memory_of(MixtureOfExperts)
class MixtureOfExpertsMemory(MappedMemory[MixtureOfExperts]):
    """Memory of `kernels.grouped`, and of sorting rows by expert and back."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """The router and the shared expert, or their norms, have the same input as this part."""
        part = self.part
        router = "router" if part.router.norm is None else "router.norm"
        shared = "shared" if part.shared_norm is None else "shared_norm"
        return ((router, ""), (shared, ""), *(() if part.norm is None else (("norm", ""),)))

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The sorted rows, the permutation and its inverse, what a feed-forward of this kind saves, and the results.

        If inputs are weighted, the input is saved instead of the results. A shared gate saves both of its factors.
        """
        part = self.part
        rows, stream = run.rows * part.top_k, run.rows * part.d_model
        wide = rows * part.d_ff
        results = Saved(name="results", size=rows * part.d_expert)
        read = Saved(name="input" if part.norm is None else "normed", size=stream)
        latent = (read, Saved(name="latent result", size=run.rows * part.d_expert))
        dropped = () if part.capacity is None else (Saved(name="dropped", size=rows, width="bool"),)
        shared = (Saved(name="openness", size=run.rows), Saved(name="shared result", size=stream))
        return (
            Saved(name="places", size=rows, width="int64"),
            Saved(name="order", size=rows, width="int64"),
            *dropped,
            Saved(name="rows", size=rows * part.d_expert),
            *(Saved(name=name, size=wide, divided="width") for name in self._saved_inside),
            results if part.weighs == "results" else read,
            *(shared if part.shared_gate else ()),
            *(latent if part.d_latent else ()),
            *(tensor for name, one in part.stacks.items() for tensor in of_map(one).keeps(name, rows)),
            *self.maps_keep(run),
        )

    def recomputes(self) -> tuple[str, ...]:
        """The sorted rows, and what follows from the results of an expert's input maps, or from relu's output."""
        part = self.part
        if part.gating == "none" and part.activation == "relu":
            return ("rows",)
        first = ("before", "gate", "up") if part.activation != "relu" else ("activated", "up")
        return ("rows", *(name for name in self._saved_inside if name not in first))

    @property
    def _saved_inside(self) -> tuple[str, ...]:
        """Returns what each expert saves, d_ff numbers per row; for relu its output rather than its input."""
        part = self.part
        if isinstance(part.gating, ClampedGate):
            return CLAMPED
        before = () if part.activation == "relu" else ("before",)
        return (*before, "hidden") if part.gating == "none" else (*before, "activated", "up", "hidden")

    def peak_bytes(self, run: Pass) -> int:
        """The router; or the sorted rows with their products; or the shared expert beside the result.

        gate and up stay allocated during the down projection. The results are put back in order, weighted and summed
        beside the sorted rows. A capacity needs a byte per row and expert, and an int64 running sum computed from
        another int64 tensor.
        """
        part = self.part
        rows, stream = run.rows * part.top_k, run.rows * part.d_model * run.width
        chosen = rows * (24 + run.width)
        between = 5 if isinstance(part.gating, ClampedGate) else 2
        inside = (rows * part.d_expert + between * rows * part.d_ff) * run.width
        outward = (2 * rows * part.d_expert + (1 if part.gating == "none" else 3) * rows * part.d_ff) * run.width
        gathered = 3 * rows * part.d_expert * run.width
        gathered += run.rows * part.d_expert * run.width if part.weighs == "results" else 0
        shared = 0 if part.shared is None else self._shared_peak(part.shared, stream, run)
        counted = 0 if part.capacity is None else chosen + 17 * rows * part.n_experts
        beside = max(of_map(one).peak_beside(run, rows) for one in part.stacks.values())
        latent = 0 if part.d_latent is None else run.rows * part.d_latent * run.width
        latent += stream if part.norm is not None else 0
        routed = chosen + latent + max(inside, outward, gathered, stream + latent) + beside
        if run.kernel == "engine":  # fused experts gather rows as they multiply
            routed = min(routed, chosen + latent + stream + self.workspace(run) + beside)
        return max(memory(part.router).peak_bytes(run), counted, routed, shared)

    def room(self, run: Pass) -> Room | None:
        """Gradients of down's inputs, and of its matrices: as each expert's are computed, and then as one.

        Before these, gradients of the results from those of their weighted sum, twice; after them of the hidden and of
        both factors, when the results and down's input are gone. Forward results are put in order, weighted and summed.
        Selective checkpointing keeps each expert's products, beside which they are joined.
        """
        part = self.part
        if not self._declares_room:
            return None
        rows, stream = run.rows * part.top_k * run.width, run.rows * part.d_model * run.width
        results, wide = rows * part.d_expert, rows * part.d_ff
        stack = part.n_experts * part.d_ff * part.d_expert * run.width
        factors = wide if part.gating == "none" and part.activation != "relu" else 2 * wide
        backward = max(2 * results, wide + stack, 2 * stack - results, factors - results)
        joined = len(part.inward) * wide + results + stream
        return Room(results + stream, backward, results, joined)

    @property
    def _declares_room(self) -> bool:
        """Whether experts are plain feed-forwards whose results alone are weighted and summed."""
        part = self.part
        kinds = (*SMOOTH, "relu") if part.gating == "none" else SMOOTH
        inside = (part.d_latent, part.capacity, part.shared, part.norm, part.post_norm)
        maps = (*part.stacks.values(), *part.maps.values())
        plain = not part.bias and all(isinstance(one, Linear) and not one.clipped for one in maps)
        known = part.gating in ("none", "gated") and part.activation in kinds and part.weighs == "results"
        return plain and known and part.router.norm is None and all(one is None for one in inside)

    def workspace(self, run: Pass) -> int:
        """The two buffers of fused experts: rows at the hidden or the stream's width, and gate and up or results."""
        part = self.part
        rows, both = run.rows * part.top_k, part.d_ff if part.gating == "none" else 2 * part.d_ff
        numbers = rows * (max(part.d_ff, part.d_expert) + max(both, part.d_expert))
        return numbers * run.width

    def _shared_peak(self, shared: MLP | GatedMLP, stream: int, run: Pass) -> int:
        """Returns the bytes of the shared expert, with its normalised input, beside the routed experts' result."""
        normed = stream if self.part.shared_norm is not None else 0
        return stream + normed + memory(shared).peak_bytes(run)
