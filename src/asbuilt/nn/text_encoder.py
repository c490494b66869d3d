"""Encoders of texts: tokens to the stream, or to what a head makes of it.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asbuilt.kernels.rows import row_products
from asbuilt.nn.model import Model, first_token
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import text_encoder as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache


@computes(spec.TextEncoder)
class TextEncoder(Model):
    """Tokens, and their types, to the normed stream, or to what a head makes of it."""

    types: nn.Module | None
    pooler: nn.Module | None

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
        **unread: Any,  # noqa: ANN401  # what no forward reads
    ) -> Tensor:
        """Returns what the head gives, or the stream (B, T, M); of each row's last real token when `last`.

        `types_BT` are the tokens' types where the model has such, 0 unless given.
        """
        self.refuse(unread)
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        self.take_types(types_BT, step)
        return self.run(tokens_BT, step, last)

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
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, None, valid_BT, kernel)
        self.take_types(types_BT, step)
        with row_products(self.dtype, self.device, tokens_BT.numel()):
            return self.pooler(self.normed(first_token(self.stream(tokens_BT, step), valid_BT)))[:, 0]

    def take_types(self, types_BT: Tensor | None, step: Step) -> None:
        """Lends the step the tokens' types; raises InputError where the model has none."""
        if self.types is None:
            self.refuse({"types_BT": types_BT})
        step.types_BT = types_BT

    def embedded(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): what tokens become, and their positions and types added to it."""
        x_BTM = super().embedded(tokens_BT, step)
        if self.types is None:
            return x_BTM
        return x_BTM + self.types(torch.zeros_like(tokens_BT) if step.types_BT is None else step.types_BT)
