"""The whole model: a stack from tokens, or an image's patches, to logits.

Shapes: batch B, new tokens T, source tokens S, images N, model width M.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.kernels.rows import row_products
from asbuilt.nn import positions
from asbuilt.nn.block import Block
from asbuilt.nn.embedding import TokenEmbedding
from asbuilt.nn.head import Head
from asbuilt.nn.linear import Linear, PartModule, Table
from asbuilt.nn.registry import computes, module, optional
from asbuilt.nn.step import Step
from asbuilt.nn.vision import Contrast, OneToken, PatchEmbedding, Vision
from asbuilt.spec import model as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache


@computes(spec.Predictor)
class Predictor(PartModule):
    """head(norm(block(join [token_norm(embedding), stream_norm(stream)]))): no pass of a model runs it."""

    join: Linear

    def __init__(self, part: spec.Predictor, path: str) -> None:
        super().__init__(part, path)
        self.embedding = TokenEmbedding(part.embedding, f"{path}.embedding")
        self.token_norm = module(part.token_norm, f"{path}.token_norm")
        self.stream_norm = module(part.stream_norm, f"{path}.stream_norm")
        self.block = Block(part.block, f"{path}.block")
        self.norm = module(part.norm, f"{path}.norm")
        self.head = Head(part.head, f"{path}.head")
        self.requires_grad_(False)

    def forward(self, next_BT: Tensor, stream_BTM: Tensor, step: Step) -> Tensor:
        """Returns logits (B, T, n_vocab) of the tokens after `next_BT`, which each follow a place of the stream."""
        halves = self.token_norm(self.embedding(next_BT, step)), self.stream_norm(stream_BTM)
        x_BTM = self.block(self.join(torch.cat(halves, -1)), step)
        return self.head(self.norm(x_BTM), self.embedding.table)


@computes(spec.Model)
class Model(nn.Module):
    """A stack from tokens to logits, or to the normed stream; `spec` is the description it was built from."""

    def __init__(self, part: spec.Model, path: str = "") -> None:
        super().__init__()
        self.spec = part
        self._numbers = torch.empty(0)  # of the dtype and on the device that the model is built in
        at = f"{path}." if path else ""
        self.encoder = None if part.encoder is None else Model(part.encoder, f"{at}encoder")
        self.vision = optional(part.vision, f"{at}vision")
        self.embedding = module(part.embedding, f"{at}embedding")
        self.positions = optional(part.positions, f"{at}positions")
        self.types = optional(part.types, f"{at}types")
        self.embedding_norm = optional(part.embedding_norm, f"{at}embedding_norm")
        self.relative = None if part.relative is None else positions.BiasTable(part.relative, f"{at}relative")
        self.blocks = nn.ModuleList(module(one, f"{at}blocks.{i}") for i, one in enumerate(part.blocks))
        self.norm = optional(part.norm, f"{at}norm")
        self.head = optional(part.head, f"{at}head")
        self.pooler = optional(part.pooler, f"{at}pooler")
        if part.predictors:
            made = (Predictor(predictor, f"{at}predictors.{i}") for i, predictor in enumerate(part.predictors))
            self.predictors = nn.ModuleList(made)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        source_BS: Tensor | None = None,
        source_valid_BS: Tensor | None = None,
        images: Tensor | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
    ) -> Tensor:
        """Returns logits (B, T, n_vocab), or (B, 1, n_vocab) of each row's last real token when `last`.

        `cache` is continued and extended; `valid_BT` marks real tokens, padding may be on either side; `kernel` is
        "fused" or "reference". `types_BT` are the tokens' types where the model has such, 0 unless given. An encoder
        reads `source_BS`, which is given with a sequence's first tokens. Without a head it is the stream (B, T, M) that
        is returned; of a head that reads one token, its numbers (B, n).

        Where rotary positions depend on how long a text is, each row's are those of its own text up to the last of
        these tokens, as in one pass over all of it; what is cached under others is first read again. `reach` says how
        long the texts are, where they are given in pieces, and spares that.

        A model of patches takes images (N, C, H, W) in the tokens' place. One with a tower takes `images` too, as
        (N, C, H, W) in order or (B, n, C, H, W), and either puts what it makes of them in the placeholders' places, or
        returns how near each is to each text, (N, B). Raises InputError for images that do not fit.
        """
        if isinstance(self.embedding, PatchEmbedding):
            return self.of_images(tokens_BT, kernel)
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        step.types_BT = types_BT
        if self.encoder is not None:
            self.read(source_BS, source_valid_BS, step)
        if images is not None:
            if self.vision is None:
                raise InputError(
                    "this model does not read images", field="images", value=tuple(images.shape), allowed="none"
                )
            assert isinstance(self.vision, Vision | Contrast)
            images = self.vision.images(images)
            if isinstance(self.vision, Vision):
                step.images_NPM = self.vision(images, kernel)
        if cache is not None and cache.rotaries:
            self.read_again(cache, step)
        with row_products(self.dtype, self.device, tokens_BT.numel()):
            made = self.logits(tokens_BT, step, last)
        if cache is not None and cache.rotaries:
            cache.record(tokens_BT, step, self.images_by_row(tokens_BT, step))
        return self.vision(images, made, kernel) if images is not None and isinstance(self.vision, Contrast) else made

    def of_images(self, pixels: Tensor, kernel: Kernel, depth: int | None = None) -> Tensor:
        """Returns what a model of patches makes of images (N, C, H, W); the stream after `depth` blocks if not None."""
        pixels, step = self.opened(pixels, kernel)
        with row_products(self.dtype, self.device, step.batch * step.tokens):
            return self.logits(pixels, step, last=False) if depth is None else self.stream(pixels, step, depth)

    def opened(self, pixels: Tensor, kernel: Kernel) -> tuple[Tensor, Step]:
        """Returns the images as they are read, and a pass over their patches; raises InputError for other sizes."""
        assert isinstance(self.embedding, PatchEmbedding)
        pixels = self.embedding.images(pixels)
        return pixels, self.begin((len(pixels), self.embedding.part.n_tokens), pixels.device, None, None, kernel)

    def states(self, tokens_BT: Tensor, *, valid_BT: Tensor | None = None, kernel: Kernel = "fused") -> Tensor:
        """Returns (B, T, M): the stream after the final norm, whatever head there is."""
        x_BTM = self.stream(
            tokens_BT, self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, None, valid_BT, kernel)
        )
        return x_BTM if self.norm is None else self.norm(x_BTM)

    def pooled(
        self,
        tokens_BT: Tensor,
        *,
        valid_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        kernel: Kernel = "fused",
    ) -> Tensor:
        """Returns (B, M): what the pooler makes of each row's first real token. Arguments as `forward` takes them."""
        assert self.pooler is not None, "this model has no pooler"
        if isinstance(self.embedding, PatchEmbedding):
            tokens_BT, step = self.opened(tokens_BT, kernel)
        else:
            step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, None, valid_BT, kernel)
        step.types_BT = types_BT
        with row_products(self.dtype, self.device, tokens_BT.numel()):
            x_BTM = first_token(self.stream(tokens_BT, step), valid_BT)
            return self.pooler(x_BTM if self.norm is None else self.norm(x_BTM))[:, 0]

    @property
    def table(self) -> Table | None:
        """The embedding's table, which a tied head multiplies and an encoder may look its tokens up in."""
        return self.embedding.table if isinstance(self.embedding, TokenEmbedding) else None

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes and caches in; packed weights have no such dtype of their own."""
        return self._numbers.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._numbers.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        super()._apply(fn, recurse)
        self._numbers = fn(self._numbers)
        return self

    def read(self, source_BS: Tensor | None, valid_BS: Tensor | None, step: Step) -> None:
        """Lends the step what the encoder makes of the source; later passes over a cache only which tokens are real."""
        assert self.encoder is not None
        if source_BS is not None:
            shape = (source_BS.shape[0], source_BS.shape[1])
            inner = self.encoder.begin(shape, source_BS.device, None, valid_BS, step.kernel)
            inner.table = self.table
            step.source_BSM = self.encoder.logits(source_BS, inner, last=False)
            if step.cache is not None:
                step.cache.begin_source(source_BS.shape[1], valid_BS)
        elif step.cache is not None:
            valid_BS = step.cache.source_valid_BS
        step.source_mask = source_mask(valid_BS)

    def logits(self, tokens_BT: Tensor, step: Step, last: bool) -> Tensor:
        """Returns the logits of one step, of all tokens or of each row's last; the normed stream without a head."""
        x_BTM = self.stream(tokens_BT, step)
        if isinstance(self.head, OneToken):
            x_BTM = self.head.token(x_BTM, tokens_BT)
        elif last:
            x_BTM = last_token(x_BTM, step.valid_BT)
        if self.norm is not None:
            x_BTM = self.norm(x_BTM)
        return x_BTM if self.head is None else self.head(x_BTM, self.table)

    def stream(self, tokens_BT: Tensor, step: Step, depth: int | None = None) -> Tensor:
        """Returns the stream (B, T, M) after `depth` blocks, None for all of them."""
        if self.relative is not None:
            step.relative_BH = self.relative.weight
        said = self.vision.spoken(tokens_BT, self.spec.n_vocab) if isinstance(self.vision, Vision) else tokens_BT
        x_BTM = self.embedding(said, step)
        if step.images_NPM is not None:
            assert isinstance(self.vision, Vision)
            x_BTM = self.vision.put(x_BTM, tokens_BT, step.images_NPM, step)
        if self.positions is not None:
            x_BTM = x_BTM + self.positions(step)
        if self.types is not None:
            types_BT = torch.zeros_like(tokens_BT) if step.types_BT is None else step.types_BT
            x_BTM = x_BTM + self.types(types_BT)
        if self.embedding_norm is not None:
            x_BTM = self.embedding_norm(x_BTM)
        for block in self.blocks[:depth]:
            x_BTM = block(x_BTM, step)
        return x_BTM

    def begin(
        self,
        shape: tuple[int, int],
        device: torch.device,
        cache: Cache | None,
        valid_BT: Tensor | None,
        kernel: Kernel,
        reach: tuple[int, ...] | None = None,
    ) -> Step:
        """Returns the step for (B, T) tokens, the cache's lengths already moved on."""
        past = None if cache is None else cache.lengths
        step = Step(
            shape, device, past=past, valid_BT=valid_BT, cache=cache, kernel=kernel, reach=reach, dtype=self.dtype
        )
        if cache is not None:
            cache.advance(step.lengths)
        return step

    def read_again(self, cache: Cache, step: Step) -> None:
        """Fills those rows of the cache anew whose rotary frequencies are no longer what they were cached under.

        One row after the other, each as if it were alone, in the pieces that the cache allows: a row costs a prefill
        of its past. A layer's keys depend on what the layers before it made, so turning them again is not enough.
        """
        for row in cache.outdated(step.past, step.reach):
            tokens_1T, types_1T, images_NPM, alone = cache.row(row, step.past[row])
            size = cache.chunk if cache.chunk and images_NPM is None else step.past[row]
            for start in range(0, step.past[row], size):
                part = slice(start, start + size)
                shape, reach = (1, tokens_1T[:, part].shape[1]), (step.reach[row],)
                inner = self.begin(shape, step.device, alone, None, step.kernel, reach)
                inner.types_BT = None if types_1T is None else types_1T[:, part]
                inner.images_NPM = images_NPM
                inner.source_mask = source_mask(alone.source_valid_BS)
                self.stream(tokens_1T[:, part], inner)

    def images_by_row(self, tokens_BT: Tensor, step: Step) -> list[Tensor] | None:
        """Returns the images that the pass has put into each row (n, P, M), None without any."""
        if step.images_NPM is None:
            return None
        assert isinstance(self.vision, Vision)
        counts = (tokens_BT == self.vision.part.placeholder).sum(1) // self.vision.part.n_tokens
        return [*step.images_NPM.split(counts.tolist())]


def source_mask(valid_BS: Tensor | None) -> Tensor | None:
    """Returns which tokens of a source are seen, as attention takes it; None for all of them."""
    return None if valid_BS is None else valid_BS[:, None, None, :]


def last_token(x_BTM: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, 1, M): each row's last real token."""
    if valid_BT is None:
        return x_BTM[:, -1:]
    places = torch.arange(valid_BT.shape[1], device=x_BTM.device)
    index = torch.where(valid_BT, places, -1).amax(1).clamp(min=0)
    return x_BTM[torch.arange(len(index), device=x_BTM.device), index][:, None]


def first_token(x_BTM: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, 1, M): each row's first real token, a copy, so that the others need not be kept for it."""
    if valid_BT is None:
        return x_BTM[:, :1].clone()
    index = valid_BT.int().argmax(1)
    return x_BTM[torch.arange(len(index), device=x_BTM.device), index][:, None]
