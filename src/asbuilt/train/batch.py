"""What one pass of training reads: tokens, the target of each, and what else the model is given.

Shapes: batch B, tokens T, source tokens S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100  # the target of a token without a loss, as in PyTorch's cross-entropy


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens, their targets, and the other inputs of the model's `forward`, None if it does not read them.

    `targets` are aligned with the outputs: the next token of each in a language model, the token itself where it was
    masked. They are not shifted again.
    """

    ids: Tensor
    """Token ids (B, T) that the model, or its decoder, reads."""
    targets: Tensor
    """The target of each (B, T), `IGNORED` where there is no loss."""
    valid: Tensor | None = None
    """Marks valid tokens (B, T); None without padding."""
    types: Tensor | None = None
    """Token types (B, T), of encoders that have them."""
    documents: Tensor | None = None
    """The number of each token's document (B, T), where those of a row do not attend to each other."""
    source: Tensor | None = None
    """Token ids (B, S) that an encoder-decoder's encoder reads."""
    source_valid: Tensor | None = None
    """Marks the source's valid tokens (B, S)."""

    @cached_property
    def tokens(self) -> int:
        """Number of targets with a loss."""
        return int((self.targets != IGNORED).sum())

    @property
    def counted(self) -> int:
        """Number of terms of the loss, which is their mean: the targets."""
        return self.tokens

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's `forward` beside the token ids."""
        given = {
            "valid_BT": self.valid,
            "types_BT": self.types,
            "documents_BT": self.documents,
            "source_BS": self.source,
            "source_valid_BS": self.source_valid,
        }
        return {name: value for name, value in given.items() if value is not None}

    def to(self, device: torch.device | str) -> Batch:
        """Returns the batch on a device."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: moved(value, device) for name, value in held.items() if isinstance(value, Tensor)}
        )


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Returns a tensor on a device; to a GPU from pinned memory, without waiting for the copy."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Preferences(Batch):
    """Pairs of sequences whose targets are two answers to the same prompt: B chosen ones, then B rejected ones."""

    reference: Tensor
    """ln p of each answer (2B,) under the model that is departed from."""
    beta: float
    """Factor on the margin."""
    smoothing: float = 0.0
    """Probability that a preference is the wrong way round."""

    @property
    def counted(self) -> int:
        """Number of terms of the loss: the pairs."""
        return len(self.ids) // 2


@dataclass(frozen=True, kw_only=True)
class ImageTexts(Batch):
    """Images and a text for each, in the same order; the targets are the texts' tokens, which are only counted."""

    images: Tensor
    """Pixels (B, C, H, W)."""

    @property
    def counted(self) -> int:
        """Number of terms of the loss: the pairs."""
        return len(self.ids)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's `forward` beside the token ids."""
        return {**super().inputs, "images": self.images}


class Data(Protocol):
    """Batches of training and validation."""

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Returns the batch of one step (micro-steps counted), or a rank's share of it: equal parts, in order of rank.

        A pure function of the data's seed and these numbers: resuming and the number of ranks change nothing.
        """
        ...

    def validation(self) -> Iterator[Batch]:
        """Yields the same batches at each call."""
        ...
