"""What patches, towers and projectors save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.vision import (
    Contrast,
    ConvolvedProjector,
    MLPProjector,
    PatchEmbedding,
    PooledProjector,
    Projection,
    Vision,
)


@memory_of(PatchEmbedding)
class PatchEmbeddingMemory(Memory[PatchEmbedding]):
    """Memory of a convolution over patches."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The patches."""
        part = self.part
        return (Saved(name="input", size=run.batch * part.n_patches * part.d_patch),)

    def peak_bytes(self, run: Pass) -> int:
        """The patches and their embeddings, or these and a copy with the class token and registers."""
        part = self.part
        made = run.batch * part.n_patches * part.d_model
        beside = run.batch * part.n_tokens * part.d_model if part.class_token != "none" else 0
        return run.width * (made + max(run.batch * part.n_patches * part.d_patch, beside))


@memory_of(Projection)
class ProjectionMemory(Memory[Projection]):
    """Memory of one product, and of finding its token."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, and its position."""
        part = self.part
        read = Saved(name="input", size=run.rows * part.d_model)
        found = Saved(name="places", size=2 * run.rows, width="int64")
        return (read,) if part.reads in ("first", "last") else (read, found)

    def peak_bytes(self, run: Pass) -> int:
        """The result."""
        return run.rows * self.part.d_out * run.width


@memory_of(MLPProjector)
class MLPProjectorMemory(Memory[MLPProjector]):
    """Memory of linear maps with activations between them."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Every map's input, and the activation's, except for relu, which saves its output."""
        part = self.part
        rows, between = self._rows(run), part.widths[1:-1]
        before = (
            ()
            if part.activation == "relu"
            else tuple(
                Saved(name=f"activation {i}", size=rows * width) for i, width in enumerate(between) if i >= part.merging
            )
        )
        hidden = tuple(Saved(name=f"hidden {i}", size=rows * width) for i, width in enumerate(between))
        return (Saved(name="input", size=rows * part.widths[0]), *before, *hidden)

    def _rows(self, run: Pass) -> int:
        return run.batch * self.part.n_tokens(run.tokens)

    def peak_bytes(self, run: Pass) -> int:
        """The two widest consecutive tensors."""
        part = self.part
        pairs = zip(part.widths, part.widths[1:], strict=False)
        maps = self._rows(run) * run.width * max(max(a, b) + b for a, b in pairs)
        if part.post_norm is not None:
            made = self._rows(run) * part.d_out * run.width
            maps = max(maps, made + memory(part.post_norm).peak_bytes(part.child_run("post_norm", run)))
        if part.first is not None:
            made = run.batch * run.tokens * part.d_patch * run.width
            return max(memory(part.first).peak_bytes(run), made + self._after(run, maps))
        return self._after(run, maps)

    def _after(self, run: Pass, maps: int) -> int:
        """Returns the peak of norm and maps."""
        part = self.part
        if part.norm is None:
            return maps + (self._rows(run) * part.widths[0] * run.width if part.first is not None else 0)
        normed = self._rows(run) * part.widths[0] * run.width
        return max(normed + memory(part.norm).peak_bytes(part.child_run("norm", run)), normed + maps)


@memory_of(PooledProjector)
class PooledProjectorMemory(Memory[PooledProjector]):
    """Memory of a mean, a norm and a product."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The normalised means, and the factor of standardised ones."""
        part = self.part
        means = Saved(name="input", size=run.batch * part.n_tokens(run.tokens) * part.d_in)
        return (means, Saved(name="factor", size=part.d_in, width="wide")) if part.standardised else (means,)

    def peak_bytes(self, run: Pass) -> int:
        """The normalised means, and the result."""
        part = self.part
        rows = run.batch * part.n_tokens(run.tokens)
        norming = memory(part.norm).peak_bytes(part.child_run("norm", run))
        return rows * run.width * (2 * part.d_in + part.d_out) + norming


@memory_of(ConvolvedProjector)
class ConvolvedProjectorMemory(Memory[ConvolvedProjector]):
    """Memory of convolutions, as products of nine patches each, and of the product after them."""

    def _sizes(self, run: Pass) -> list[int]:
        """Returns the numbers before and after each convolution."""
        part = self.part
        return [run.batch * side**2 * width for side, width in zip(part.sides, part.widths, strict=True)]

    def _patches(self, run: Pass) -> list[int]:
        """Returns the numbers that each convolution multiplies: nine patches for one of its results."""
        part = self.part
        return [run.batch * side**2 * 9 * width for side, width in zip(part.sides[1:], part.widths, strict=False)]

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The patches of each convolution, and the input of the last product."""
        patches = (Saved(name=f"patches {i}", size=size) for i, size in enumerate(self._patches(run)))
        return (*patches, Saved(name="convolved", size=self._sizes(run)[-1]))

    def peak_bytes(self, run: Pass) -> int:
        """A convolution's patches beside its input with edges, or its result; from the second on, its input too."""
        part, sizes = self.part, self._sizes(run)
        most = 0
        for i, patches in enumerate(self._patches(run)):
            edged = run.batch * (part.sides[i] + 2) ** 2 * part.widths[i]
            most = max(most, (sizes[i] if i else 0) + patches + max(edged, sizes[i + 1]))
        return max(most, sizes[-1] + run.batch * part.sides[-1] ** 2 * part.d_out) * run.width


@memory_of(Vision)
class VisionMemory(Memory[Vision]):
    """Memory of a tower and its projector."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Which tokens of the text are placeholders."""
        return (Saved(name="places", size=run.batch // run.images * run.tokens, width="bool"),)

    def peak_bytes(self, run: Pass) -> int:
        """The tower; or the projector beside the selected tokens, twice if the class token was dropped."""
        part = self.part
        selected = run.batch * part.n_selected * part.tower.d_model * run.width
        projected = memory(part.projector).peak_bytes(part.child_run("projector", run))
        return max(memory(part.tower).peak_bytes(part.child_run("tower", run)), 2 * selected + projected)


@memory_of(Contrast)
class ContrastMemory(Memory[Contrast]):
    """Memory of a tower, and of comparing its embeddings with those of texts."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """All embeddings, their reciprocal lengths, the normalised embeddings, the cosines and the scale."""
        part = self.part
        images, texts = run.batch, run.batch // run.images
        sizes = {
            "images": images * part.d_shared,
            "texts": texts * part.d_shared,
            "lengths": images + texts,
            "normed": (images + texts) * part.d_shared,
            "cosines": images * texts,
            "factor": 1,
        }
        return tuple(Saved(name=name, size=size) for name, size in sizes.items())

    def peak_bytes(self, run: Pass) -> int:
        """The tower; or both kinds of embeddings, normalised."""

        part = self.part
        made = 3 * (run.batch + run.batch // run.images) * part.d_shared * run.width
        return max(memory(part.tower).peak_bytes(part.child_run("tower", run)), made)
