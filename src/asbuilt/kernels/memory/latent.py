"""What latent attention saves and needs, expanded or absorbed."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.latent import LatentAttention
from asbuilt.spec.part import Pass


@memory_of(LatentAttention)
class LatentAttentionMemory(MappedMemory[LatentAttention]):
    """Memory of the attention kernels with keys and values expanded from latents."""

    @property
    def _width(self) -> int:
        """The single width of the fused kernel, to which q and k or v are padded with zeros."""
        part = self.part
        return max(part.d_head, part.d_value)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The maps' inputs, and expanded q, k, v and attention output at the kernel's width.

        Of the scores the fused kernel saves one log-sum-exp per query, the reference the mask and the probabilities.
        """
        part = self.part
        heads = run.rows * part.n_heads
        q_latent = () if part.q_rank is None else (Saved(name="q latent", size=run.rows * part.q_rank),)
        common = (
            Saved(name="input", size=run.rows * part.d_model),
            *q_latent,
            Saved(name="latent", size=run.rows * part.kv_rank),
            Saved(name="mixed", size=heads * part.d_value, divided="width"),
            *self.maps_keep(run),
        )
        if run.kernel == "reference":
            return common + self._saves_reference(run)
        widths: dict[str, int] = dict.fromkeys(("q", "k", "v"), self._width)
        if self._width > part.d_value:
            widths["mixed and zeros"] = self._width
        kept = (Saved(name=name, size=heads * width, divided="width") for name, width in widths.items())
        masked = run.batch * run.tokens * run.tokens if part.chooses(run) else 0
        mask = (Saved(name="mask", size=masked, divided="none"),) if masked else ()
        if run.documents:  # one for all layers
            mask = (Saved(name="mask of documents", size=run.rows * run.tokens, shared=True, divided="none"),)
        return (*common, *kept, *mask, Saved(name="logsumexp", size=heads, width="wide", divided="width"))

    def _saves_reference(self, run: Pass) -> tuple[Saved, ...]:
        part = self.part
        pairs, heads = run.tokens * run.tokens, run.rows * part.n_heads
        size = run.batch * part.n_heads * pairs
        widths = {"q": part.d_head, "k": part.d_head, "v": part.d_value}
        masked = pairs * (run.batch if part.chooses(run) or run.documents else 1)
        masks = run.tokens > 1 or run.documents
        mask = (Saved(name="mask", size=masked, width="bool", divided="none"),) if masks else ()
        cast = (Saved(name="probabilities cast", size=size, divided="width"),) if run.width < 4 else ()
        kept = (Saved(name=name, size=heads * width, divided="width") for name, width in widths.items())
        return (*kept, *mask, Saved(name="probabilities", size=size, width="wide", divided="width"), *cast)

    def recomputes(self) -> tuple[str, ...]:
        """Tensors as large as the scores, if a kernel saves them; k and v would need products with weights."""
        return ("mask", "probabilities", "probabilities cast")

    def peak_bytes(self, run: Pass) -> int:
        """The peak of computing queries, expanding keys and values, attention, and the result, with latents allocated.

        The down projections' output is one tensor, which stays allocated while latents or keys are views of it.
        """
        part = self.part
        down, query = part.d_latent + (part.q_rank or 0), part.n_heads * part.d_head
        turned = 0 if part.positions is None else part.n_heads * part.d_rope
        normed = 0 if part.q_norm is None else part.q_norm.d
        making = run.rows * (down + query + max(normed, 3 * turned, query + turned if turned else 0)) * run.width
        norming = run.rows * down * run.width + (0 if part.q_norm is None else memory(part.q_norm).peak_bytes(run))
        result = run.rows * (part.n_heads * part.d_value + part.d_model) * run.width
        of_down = down if part.kv_norm is None or part.positions is None else 0
        latents = of_down + (0 if part.kv_norm is None else part.kv_rank) + (part.d_rope if turned else 0)
        kept = run.rows * (query + latents) * run.width
        if part.indexer is not None:
            norming = max(norming, run.rows * (down + normed) * run.width + memory(part.indexer).peak_bytes(run))
        return max(making, norming, kept + max(self._attending(run), result)) + self.peak_beside(run)

    def _attending(self, run: Pass) -> int:
        """Returns the bytes of keys and values, padded tensors, the output, and scores if stored."""
        part = self.part
        heads, seen = run.batch * part.n_heads, run.batch * (run.past + run.tokens) * part.n_heads
        out, absorbs = run.rows * part.n_heads, part.absorbs(run)
        pairs = heads * run.tokens * (part.gathered(run) if absorbs else run.past + run.tokens)
        masks = pairs // heads * (run.batch if part.chooses(run) else 1)
        softmax = pairs * (run.width + max(run.width, 2 * 4 if run.width < 4 else 0))
        if absorbs:
            gathered = run.batch * part.gathered(run) * part.d_latent if part.chooses(run) else 0
            return (out * (2 * part.d_latent + part.kv_rank) + gathered) * run.width + softmax
        made = seen * (part.d_head + part.d_value)
        if run.kernel == "reference":
            expanding = seen * (part.d_head + part.d_nope)
            masking = 2 * pairs * run.width + 2 * masks
            mixing = (2 * pairs + out * part.d_value) * run.width
            return max(expanding * run.width, made * run.width + max(softmax, masking, mixing))
        zeros = masks if part.chooses(run) else 0  # which the library converts to the pass's dtype
        if part.d_value < self._width:
            zeros += seen * self._width
        elif part.d_head < self._width:
            zeros += (seen + out) * self._width
        return (made + zeros + out * self._width) * run.width + out * max(4, run.width)
