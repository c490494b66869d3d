"""Text encoders: tokens to the stream, or to a head's output.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asbuilt.kernels.rows import row_products
from asbuilt.nn.classifier import first_token
from asbuilt.nn.model import Model
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import text_encoder as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache


@computes(spec.TextEncoder)
class TextEncoder(Model):
    """Tokens, and their types, to the normalised stream, or to a head's output."""

    types: nn.Module | None
    embedding_projection: nn.Module | None
    pooler: nn.Module | None

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
        **unread: Any,  # noqa: ANN401  # what no forward reads
    ) -> Tensor:
        """Returns the head's output, or the stream (B, T, M); of each row's last valid token if `last`.

        `types_BT` are the tokens' types, if the model has types; 0 by default. `documents_BT` numbers the documents
        of a row, which do not attend to each other.
        """
        self.refuse(unread)
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        self.take_types(types_BT, step)
        self.keep_apart(documents_BT, step)
        return self.run(tokens_BT, step, last)

    def pooled(
        self,
        tokens_BT: Tensor,
        *,
        valid_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        kernel: Kernel = "fused",
    ) -> Tensor:
        """Returns (B, M): the pooler's output for each row's first valid token. Arguments are those of `forward`."""
        assert self.pooler is not None, "this model has no pooler"
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, None, valid_BT, kernel)
        self.take_types(types_BT, step)
        with row_products(self.dtype, self.device, tokens_BT.numel()):
            return self.pooler(self.normed(first_token(self.stream(tokens_BT, step), valid_BT)))[:, 0]

    def take_types(self, types_BT: Tensor | None, step: Step) -> None:
        """Sets the step's token types; raises InputError if the model has none."""
        if self.types is None:
            self.refuse({"types_BT": types_BT})
        step.types_BT = types_BT

    def entered(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns the stream (B, T, M) before the first block, mapped to its width if the embeddings have another."""
        x_BTE = super().entered(tokens_BT, step)
        return x_BTE if self.embedding_projection is None else self.embedding_projection(x_BTE)

    def embedded(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): the token embedding plus positions and types."""
        x_BTM = super().embedded(tokens_BT, step)
        if self.types is None:
            return x_BTM
        return x_BTM + self.types(torch.zeros_like(tokens_BT) if step.types_BT is None else step.types_BT)
