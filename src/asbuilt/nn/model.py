"""The base of whole models: a stack from the embedding to the head's output, or to the normalised stream.

Shapes: batch B, new tokens T, source tokens S, images N, model width M.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.kernels.rows import row_products
from asbuilt.nn.adaptive import AdaptiveHead
from asbuilt.nn.altup import ProjectedStreams
from asbuilt.nn.attention_pooling import AttentionPooling
from asbuilt.nn.classifier import Classifier, last_token
from asbuilt.nn.embedding import TokenEmbedding
from asbuilt.nn.head import Head
from asbuilt.nn.linear import Matrix
from asbuilt.nn.per_layer import PerLayerEmbedding
from asbuilt.nn.registry import module, optional
from asbuilt.nn.step import Step
from asbuilt.nn.streams import StreamMerge
from asbuilt.nn.vision import Projection
from asbuilt.spec import model as spec
from asbuilt.spec.documents import require_separable
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache


class Model(nn.Module):
    """Base of whole models; `spec` is its description, and `forward` takes the inputs that the spec `reads`.

    Common arguments: `cache` is read and extended; `valid_BT` marks valid tokens, with padding on either side; `last`
    asks only for the output of each row's last valid token, (B, 1, ...); `kernel` is "fused" or "reference". If RoPE
    frequencies depend on a text's length, each row uses those of its own text up to the last of these tokens, as in one
    pass over the whole text; entries cached with other frequencies are recomputed first. For texts given in pieces,
    `reach` gives their full lengths, which avoids that.

    Without a head the result is the stream (B, T, M); with a head that reads one token, its outputs (B, n). Inputs that
    the model does not read are refused by name.
    """

    embedding: nn.Module
    positions: nn.Module | None
    embedding_norm: nn.Module | None
    per_layer: PerLayerEmbedding | None
    relative: nn.Module | None
    blocks: nn.ModuleList
    streams: StreamMerge | ProjectedStreams | None
    norm: nn.Module | None
    head: nn.Module | None

    def __init__(self, part: spec.Model, path: str = "") -> None:
        super().__init__()
        self.spec = part
        self._numbers = torch.empty(0)  # has the dtype and device of the model
        self.native: Callable[[Tensor, Step], Tensor | None] | None = None  # set by `nn.build.interleave`
        # sums a chunk's loss, where the processes of a run divide the vocabulary (train/many/tensor.py)
        self.measured: Callable[..., Any] | None = None
        self.without_head = False  # whether `forward` ends with the normalised stream, for a loss that runs the head
        self.sides = any(branch.side is not None for block in part.blocks for branch in block.branches)
        own, at = {field.name for field in fields(part)}, f"{path}." if path else ""
        for name in spec.ORDER:
            value = getattr(part, name) if name in own else ()
            if not isinstance(value, tuple):
                setattr(self, name, optional(value, f"{at}{name}"))
            elif value or name == "blocks":  # a network that is one embedding has no blocks
                setattr(self, name, nn.ModuleList(module(one, f"{at}{name}.{i}") for i, one in enumerate(value)))

    def refuse(self, given: Mapping[str, object]) -> None:
        """Raises InputError naming the first argument that this model does not read; None counts as not given."""
        for name, value in given.items():
            if value is not None:
                raise InputError(
                    f"not an input of {type(self).__name__}",
                    field=name,
                    value=tuple(value.shape) if isinstance(value, Tensor) else value,
                    fix=f"it reads {', '.join(self.spec.reads)}",
                )

    def keep_apart(self, documents_BT: Tensor | None, step: Step) -> None:
        """Has the documents of each row not attend to each other; raises InputError where a part cannot."""
        if documents_BT is None:
            return
        require_separable(self.spec)
        if step.cache is not None:
            raise InputError("documents share no cache", field="documents_BT", fix="leave the cache out")
        step.documents_BT = documents_BT

    def run(self, tokens_BT: Tensor, step: Step, last: bool) -> Tensor:
        """Returns the output of one step, after recomputing rows that were cached with other RoPE frequencies."""
        cache = step.cache
        if cache is not None and cache.rotaries:
            self.read_again(cache, step)
        with row_products(self.dtype, self.device, tokens_BT.numel()):
            made = self.logits(tokens_BT, step, last)
        if cache is not None and cache.rotaries:
            cache.record(tokens_BT, step, self.images_by_row(tokens_BT, step))
        return made

    def logits(self, tokens_BT: Tensor, step: Step, last: bool) -> Tensor:
        """Returns the logits of one step, of all tokens or of each row's last; the normalised stream without a head."""
        x_BTM, head = self.stream(tokens_BT, step), self.head
        if isinstance(head, AttentionPooling):
            return head(self.normed(x_BTM), step)
        if isinstance(head, Classifier) and head.part.after_norm:
            x = head.chosen(self.normed(x_BTM), tokens_BT, step.valid_BT)
        else:
            x = self.normed(self.chosen(x_BTM, tokens_BT, step, last))
        return x if self.without_head else self.scores(x)

    def scores(self, x: Tensor) -> Tensor:
        """Returns the logits of the normalised stream, which is given back without a head."""
        if isinstance(self.head, AdaptiveHead):
            return self.head(x, self.embedding)
        return x if self.head is None else self.head(x, self.table)

    @property
    def yields_logits(self) -> bool:
        """Whether nothing but its caller reads what `scores` returns: no gradient needs it, and no hook sees it."""
        head = self.head
        return isinstance(head, Head) and not (head._forward_hooks or torch.nn.modules.module._global_forward_hooks)

    def chosen(self, x_BTM: Tensor, tokens_BT: Tensor, step: Step, last: bool) -> Tensor:
        """Returns the tokens of the stream that the head reads: all, (B, 1, M) if `last`, or the one of its choice."""
        head = self.head
        if isinstance(head, Projection):
            return head.chosen(x_BTM, tokens_BT, step.valid_BT)
        if isinstance(head, Classifier) and not head.part.per_token:
            return head.chosen(x_BTM, tokens_BT, step.valid_BT)
        return last_token(x_BTM, step.valid_BT) if last else x_BTM

    def normed(self, x: Tensor) -> Tensor:
        """Returns the stream after the final norm."""
        return x if self.norm is None else self.norm(x)

    def stream(self, tokens_BT: Tensor, step: Step, depth: int | None = None) -> Tensor:
        """Returns the stream (B, T, M) after `depth` blocks, of several streams all; after all of them (None) one."""
        x_BTM = self.entered(tokens_BT, step)
        step.entered_BTM = x_BTM if self.sides else None  # it stays allocated for the whole pass
        vectors = None if self.per_layer is None else self.per_layer(self.known(tokens_BT), x_BTM, step)
        if self.streams is not None:
            x_BTM = self.streams.split(x_BTM)
        made = self.through(x_BTM, step) if depth is None else None
        if made is not None:
            return made
        for i, block in enumerate(self.blocks if depth is None else self.blocks[:depth]):
            if vectors is not None:
                step.per_layer_BTP = vectors[:, :, i]
            x_BTM = self.after(i, block(x_BTM, step), step)
        return x_BTM if self.streams is None or depth is not None else self.streams(x_BTM)

    def through(self, x_BTM: Tensor, step: Step) -> Tensor | None:
        """Returns the stream after all blocks, by the native kernels; None where the blocks must run."""
        plain = step.valid_BT is None and step.coordinates_3BT is None and step.kernel == "fused"
        return self.native(x_BTM, step) if plain and self.native is not None else None

    def entered(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns the stream (B, T, M) before the first block."""
        if self.relative is not None:
            self.relative(step)
        step.tokens_BT = tokens_BT
        x_BTM = self.embedded(tokens_BT, step)
        return x_BTM if self.embedding_norm is None else self.embedding_norm(x_BTM)

    def after(self, i: int, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns the stream after block i, with what a kind of model adds there."""
        return x_BTM

    def known(self, tokens_BT: Tensor) -> Tensor:
        """Returns the tokens whose per-layer vectors are looked up."""
        return tokens_BT

    def embedded(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): the embedding of tokens or images, with positions and other additions."""
        x_BTM = self.looked_up(tokens_BT, step)
        return x_BTM if self.positions is None else x_BTM + self.positions(step)

    def looked_up(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): the embedding of tokens or images."""
        return self.embedding(tokens_BT, step)

    def states(self, tokens_BT: Tensor, *, valid_BT: Tensor | None = None, kernel: Kernel = "fused") -> Tensor:
        """Returns (B, T, M): the stream of a text after the final norm, regardless of the head."""
        x_BTM = self.stream(
            tokens_BT, self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, None, valid_BT, kernel)
        )
        return self.normed(x_BTM)

    @property
    def table(self) -> Matrix | None:
        """The embedding's table, which a tied head and an encoder may share."""
        return self.embedding.table if isinstance(self.embedding, TokenEmbedding) else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation and cache; packed weights have no such dtype."""
        return self._numbers.dtype

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._numbers.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        super()._apply(fn, recurse)
        self._numbers = fn(self._numbers)
        return self

    def begin(
        self,
        shape: tuple[int, int],
        device: torch.device,
        cache: Cache | None,
        valid_BT: Tensor | None,
        kernel: Kernel,
        reach: tuple[int, ...] | None = None,
    ) -> Step:
        """Returns the step for (B, T) tokens, after advancing the cache's lengths."""
        past = None if cache is None else cache.lengths
        step = Step(
            shape, device, past=past, valid_BT=valid_BT, cache=cache, kernel=kernel, reach=reach, dtype=self.dtype
        )
        if cache is not None:
            cache.advance(step.lengths)
        return step

    def read_again(self, cache: Cache, step: Step) -> None:
        """Recomputes the rows of the cache whose RoPE frequencies have changed since they were cached.

        Rows are processed one by one, each as if alone, in the cache's chunk size: a row costs a prefill of its past. A
        layer's keys depend on the outputs of earlier layers, so rotating them again is not enough.
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
        """Returns the images of each row (n, P, M) in this pass, None without images."""
        return None


def source_mask(valid_BS: Tensor | None) -> Tensor | None:
    """Returns the attention mask of a source's tokens; None if all are valid."""
    return None if valid_BS is None else valid_BS[:, None, None, :]
