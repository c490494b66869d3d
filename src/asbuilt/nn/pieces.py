"""Pictures of which each is one image of the tower's size, or several: tiles, and the picture as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """The images (N, C, H, W) of several pictures, in order, and what stands for each picture in a text.

    `texts` are words, and how many placeholders stand between them. `mark` is the word of a prompt in whose place a
    picture is put, where that is not the placeholder.
    """

    values: Tensor
    texts: tuple[tuple[str | int, ...], ...]
    mark: str | None = None

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: torch.device) -> Pieces:
        """Returns the images on a device."""
        return replace(self, values=self.values.to(device))
