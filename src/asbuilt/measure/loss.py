"""The loss of a text: how many nats per token a model is surprised by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model

WINDOW = 512  # tokens that are read at once, and the longest context in which one is predicted


@torch.inference_mode()
def nats_per_token(
    model: Model, ids: Sequence[int], first: int | None = None, window: int = WINDOW, kv: str | None = None
) -> float:
    """Returns the mean of -log p(next token) over a text in windows side by side.

    Each window begins anew, with the token `first` if it is given, and its own first token is not counted unless that
    is. With `kv` each token attends to keys and values as a cache of that format holds them. Raises InputError for a
    text of fewer than two tokens.
    """
    if len(ids) < 2:
        raise InputError("too short for a loss", field="text", value=len(ids), allowed="at least 2 tokens")
    total, counted = 0.0, 0
    for tokens in windows(ids, first, window):
        logits = model(tokens, cache=_cache(model, tokens.shape[1], kv))[0, :-1].float()
        total += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        counted += tokens.shape[1] - 1
    return total / counted


def windows(ids: Sequence[int], first: int | None = None, window: int = WINDOW) -> Iterator[Tensor]:
    """Yields the tokens (1, T) of each window, without a last one of a single token, of which nothing is predicted."""
    begin = [] if first is None else [first]
    size = window - len(begin)
    for start in range(0, len(ids), size):
        tokens = torch.tensor([begin + list(ids[start : start + size])])
        if tokens.shape[1] > 1:
            yield tokens


def _cache(model: Model, tokens: int, kv: str | None) -> Cache | None:
    if kv is None:
        return None
    return Cache(model.spec, batch=1, capacity=tokens, dtype=model.dtype, device=model.device, kv=kv)
