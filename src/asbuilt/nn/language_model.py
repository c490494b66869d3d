"""Language models: tokens to logits over the vocabulary.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asbuilt.nn.block import Block
from asbuilt.nn.head import SharedHead
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.model import Model
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import language_model as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache

# From the normalised stream to logits.
Scores = Callable[[Tensor], Tensor]


@computes(spec.Predictor)
class Predictor(PartModule):
    """head(norm(block(join [token_norm(embedding), stream_norm(stream)]))); runs only to draft tokens."""

    join: Linear

    def __init__(self, part: spec.Predictor, path: str) -> None:
        super().__init__(part, path)
        self.embedding = module(part.embedding, f"{path}.embedding")
        self.token_norm = module(part.token_norm, f"{path}.token_norm")
        self.stream_norm = module(part.stream_norm, f"{path}.stream_norm")
        self.block = Block(part.block, f"{path}.block")
        self.norm = module(part.norm, f"{path}.norm")
        self.head = module(part.head, f"{path}.head")
        self.normed = part.normed
        self.requires_grad_(False)

    def forward(self, next_BT: Tensor, stream_BTM: Tensor, step: Step, whole: Scores | None = None) -> Tensor:
        """Returns logits (B, T, n_vocab) of the tokens after `next_BT`, which follow the stream's positions."""
        return self.scores(self.states(next_BT, stream_BTM, step), whole)

    def states(self, next_BT: Tensor, stream_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): what a further predictor reads as its stream, after the norm where that is `normed`.

        A shared embedding looks up the step's table.
        """
        step.tokens_BT = next_BT
        halves = self.token_norm(self.embedding(next_BT, step)), self.stream_norm(stream_BTM)
        x_BTM = self.block(self.join(torch.cat(halves, -1)), step)
        return self.norm(x_BTM) if self.normed else x_BTM

    def scores(self, x_BTM: Tensor, whole: Scores | None = None) -> Tensor:
        """Returns the logits of `states`; a shared head is `whole`, the model's own `scores`."""
        x_BTM = x_BTM if self.normed else self.norm(x_BTM)
        return self.head(x_BTM, whole if isinstance(self.head, SharedHead) else None)


@computes(spec.LanguageModel)
class LanguageModel(Model):
    """Tokens to logits."""

    predictors: nn.ModuleList  # only where there are any

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
        **unread: Any,  # noqa: ANN401  # what no forward reads
    ) -> Tensor:
        """Returns logits (B, T, n_vocab), or (B, 1, n_vocab) of each row's last valid token if `last`.

        `documents_BT` numbers the documents of a row, which do not attend to each other; only without a cache.
        """
        if unread:
            self.refuse(unread)
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        self.keep_apart(documents_BT, step)
        return self.run(tokens_BT, step, last)

    def looked_up(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): the embedding of a text alone, which has no source."""
        step.sourceless = True
        return super().looked_up(tokens_BT, step)
