"""Vision: pixels to patches, heads that read one token, projectors, and images in texts.

Shapes: images N, channels C, patches P, batch of texts B, text tokens T, width M.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.classifier import last_token
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.linear import Linear, Matrix, PartModule
from asbuilt.nn.norms import normed
from asbuilt.nn.placed import Placed
from asbuilt.nn.registry import computes, module, optional
from asbuilt.nn.step import Step
from asbuilt.spec import vision
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.image_encoder import ImageEncoder


class Seen(NamedTuple):
    """What a text sees of images: vectors in place of tokens (N, tokens, M), or (P, M) of images of any size.

    The latter have `grids` of tokens (frames, rows, columns), and vectors `added` after the text's first blocks.
    """

    made: Tensor
    grids: tuple[tuple[int, int, int], ...] = ()
    added: tuple[Tensor, ...] = ()


@computes(vision.PatchEmbedding)
class PatchEmbedding(PartModule):
    """W x + b of each patch x, the class token and registers."""

    weight: Tensor
    bias: Tensor | None
    class_token: Tensor | None
    registers: Tensor | None

    def __init__(self, part: vision.PatchEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        for name in ("bias", "class_token", "registers"):
            if name not in part.holds():
                self.register_parameter(name, None)

    def forward(self, pixels_NCHW: Tensor, step: Step) -> Tensor:
        """Returns (N, P, M), with the class token (N, P + 1, M), with R registers (N, 1 + R + P, M)."""
        patches = self.patches(pixels_NCHW.to(self.weight.dtype))
        if self.part.centred:
            patches = 2 * patches - 1
        x = F.linear(patches, self.weight.flatten(1), self.bias)
        if self.class_token is None:
            return x
        token = self.class_token.expand(len(x), 1, -1)
        if self.registers is not None:
            return torch.cat((token, self.registers.expand(len(x), -1, -1), x), 1)
        return torch.cat((token, x) if self.part.class_token == "first" else (x, token), 1)

    def patches(self, pixels_NCHW: Tensor) -> Tensor:
        """Returns (N, P, channels * patch_size^2), row by row, each in the layout of the convolution's matrix."""
        n, p = self.part.n_side, self.part.patch_size
        pixels = pixels_NCHW[:, :, : n * p, : n * p].unflatten(3, (n, p)).unflatten(2, (n, p))
        return pixels.permute(0, 2, 4, 1, 3, 5).reshape(len(pixels), n * n, self.part.d_patch)

    def grid(self, pixels_NCHW: Tensor) -> tuple[int, int]:
        """Returns the rows and columns of patches of images."""
        return self.part.n_side, self.part.n_side

    def show(self, images: Any, step: Step) -> None:  # noqa: ANN401  # as given to the model
        """Tells a pass over images what else it must know of them: of plain ones nothing."""

    def images(self, pixels: Tensor) -> Tensor:
        """Returns images (N, C, H, W) or (B, n, C, H, W) as (N, C, H, W); raises InputError for other shapes."""
        size = (self.part.channels, self.part.image_size, self.part.image_size)
        if pixels.ndim not in (4, 5) or tuple(pixels.shape[-3:]) != size:
            allowed = f"(N, {size[0]}, {size[1]}, {size[2]}), or (B, n, ...) for n images per text"
            raise InputError("wrong image size", field="images", value=tuple(pixels.shape), allowed=allowed)
        return pixels.flatten(0, -4) if pixels.ndim == 5 else pixels


@computes(vision.Projection)
class Projection(PartModule):
    """W x + b of one token per sequence."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, part: vision.Projection, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        if not part.bias:
            self.register_parameter("bias", None)

    def chosen(self, x_BTM: Tensor, tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        """Returns (B, M), the token that is read."""
        if self.part.reads == "first":
            return x_BTM[:, 0].clone()  # so that training can free the others
        if self.part.reads == "last":
            last_BM = last_token(x_BTM, valid_BT)[:, 0]
            return last_BM.clone() if valid_BT is None else last_BM
        marked = tokens_BT if self.part.reads == "highest" else (tokens_BT == self.part.end).int()
        return x_BTM[torch.arange(len(x_BTM), device=x_BTM.device), marked.argmax(1)]

    def forward(self, x_BM: Tensor, table: Matrix | None) -> Tensor:
        """Returns (B, d_out)."""
        return F.linear(x_BM, self.weight, self.bias)


@computes(vision.MLPProjector)
class MLPProjector(PartModule):
    """Linear maps with the activation between them, over patches or merged squares."""

    def __init__(self, part: vision.MLPProjector, path: str) -> None:
        super().__init__(part, path)
        self.part, self.activation = part, ACTIVATIONS[part.activation]
        self.norm, self.first = optional(part.norm, f"{path}.norm"), optional(part.first, f"{path}.first")
        self.post_norm = optional(part.post_norm, f"{path}.post_norm")

    def forward(self, x_NPM: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Returns (N, P / merge^2, d_out); without a `grid` of rows and columns patches are those of a square."""
        before, after = (self.norm, None) if self.part.norms_patches else (None, self.norm)
        if self.part.every > 1:
            x_NPM = x_NPM[:, :: self.part.every].contiguous()
        x = normed(before, x_NPM if self.first is None else self.first(x_NPM))
        x = normed(after, x if self.part.joined == 1 else self.merged(x, grid))
        return self.mapped(x)

    def mapped(self, x: Tensor) -> Tensor:
        """Returns (N, P, d_out): normalised vectors through the maps."""
        for i in range(len(self.part.widths) - 1):
            layer: Linear = self.get_submodule(f"layers_{i}")  # type: ignore[assignment]  # pyright: ignore
            x = layer(self.activation(x) if i > self.part.merging else x)
        return x if self.post_norm is None else self.post_norm(x)

    def merged(self, x_NPM: Tensor, grid: tuple[int, int] | None) -> Tensor:
        """Returns (N, P / merge^2, merge^2 * M): the square's patches row by row; or consecutive vectors together."""
        if self.part.stack > 1:
            return x_NPM.unflatten(1, (-1, self.part.stack)).flatten(2)
        m, side = self.part.merge, round(x_NPM.shape[1] ** 0.5)
        rows, columns = grid or (side, side)
        x = x_NPM.unflatten(1, (rows // m, m, columns // m, m)).transpose(2, 3)
        return x.flatten(3, 5).flatten(1, 2)


@computes(vision.PooledProjector)
class PooledProjector(PartModule):
    """W norm(mean of each square of patches)."""

    weight: Tensor
    shift: Tensor
    factor: Tensor

    def __init__(self, part: vision.PooledProjector, path: str) -> None:
        super().__init__(part, path)
        self.part, self.norm = part, module(part.norm, f"{path}.norm")

    def forward(self, x_NPM: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Returns (N, squares, d_out); without a `grid` of rows and columns patches are those of a square."""
        pool, (rows, columns) = self.part.pool, grid or (self.part.n_side, self.part.n_side)
        high, wide = rows // pool, columns // pool
        x = x_NPM.unflatten(1, (rows, columns))[:, : high * pool, : wide * pool]
        means = x.unflatten(2, (wide, pool)).unflatten(1, (high, pool)).mean((2, 4)).flatten(1, 2)
        return F.linear(self.norm(self.standardised(means)), self.weight)

    def standardised(self, means: Tensor) -> Tensor:
        """Returns the means scaled and, if so declared, standardised, in the buffers' wider dtype."""
        part = self.part
        if not part.standardised:
            return means if part.scale == 1.0 else means * part.scale
        return ((means.to(self.shift.dtype) * part.scale - self.shift) * self.factor).to(means.dtype)


@computes(vision.ConvolvedProjector)
class ConvolvedProjector(PartModule):
    """Convolutions with a stride of 2, and a map of what they leave.

    They are products with nine patches each: the library's convolution needs memory that depends on the shape.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, part: vision.ConvolvedProjector, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        if not part.bias:
            self.register_parameter("bias", None)

    def forward(self, x_NPM: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Returns (N, patches left, d_out); without a `grid` of rows and columns patches are those of a square."""
        rows, columns = map(self.part.halved, grid or (self.part.n_side, self.part.n_side))
        for i, sides in enumerate(zip(rows[:-1], columns[:-1], strict=True)):
            conv: Linear = self.get_submodule(f"conv_{i}")  # type: ignore[assignment]  # pyright: ignore
            edged_NHWM = F.pad(x_NPM.unflatten(1, sides), (0, 0, 1, 1, 1, 1))
            patches_NP9 = edged_NHWM.unfold(1, 3, 2).unfold(2, 3, 2).flatten(3).flatten(1, 2)
            del edged_NHWM
            x_NPM = F.linear(patches_NP9, conv.weight.flatten(1), conv.bias)
            del patches_NP9
        return F.linear(x_NPM, self.weight, self.bias)


@computes(vision.Vision)
class Vision(Placed):
    """Images to vectors that replace placeholders."""

    tower: ImageEncoder

    def __init__(self, part: vision.Vision, path: str) -> None:
        super().__init__()
        self.part = part
        self.add_module("tower", module(part.tower, f"{path}.tower"))
        self.projector = module(part.projector, f"{path}.projector")

    def forward(self, pixels: Tensor, kernel: Kernel) -> Tensor:
        """Returns (N, n_tokens, M)."""
        x = self.tower.of_images(pixels, kernel, self.part.layers)
        kind = self.tower.spec.embedding.class_token  # type: ignore[union-attr]  # pyright: ignore
        if kind != "none" and not self.part.keep_class:
            added = self.tower.spec.embedding.n_added  # type: ignore[union-attr]  # pyright: ignore
            x = (x[:, added:] if kind == "first" else x[:, :-1]).clone(memory_format=torch.contiguous_format)
        return self.projector(x)

    def images(self, pixels: Tensor) -> Tensor:
        """Returns (N, C, H, W); raises InputError for images of another size."""
        return images_of(self.tower, pixels)

    def seen(self, images: Tensor, kernel: Kernel) -> Seen:
        """Returns what a text sees of images; raises InputError for images that do not fit."""
        return Seen(self(self.images(images), kernel))

    def carry_on(self, step: Step) -> None:
        """Prepares a step without images: nothing to do."""

    def add(self, x_BTM: Tensor, made_PM: Tensor, step: Step) -> Tensor:
        """Returns the stream with vectors added where the placeholders are; images of one size have none."""
        raise NotImplementedError

    def put(self, x_BTM: Tensor, tokens_BT: Tensor, made_NPM: Tensor, step: Step) -> Tensor:
        """Returns the embedded text with placeholders replaced by the images' vectors, in order.

        Raises InputError unless each text has as many placeholders as its images need.
        """
        places = self.places(tokens_BT, len(made_NPM))
        self.see_both_ways(places, [self.part.n_tokens] * len(made_NPM), step)
        return x_BTM.masked_scatter(places[..., None], made_NPM.to(x_BTM.dtype))

    def see_both_ways(self, places_BT: Tensor, sizes: Sequence[int], step: Step) -> None:
        """Lets the placeholders of each image, so many in order, attend to each other, if they do."""
        if not self.part.both_ways or self.part.prefix:
            return
        left = torch.cat([torch.arange(n - 1, -1, -1, device=step.device) for n in sizes])
        at_BT = (places_BT.flatten().cumsum(0) - 1).view_as(places_BT).clamp(0, len(left) - 1)
        step.ends_in_windows = self.part.in_windows
        step.ends_BT = step.positions_BT + left[at_BT].masked_fill(~places_BT, 0)

    def check(self, places: Tensor, count: int) -> None:
        """Raises InputError for too many or too few placeholders, and if they must be adjacent but are not."""
        super().check(places, count)
        n = self.part.n_tokens
        at = places.nonzero()[:, 1].view(-1, n)
        if self.part.both_ways and not self.part.prefix and n > 1 and not bool((at.diff(dim=1) == 1).all()):
            raise InputError("the placeholders of an image are not adjacent", field="tokens", allowed=f"{n} in a row")


@computes(vision.Contrast)
class Contrast(PartModule):
    """exp(scale) * cos + b of each image with each text."""

    scale: Tensor
    bias: Tensor | None
    tower: ImageEncoder

    def __init__(self, part: vision.Contrast, path: str) -> None:
        super().__init__(part, path)
        self.add_module("tower", module(part.tower, f"{path}.tower"))
        if not part.bias:
            self.register_parameter("bias", None)

    def images(self, pixels: Tensor) -> Tensor:
        """Returns (N, C, H, W); raises InputError for images of another size."""
        return images_of(self.tower, pixels)

    def forward(self, pixels: Tensor, texts_BD: Tensor, kernel: Kernel) -> Tensor:
        """Returns (N, B)."""
        images_ND = self.tower.of_images(pixels, kernel)
        near_NB = unit(images_ND) @ unit(texts_BD).t() * self.scale.exp()
        return near_NB if self.bias is None else near_NB + self.bias


def images_of(tower: ImageEncoder, pixels: Tensor) -> Tensor:
    """Returns the images in the shape that the tower reads."""
    assert isinstance(tower.embedding, PatchEmbedding)
    return tower.embedding.images(pixels)


def unit(x: Tensor) -> Tensor:
    """Returns the vectors normalised to length 1."""
    return x * x.square().sum(-1, keepdim=True).rsqrt()
