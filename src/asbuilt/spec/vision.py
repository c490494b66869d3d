"""Vision: images divided into patches, a tower over them, and how its output is combined with text.

ViT: Dosovitskiy et al. 2020 (arXiv 2010.11929). A tower is an `ImageEncoder`. Its output replaces placeholder tokens in
a text (LLaVA, Liu et al. 2023, arXiv 2304.08485), or is compared with text embeddings (CLIP, Radford et al. 2021, arXiv
2103.00020).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from asbuilt.spec.attention_pooling import AttentionPooling
from asbuilt.spec.feedforward import ACTIVATIONS, Activation
from asbuilt.spec.linear import Linear, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    LARGEST_SIZE,
    Gives,
    Part,
    Pass,
    Product,
    Weight,
    require,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
)

if TYPE_CHECKING:
    from asbuilt.spec.image_encoder import ImageEncoder

ClassToken = Literal["none", "first", "last"]
CLASS_TOKENS: tuple[ClassToken, ...] = ("none", "first", "last")
Reads = Literal["first", "last", "end", "highest"]
READS: tuple[Reads, ...] = ("first", "last", "end", "highest")
# Convolutions of a projector, each of which doubles the width.
MOST_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class PatchEmbedding(Part):
    """W x + b of each square patch x of a square image, row by row; a learned class token before or after them.

    Learned registers, which hold nothing of the image, may follow a class token before the patches (Darcet et al. 2023,
    arXiv 2309.16588). W is stored as a convolution whose stride is its width; pixels beyond the last whole patch
    are ignored.
    """

    kind = "embedding"
    any_size: ClassVar[bool] = False
    tiled: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    image_size: int
    """Pixels per side of the image."""
    patch_size: int
    """Pixels per side of a patch."""
    channels: int = 3
    """Numbers per pixel."""
    d_model: int
    """Width of the residual stream."""
    bias: bool = False
    """Whether there is a bias."""
    centred: bool = False
    """Whether pixels, from 0 to 1, are mapped to -1 to 1 first."""
    class_token: ClassToken = "none"
    """Position of the learned class token: before the patches, after them, or none."""
    n_registers: int = 0
    """Learned register tokens between a class token and the patches."""
    mask_token: bool = False
    """Whether a token that stands for masked patches in pre-training is stored; nothing here reads it."""

    def __post_init__(self) -> None:
        require_sizes(self, "image_size", "patch_size", "channels", "d_model")
        require(self, "patch_size", self.patch_size <= self.image_size, f"at most image_size = {self.image_size}")
        require_flags(self, "bias", "centred", "mask_token")
        require_choice(self, "class_token", CLASS_TOKENS)
        whole = type(self.n_registers) is int and 0 <= self.n_registers <= LARGEST_SIZE
        require(self, "n_registers", whole, "a whole number of at least 0")
        first = self.class_token == "first"
        require(self, "n_registers", first or self.n_registers == 0, "0, unless the class token is first")

    @property
    def n_side(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def n_patches(self) -> int:
        """Patches per image."""
        return self.n_side**2

    @property
    def n_tokens(self) -> int:
        """Patches, the class token and registers."""
        return self.n_patches + self.n_added

    @property
    def n_added(self) -> int:
        """Tokens that are not patches: the class token and registers."""
        return (self.class_token != "none") + self.n_registers

    @property
    def d_patch(self) -> int:
        """Numbers per patch."""
        return self.channels * self.patch_size**2

    def holds(self) -> dict[str, Weight]:
        """W (d_model, channels, patch_size, patch_size), bias, class token, registers and the token of masks."""
        shape = (self.d_model, self.channels, self.patch_size, self.patch_size)
        vector = Weight(shape=(self.d_model,), role="bias")
        bias = {"bias": vector} if self.bias else {}
        return (
            {"weight": Weight(shape=shape, role="matrix")}
            | bias
            | ({"class_token": vector} if self.class_token != "none" else {})
            | ({"registers": Weight(shape=(self.n_registers, self.d_model), role="bias")} if self.n_registers else {})
            | ({"mask_token": replace(vector, frozen=True)} if self.mask_token else {})
        )

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product for all patches of all images."""
        rows = run.batch * self.n_patches
        return (Product(name="patches", a=rows, b=self.d_patch, c=self.d_model, weight="weight", one_gradient=True),)


@dataclass(frozen=True, kw_only=True)
class Projection(Part):
    """W x + b of one token per sequence, as the sequence's embedding.

    It `reads` the `first` token, the `last`, the first one with the id `end`, or the one with the `highest` id.
    """

    kind = "projector"
    gives: ClassVar[Gives] = "vector"
    per_token: ClassVar[bool] = False
    n_scores: ClassVar[int] = 0
    d_model: int
    """Width of the residual stream."""
    d_out: int
    """Width of the embedding."""
    bias: bool = False
    """Whether there is a bias b."""
    reads: Reads = "first"
    """The token that is read: the `first`, the `last`, the first `end`, or the one with the `highest` id."""
    end: int | None = None
    """Id of the token that is read, for `end`."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_out")
        require_flags(self, "bias")
        require_choice(self, "reads", READS)
        number = isinstance(self.end, int) and not isinstance(self.end, bool) and 0 <= self.end <= LARGEST_SIZE
        require(self, "end", number if self.reads == "end" else self.end is None, "a token id, to read `end`")

    def holds(self) -> dict[str, Weight]:
        """W (d_out, d_model) and, if enabled, a bias."""
        bias = {"bias": Weight(shape=(self.d_out,), role="bias")} if self.bias else {}
        return {"weight": Weight(shape=(self.d_out, self.d_model), role="matrix")} | bias

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product."""
        return (Product(name="projection", a=run.rows, b=self.d_model, c=self.d_out, weight="weight"),)


@dataclass(frozen=True, kw_only=True)
class MLPProjector(Mapped):
    """A sequence of linear maps from widths[0] to widths[-1], with the activation between them.

    Before the first one, squares of `merge` x `merge` patches, row by row, or `stack` consecutive vectors are
    concatenated to one vector each. A `norm` is of patches, or of what they are merged to if it is that wide, and a
    `post_norm` of the output. Before all that each patch passes through the maps of `first`, if given. Of every `every`
    vectors only the first is read.
    """

    kind = "projector"
    widths: tuple[int, ...]
    """Widths of input, hidden layers and output."""
    activation: Activation
    """Activation between the maps."""
    bias: bool = False
    """Whether the maps have biases."""
    merge: int = 1
    """Patches per side that are merged to one vector first."""
    stack: int = 1
    """Consecutive vectors that are concatenated to one first."""
    merging: bool = False
    """Whether the first map only merges: it has no bias, and no activation after it."""
    norm: Norm | None = None
    """Norm of the patches before they are merged, or of the merged vectors, depending on its width."""
    first: MLPProjector | None = None
    """Maps of each patch, before all others; None for none."""
    post_norm: Norm | None = None
    """Norm of the output."""
    every: int = 1
    """Consecutive vectors of which the first alone is read."""

    def __post_init__(self) -> None:
        sizes = all(isinstance(w, int) and not isinstance(w, bool) and 1 <= w <= LARGEST_SIZE for w in self.widths)
        require(self, "widths", len(tuple(self.widths)) > 1 and sizes, "two or more whole numbers from 1 to 2^31-1")
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias", "merging")
        require(self, "merging", len(tuple(self.widths)) > 2 or not self.merging, "false for one map")
        require_sizes(self, "merge", "stack", "every")
        require(self, "every", self.every == 1 or self.joined == 1, "1 beside vectors that are concatenated")
        first = self.first is None or self.first.every == 1
        require(self, "first", first, "maps with every = 1")
        after = self.post_norm is None or self.post_norm.d == self.d_out
        require(self, "post_norm", after, f"a norm of {self.d_out} numbers")
        whole = self.widths[0] % self.merge**2 == 0
        require(self, "merge", whole, f"a number whose square divides widths[0] = {self.widths[0]}")
        whole = self.widths[0] % self.stack == 0
        require(self, "stack", whole, f"a number that divides widths[0] = {self.widths[0]}")
        require(self, "stack", self.stack == 1 or self.merge == 1, "1 beside merged squares")
        normed = self.norm is None or self.norm.d in (self.d_patch, self.widths[0])
        require(self, "norm", normed, f"a norm of {self.d_patch} or {self.widths[0]} numbers")
        if self.first is not None:
            plain = isinstance(self.first, MLPProjector) and self.first.joined == 1 and self.first.first is None
            allowed = f"maps of single patches to {self.d_patch} numbers, or none"
            require(self, "first", plain and self.first.d_out == self.d_patch, allowed)

    @property
    def norms_patches(self) -> bool:
        """Whether patches are normed before they are merged."""
        return self.norm is not None and self.norm.d == self.d_patch

    @property
    def d_in(self) -> int:
        """Width of a patch's vector."""
        return self.d_patch if self.first is None else self.first.d_in

    @property
    def d_patch(self) -> int:
        """Width of a patch's vector when patches are merged."""
        return self.widths[0] // self.joined

    @property
    def joined(self) -> int:
        """Vectors that become one."""
        return self.merge**2 * self.stack

    @property
    def d_out(self) -> int:
        """Width of the output."""
        return self.widths[-1]

    def n_tokens(self, n_patches: int) -> int:
        """Returns the number of output vectors."""
        return -(-n_patches // self.every) // self.joined

    def left(self, side: int) -> int:
        """Returns how many rows, or columns, of vectors are left of `side` patches."""
        return side // self.merge

    def fits(self, n_patches: int, n_side: int) -> bool:
        """Returns whether `n_patches` patches, `n_side` per side, are a valid input."""
        if self.merge == 1:
            return n_patches % self.stack == 0
        return n_patches == n_side**2 and n_side % self.merge == 0

    def plain_maps(self) -> dict[str, Linear]:
        """One per step, from a width to the next."""
        steps = enumerate(zip(self.widths, self.widths[1:], strict=False))
        return {
            f"layers_{i}": Linear(d_in=inside, d_out=out, bias=self.bias and i >= self.merging, belongs="projector")
            for i, (inside, out) in steps
        }

    def child_run(self, name: str, run: Pass) -> Pass:
        """The maps process the merged squares, the norm those or the patches."""
        patches = name == "first" or (name == "norm" and self.norms_patches)
        if patches:
            return replace(run, tokens=-(-run.tokens // self.every))
        return replace(run, tokens=self.n_tokens(run.tokens))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once."""
        return self.map_products(run, *self.maps)


@dataclass(frozen=True, kw_only=True)
class PooledProjector(Part):
    """W norm(scale * mean of each square of `pool` x `pool` patches); incomplete squares at the edges are ignored.

    Images of any size have whole squares alone; `n_side` is then that of the images whose costs are declared.

    If `standardised`, a stored vector is subtracted before the norm, and another multiplies the rest.
    """

    kind = "projector"
    d_in: int
    """Width of a patch."""
    d_out: int
    """Width of the output."""
    n_side: int
    """Patches per side of the image."""
    pool: int
    """Patches per side of an averaged square."""
    norm: Norm
    """Norm of the means."""
    scale: float = 1.0
    """Factor on the means."""
    standardised: bool = False
    """Whether a stored vector is subtracted from the means, and another multiplies the rest."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_in", "d_out", "n_side", "pool")
        require_number(self, "scale")
        require_flags(self, "standardised")
        require(self, "pool", self.pool <= self.n_side, f"at most n_side = {self.n_side}")
        require(self, "norm", self.norm.d == self.d_in, f"a norm over d_in = {self.d_in}")

    @property
    def merge(self) -> int:
        """Patches per side that become one vector."""
        return self.pool

    def left(self, side: int) -> int:
        """Returns how many rows, or columns, of vectors are left of `side` patches."""
        return side // self.pool

    def n_tokens(self, n_patches: int) -> int:
        """Returns the number of output vectors."""
        return (self.n_side // self.pool) ** 2

    def fits(self, n_patches: int, n_side: int) -> bool:
        """Returns whether `n_patches` patches, `n_side` per side, are a valid input."""
        return n_side == self.n_side and n_patches == n_side**2

    def holds(self) -> dict[str, Weight]:
        """W (d_out, d_in)."""
        return {"weight": Weight(shape=(self.d_out, self.d_in), role="matrix")}

    def buffers(self) -> dict[str, Weight]:
        """What is subtracted and what multiplies, if enabled."""
        vectors = {"shift": 0.0, "factor": 1.0} if self.standardised else {}
        return {name: Weight(shape=(self.d_in,), role="gain", fill=fill) for name, fill in vectors.items()}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product."""
        rows = run.batch * self.n_tokens(run.tokens)
        return (Product(name="projection", a=rows, b=self.d_in, c=self.d_out, weight="weight"),)

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm processes the means."""
        return replace(run, tokens=self.n_tokens(run.tokens))


@dataclass(frozen=True, kw_only=True)
class ConvolvedProjector(Part):
    """W x + b of each patch of what `steps` convolutions leave of an image, each with 3 x 3 patches and a stride of 2.

    Each halves rows and columns, rounding up, and doubles the width. Edges are padded with zeros. Of images of any
    size `n_side` says the patches of those whose costs are declared.
    """

    kind = "projector"
    d_in: int
    """Width of a patch."""
    d_out: int
    """Width of the output."""
    n_side: int
    """Patches per side of the image."""
    steps: int
    """Convolutions."""
    bias: bool = False
    """Whether there is a bias b; convolutions always have one."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_in", "d_out", "n_side", "steps")
        require(self, "steps", self.steps <= MOST_STEPS, f"at most {MOST_STEPS}")
        require_flags(self, "bias")

    @property
    def merge(self) -> int:
        """Patches per side of a square that becomes one vector: convolutions read patches of a grid of any size."""
        return 1

    @property
    def sides(self) -> tuple[int, ...]:
        """Patches per side, first and after each convolution."""
        return self.halved(self.n_side)

    def halved(self, side: int) -> tuple[int, ...]:
        """Returns how many rows, or columns, there are of `side`, first and after each convolution."""
        sides = [side]
        for _ in range(self.steps):
            sides.append(-(-sides[-1] // 2))
        return tuple(sides)

    def left(self, side: int) -> int:
        """Returns how many rows, or columns, of vectors are left of `side` patches."""
        return self.halved(side)[-1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of a patch, first and after each convolution."""
        return tuple(self.d_in * 2**i for i in range(self.steps + 1))

    def n_tokens(self, n_patches: int) -> int:
        """Returns the number of output vectors."""
        return self.sides[-1] ** 2

    def fits(self, n_patches: int, n_side: int) -> bool:
        """Returns whether `n_patches` patches, `n_side` per side, are a valid input."""
        return n_side == self.n_side and n_patches == n_side**2

    def holds(self) -> dict[str, Weight]:
        """A kernel (2d, d, 3, 3) and a bias for each convolution; W (d_out, d_in * 2^steps) and, if enabled, b."""
        held: dict[str, Weight] = {}
        for i, (inside, out) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            held[f"conv_{i}.weight"] = Weight(shape=(out, inside, 3, 3), role="matrix")
            held[f"conv_{i}.bias"] = Weight(shape=(out,), role="bias")
        held["weight"] = Weight(shape=(self.d_out, self.widths[-1]), role="matrix")
        return held | ({"bias": Weight(shape=(self.d_out,), role="bias")} if self.bias else {})

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each convolution as a product of its outputs with the nine patches that they depend on; and W."""
        steps = enumerate(zip(self.sides[1:], self.widths, self.widths[1:], strict=False))
        convolved = (
            Product(name=f"conv_{i}", a=run.batch * side**2, b=9 * inside, c=out, weight=f"conv_{i}.weight")
            for i, (side, inside, out) in steps
        )
        rows = run.batch * self.sides[-1] ** 2
        return (*convolved, Product(name="projection", a=rows, b=self.widths[-1], c=self.d_out, weight="weight"))


Projector = MLPProjector | PooledProjector | ConvolvedProjector


@dataclass(frozen=True, kw_only=True)
class Vision(Part):
    """Images whose projected patches replace `placeholder` tokens in the embedded text.

    The projector reads the stream after `layers` blocks of the tower, or with None the tower's output; the class token
    and registers are dropped unless `keep_class`. Attention within one image is bidirectional with `both_ways`,
    otherwise as elsewhere; with `prefix` it is so within all of a text that comes with images, up to what continues it.
    """

    crosses: ClassVar[bool] = False
    tower: ImageEncoder
    """The image encoder."""
    projector: Projector
    """The projector from its stream to the text's width."""
    placeholder: int
    """Id of the tokens that patches replace."""
    layers: int | None = None
    """Blocks of the tower that run; None for all, including its norm."""
    keep_class: bool = False
    """Whether the class token, and registers after it, are projected too."""
    both_ways: bool = False
    """Whether attention within an image is bidirectional."""
    in_windows: bool = False
    """Whether it is so in layers with a window alone."""
    prefix: bool = False
    """Whether attention is bidirectional within the whole prompt with its images, not within each image alone."""

    def __post_init__(self) -> None:
        embedding = getattr(self.tower, "embedding", None)
        require(self, "tower", isinstance(embedding, PatchEmbedding), "a model with a patch embedding")
        assert isinstance(embedding, PatchEmbedding)
        require(self, "tower", self.tower.head is None, "a model without a head")
        number = isinstance(self.placeholder, int) and not isinstance(self.placeholder, bool)
        require(self, "placeholder", number and self.placeholder >= 0, "a token id")
        n = self.tower.n_layers
        whole = isinstance(self.layers, int) and not isinstance(self.layers, bool)
        require(
            self, "layers", self.layers is None or (whole and 0 <= self.layers <= n), f"a whole number from 0 to {n}"
        )
        require_flags(self, "keep_class", "both_ways", "in_windows", "prefix")
        for name in ("in_windows", "prefix"):
            require(self, name, self.both_ways or not getattr(self, name), "false unless both_ways")
        require(self, "prefix", not (self.prefix and self.in_windows), "false beside in_windows")
        has = embedding.class_token != "none"
        require(self, "keep_class", has or not self.keep_class, "false if the tower has no class token")
        require(self, "tower", not embedding.tiled or self.crosses, "a model without tiles")
        same = self.projector.d_in == self.d_seen
        require(self, "projector", same, f"d_in = {self.d_seen} as in the tower")
        every = getattr(self.projector, "every", 1) == 1 or not (embedding.any_size or self.crosses)
        require(self, "projector", every, "one with every = 1 for images of any size, or that are read across")
        fits = self.projector.fits(self.n_selected, embedding.n_side)
        require(self, "projector", fits, f"one for {self.n_selected} tokens, {embedding.n_side} patches per side")

    @property
    def d_seen(self) -> int:
        """Width of what the projector reads: of the tower."""
        return self.tower.d_model

    @property
    def n_selected(self) -> int:
        """Tokens of the tower that are projected."""
        embedding = self.tower.embedding
        return embedding.n_tokens if self.keep_class else embedding.n_patches

    @property
    def n_tokens(self) -> int:
        """Placeholders per image."""
        return self.projector.n_tokens(self.n_selected)

    @property
    def n_vectors(self) -> int:
        """Vectors per placeholder: the one that replaces it."""
        return 1

    @property
    def n_made(self) -> int:
        """Vectors per image."""
        return self.n_tokens * self.n_vectors

    def child_run(self, name: str, run: Pass) -> Pass:
        """The tower runs to the requested depth; the projector processes the selected tokens."""
        if name == "tower":
            return replace(run, images=0, depth=self.layers)
        return replace(run, images=0, tokens=self.n_selected)


@dataclass(frozen=True, kw_only=True)
class Contrast(Part):
    """exp(scale) * cos(u, v) + b of each image's embedding u, the tower's output, and each text's embedding v.

    With b, Zhai et al. 2023, SigLIP (arXiv 2303.15343): the logit of whether the two belong together.
    """

    tower: ImageEncoder
    """The image encoder, with one embedding per image."""
    bias: bool = False
    """Whether there is a bias b."""

    def __post_init__(self) -> None:
        takes = isinstance(getattr(self.tower, "embedding", None), PatchEmbedding)
        require(self, "tower", takes, "a model with a patch embedding")
        gives = isinstance(self.tower.head, Projection | AttentionPooling)
        require(self, "tower", gives, "a model with a projection or pooling")
        require_flags(self, "bias")

    @property
    def d_shared(self) -> int:
        """Width of the embeddings that are compared."""
        assert isinstance(self.tower.head, Projection | AttentionPooling)
        return self.tower.head.d_out

    def holds(self) -> dict[str, Weight]:
        """The logarithm of the scale, one number, and a bias, if enabled."""
        bias = {"bias": Weight(shape=(), role="bias")} if self.bias else {}
        return {"scale": Weight(shape=(), role="gain")} | bias

    def child_run(self, name: str, run: Pass) -> Pass:
        """The tower processes only the images."""
        return replace(run, images=0)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each image's embedding times each text's."""
        return (Product(name="cosines", a=run.batch, b=self.d_shared, c=run.batch // run.images),)
