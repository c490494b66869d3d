"""Vectors of images or sounds in place of placeholder tokens. Shapes: batch B, tokens T, sources N, width M."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from asbuilt.errors import InputError


class Placed(nn.Module):
    """Base of what makes vectors that replace a text's placeholders; `what` they are of."""

    what: ClassVar[str] = "image"
    part: Any  # Vision or Hearing, as subclasses say

    def without_placeholders(self, tokens_BT: Tensor, n_vocab: int) -> Tensor:
        """Returns the tokens to look up: token 0 for placeholders outside the vocabulary, whose rows are not used."""
        if self.part.placeholder < n_vocab:
            return tokens_BT
        return tokens_BT.masked_fill(tokens_BT == self.part.placeholder, 0)

    def places(self, tokens_BT: Tensor, count: int) -> Tensor:
        """Returns where the placeholders of `count` images or sounds are (B, T).

        Raises InputError unless each text has as many as its own need.
        """
        places = tokens_BT == self.part.placeholder
        if not tokens_BT.is_meta:
            self.check(places, count)
        return places

    def check(self, places: Tensor, count: int) -> None:
        """Raises InputError for too many or too few placeholders."""
        n = self.part.n_tokens
        counts = places.sum(1).tolist()
        if sum(counts) != count * n or any(found % n for found in counts):
            raise InputError(
                f"wrong number of {self.what} placeholders",
                field="tokens",
                value=counts,
                allowed=f"{n} of token {self.part.placeholder} for each of {count} {self.what}s",
            )
