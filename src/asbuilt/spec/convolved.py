"""Convolutional networks over the pixels of an image: inverted residuals, and attention over a grid, as in MobileNets.

Sandler et al. 2018 (MobileNetV2, arXiv 1801.04381); Qin et al. 2024 (MobileNetV4, arXiv 2404.10518), sections 3 and 4.
That of Gemma 3n (Google 2025, MobileNet-V5 in timm's published code) ends in a fusion of two resolutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import ClassVar

from asbuilt.spec.linear import Linear, Mapped
from asbuilt.spec.norms import RMSNorm
from asbuilt.spec.part import Part, Pass, Product, Weight, require, require_flags, require_sizes
from asbuilt.spec.vision import PatchEmbedding

MOST_TAPS = 2**6  # pixels per side that one output of a convolution depends on


@dataclass(frozen=True, kw_only=True)
class GridConvolution(Part):
    """norm(W * x + b) over a square grid of vectors x, of which tanh-GELU is taken if it is `activated`.

    An output depends on `kernel` x `kernel` vectors, or with `apart` on their numbers in its own channel. Of every
    `stride` rows and columns one is computed, rounding up. Edges are padded with zeros on both sides, with one row and
    column more below and on the right where their number is odd. A pass counts the vectors that are read.
    """

    kind = "embedding"
    of_pixels: ClassVar[bool] = False
    d_in: int
    """Width of the vectors that are read."""
    d_out: int
    """Width of the output."""
    kernel: int
    """Vectors per side that an output depends on."""
    stride: int = 1
    """Rows, and columns, of which one is computed."""
    apart: bool = False
    """Whether each channel is convolved by itself."""
    bias: bool = False
    """Whether there is a bias b."""
    norm: RMSNorm
    """Norm over the channels of an output."""
    activated: bool = False
    """Whether tanh-GELU follows the norm."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_in", "d_out", "kernel", "stride")
        require(self, "kernel", self.kernel <= MOST_TAPS, f"at most {MOST_TAPS}")
        require_flags(self, "apart", "bias", "activated")
        several = self.d_in == self.d_out and self.kernel > 1
        require(self, "apart", several or not self.apart, "false beside d_out other than d_in, and for single vectors")
        require(self, "stride", self.stride <= self.kernel, f"at most kernel = {self.kernel}: others skip vectors")
        require(self, "norm", isinstance(self.norm, RMSNorm) and self.norm.d == self.d_out, f"of {self.d_out} numbers")

    @property
    def plain(self) -> bool:
        """Whether it is a linear map of each vector."""
        return self.kernel == 1

    def left(self, side: int) -> int:
        """Returns how many rows, and columns, are left of `side`."""
        return -(-side // self.stride)

    def edges(self, side: int) -> tuple[int, int]:
        """Returns the rows of zeros, and columns, before and after `side`."""
        more = max(0, (self.left(side) - 1) * self.stride + self.kernel - side)
        return more // 2, more - more // 2

    def holds(self) -> dict[str, Weight]:
        """W (d_out, d_in, kernel, kernel), or (d_out, 1, kernel, kernel) if `apart`, and b if enabled."""
        shape = (self.d_out, 1 if self.apart else self.d_in, self.kernel, self.kernel)
        bias = {"bias": Weight(shape=(self.d_out,), role="bias")} if self.bias else {}
        return {"weight": Weight(shape=shape, role="matrix")} | bias

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product of each output with what it depends on; of channels `apart` one for each."""
        rows = run.batch * self.left(isqrt(run.tokens)) ** 2
        taps = self.kernel**2 * (1 if self.apart else self.d_in)
        out, n = (1, self.d_out) if self.apart else (self.d_out, 1)
        return (Product(name="taps", a=rows, b=taps, c=out, n=n, weight="weight", one_gradient=self.of_pixels),)

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm processes the outputs."""
        return replace(run, tokens=self.left(isqrt(run.tokens)) ** 2)


@dataclass(frozen=True, kw_only=True)
class PixelConvolution(GridConvolution):
    """A convolution of the pixels of an image, which need no gradient."""

    of_pixels: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class InvertedResidual(Part):
    """Convolutions one after the other, times a vector if `scaled`, and added to what they read if `added`."""

    kind = "embedding"
    steps: tuple[GridConvolution, ...]
    """The convolutions."""
    scaled: bool = False
    """Whether the result is multiplied by a learned vector."""
    added: bool = False
    """Whether the result is added to the input."""

    def __post_init__(self) -> None:
        some = isinstance(self.steps, tuple) and len(self.steps) > 0
        require(self, "steps", some and all(isinstance(one, GridConvolution) for one in self.steps), "convolutions")
        joined = all(one.d_out == other.d_in for one, other in zip(self.steps, self.steps[1:], strict=False))
        require(self, "steps", joined, "convolutions of which each is as wide as the next one reads")
        require_flags(self, "scaled", "added")
        same = self.d_in == self.d_out and all(one.stride == 1 for one in self.steps)
        require(self, "added", same or not self.added, "false where the result is of another size than the input")

    @property
    def d_in(self) -> int:
        """Width of the vectors that are read."""
        return self.steps[0].d_in

    @property
    def d_out(self) -> int:
        """Width of the output."""
        return self.steps[-1].d_out

    def left(self, side: int) -> int:
        """Returns how many rows, and columns, are left of `side`."""
        for step in self.steps:
            side = step.left(side)
        return side

    def holds(self) -> dict[str, Weight]:
        """The vector, if there is one."""
        return {"scale": Weight(shape=(self.d_out,), role="gain")} if self.scaled else {}

    def child_run(self, name: str, run: Pass) -> Pass:
        """Each convolution reads what the one before it left."""
        side = isqrt(run.tokens)
        for step in self.steps[: int(name.partition(".")[2])]:
            side = step.left(side)
        return replace(run, tokens=side**2)


@dataclass(frozen=True, kw_only=True)
class GridAttention(Mapped):
    """x + scale * W_o attention(norm(x)): every vector of a grid attends to all, with one head of keys and values.

    Keys and values are of the normalised vectors, or of what a convolution, `k_reduced` and `v_reduced`, leaves of
    them. Shazeer 2019 (arXiv 1911.02150); with fewer keys Qin et al. 2024 (MobileNetV4, arXiv 2404.10518), section 4.
    """

    kind = "attention"
    d_model: int
    """Width of the vectors."""
    n_heads: int
    """Query heads."""
    d_head: int
    """Width of a head."""
    norm: RMSNorm
    """Norm of the vectors."""
    k_reduced: GridConvolution | None = None
    """What leaves fewer vectors for keys; None for all."""
    v_reduced: GridConvolution | None = None
    """What leaves fewer vectors for values; None for all."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head")
        require(self, "norm", isinstance(self.norm, RMSNorm) and self.norm.d == self.d_model, f"of {self.d_model}")
        found = self.k_reduced, self.v_reduced
        for name, one in zip(("k_reduced", "v_reduced"), found, strict=True):
            fits = one is None or (isinstance(one, GridConvolution) and one.d_in == one.d_out == self.d_model)
            require(self, name, fits, f"a convolution from and to {self.d_model} numbers, or none")
        strides = {1 if one is None else one.stride for one in found}
        require(self, "v_reduced", len(strides) == 1, "one of the stride of k_reduced: a value for each key")

    def left(self, side: int) -> int:
        """Returns as many rows, and columns."""
        return side

    def n_keys(self, n_vectors: int) -> int:
        """Returns the keys of a grid of so many vectors."""
        side = isqrt(n_vectors)
        return (side if self.k_reduced is None else self.k_reduced.left(side)) ** 2

    def plain_maps(self) -> dict[str, Linear]:
        """q (d_model to all heads), k and v (d_model to one), o (all heads to d_model)."""
        wide = self.n_heads * self.d_head
        sizes = {"q": (self.d_model, wide), "k": (self.d_model, self.d_head), "v": (self.d_model, self.d_head)}
        made = {name: Linear(d_in=a, d_out=b, belongs="attention") for name, (a, b) in sizes.items()}
        return made | {"o": Linear(d_in=wide, d_out=self.d_model, belongs="attention")}

    def holds(self) -> dict[str, Weight]:
        """The vector `scale` (d_model)."""
        return {"scale": Weight(shape=(self.d_model,), role="gain")}

    def child_run(self, name: str, run: Pass) -> Pass:
        """The maps to keys and values process the vectors that are left."""
        return replace(run, tokens=self.n_keys(run.tokens)) if name in ("k", "v") else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The maps, the scores and the mix, each head's."""
        keys, queries = self.n_keys(run.tokens), self.n_heads * run.tokens
        return (
            *self.map_products(run, "q", "k", "v"),
            Product(name="scores", a=queries, b=self.d_head, c=keys, n=run.batch),
            Product(name="mix", a=queries, b=keys, c=self.d_head, n=run.batch),
            *self.map_products(run, "o"),
        )


@dataclass(frozen=True, kw_only=True)
class ConvolvedPatches(PatchEmbedding):
    """A network over a square image, whose last grid of vectors and that of block `fused` become one vector a patch.

    The last grid is repeated to the size of the other, both side by side pass through the convolutions of `fuse`, and
    means of squares, one for each patch, are normalised.
    """

    whole: ClassVar[bool] = True
    stem: PixelConvolution
    """The convolution of the pixels."""
    blocks: tuple[InvertedResidual | GridAttention, ...]
    """What follows it, in order."""
    fused: int
    """Number of the block whose result the last one's is fused with."""
    fuse: InvertedResidual
    """The convolutions of both side by side."""
    norm: RMSNorm
    """Norm of a patch's vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = not (self.bias or self.centred or self.mask_token) and self.class_token == "none"
        require(self, "bias", plain, "no bias, centring and tokens of patches")
        kinds = isinstance(self.blocks, tuple) and all(
            isinstance(one, InvertedResidual | GridAttention) for one in self.blocks
        )
        require(self, "blocks", kinds and len(self.blocks) > 1, "two blocks of convolutions or attention, or more")
        stem = isinstance(self.stem, PixelConvolution) and self.stem.d_in == self.channels
        require(self, "stem", stem, f"a convolution of pixels of {self.channels} channels")
        widths = [self.stem.d_out, *(self._width(block) for block in self.blocks)]
        read = [getattr(block, "d_in", widths[i + 1]) for i, block in enumerate(self.blocks)]
        require(self, "blocks", read == widths[:-1], "blocks of which each is as wide as the next one reads")
        number = isinstance(self.fused, int) and not isinstance(self.fused, bool)
        inside = number and 0 <= self.fused < len(self.blocks) - 1
        require(self, "fused", inside, f"the number of a block before the last, 0 to {len(self.blocks) - 2}")
        both = widths[self.fused + 1] + widths[-1]
        fits = self.fuse.d_in == both and self.fuse.d_out == self.d_model and self.fuse.left(self.side) == self.side
        require(self, "fuse", fits, f"convolutions from {both} to d_model = {self.d_model}, without a stride")
        require(self, "norm", self.norm.d == self.d_model, f"a norm of {self.d_model} numbers")
        whole = self.side % self.n_side == 0 and self.side % self.sides[-1] == 0
        require(self, "image_size", whole, "one whose fused grid is a multiple of the patches, and of the last grid")

    def _width(self, block: InvertedResidual | GridAttention) -> int:
        return block.d_out if isinstance(block, InvertedResidual) else block.d_model

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """Rows of the image, and of the grid that the stem and each block leave."""
        sides = [self.image_size]
        for part in (self.stem, *self.blocks):
            sides.append(part.left(sides[-1]))
        return tuple(sides)

    @property
    def side(self) -> int:
        """Rows of the grid of block `fused`."""
        return self.sides[self.fused + 2]

    def holds(self) -> dict[str, Weight]:
        """Nothing itself."""
        return {}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Nothing itself."""
        return ()

    def child_run(self, name: str, run: Pass) -> Pass:
        """Each part processes the vectors of the grid that it reads."""
        kind, _, number = name.partition(".")
        sides = {"stem": self.image_size, "fuse": self.side, "norm": self.n_side}
        side = sides[kind] if kind in sides else self.sides[int(number) + 1]
        return replace(run, tokens=side**2)
