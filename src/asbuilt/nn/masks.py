"""Attention masks: which keys each query attends to, and distance terms of the scores.

Shapes: batch B, new tokens T, keys S, heads H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.attention import Mask, attend
from asbuilt.kernels.codes import Coded
from asbuilt.kernels.relative import buckets
from asbuilt.nn.step import Step
from asbuilt.spec.positions import Alibi, RelativeBuckets


class AttentionPattern(NamedTuple):
    """Which keys a layer's queries attend to, and the distance term of the scores: ALiBi, or learned buckets."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    alibi: Alibi | None = None
    relative: RelativeBuckets | None = None
    stride: int | None = None
    summary: int | None = None

    @property
    def reach(self) -> int | None:
        """How many tokens the layer's cache holds."""
        if self.sparse:
            return None
        return self.window if self.chunk is None else self.chunk

    @property
    def sparse(self) -> bool:
        """Whether a token attends to far ones without those between."""
        return self.stride is not None or self.summary is not None


# Returns the positions (B or 1, S) of a layer's keys, -1 for empty slots.
Keys = Callable[[], Tensor]


def mask(step: Step, pattern: AttentionPattern, dtype: torch.dtype, keys: Keys, *, fused: bool = False) -> Mask:
    """Returns the mask, built once for all layers with the same pattern, whose keys have the same positions.

    The `fused` kernel adds it to the scores, and would keep a copy for each layer's backward pass: it is given one of
    numbers, that all of them share.
    """
    if not (fused and torch.is_grad_enabled()):
        return step.once((pattern, dtype), lambda: _mask(step, pattern, dtype, keys))
    kind = step.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    return step.once((pattern, dtype, "added"), lambda: _added(_mask(step, pattern, dtype, keys), dtype))


def _added(mask: Mask, dtype: torch.dtype) -> Mask:
    """Returns what is added to the scores in place of a mask that is True where a query attends to a key."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def attend_in_runs(
    step: Step,
    q: Tensor,
    k: Tensor | Coded,
    v: Tensor | Coded,
    mask: Mask,
    **options: Any,  # noqa: ANN401  those of `attend`
) -> Tensor:
    """Returns `attend`; tokens that are no neighbours in runs, each with the keys up to its last: later are masked."""
    if not step.runs:
        return attend(q, k, v, mask, **options)
    assert isinstance(k, Tensor), "codes are of a cache"
    assert isinstance(v, Tensor), "codes are of a cache"
    assert isinstance(mask, Tensor), "their positions are no range"
    made = [attend(q[:, :, a], k[:, :, b], v[:, :, b], mask[:, :, a, b], **options) for a, b in step.runs]
    return torch.cat(made, 2)


def _mask(step: Step, pattern: AttentionPattern, dtype: torch.dtype, keys: Keys) -> Mask:
    if step.padding_BT is not None:
        return ~(step.padding_BT[:, None, :, None] & step.padding_BT[:, None, None, :])
    near = pattern.reach is None or step.tokens <= pattern.reach
    distant = pattern.alibi is not None or pattern.relative is not None
    ahead = _ends(step, pattern) is not None and pattern.causal
    if step.uniform and not distant and not ahead and not pattern.sparse:
        if step.tokens == 1 and pattern.chunk is None:
            return None  # the cache holds at most the window, and all of it is past
        if not pattern.causal and near:
            return None
        if step.past[0] == 0 and near:
            return "causal"
    keys_BS = keys()
    seen = seen_keys(step, pattern, keys_BS)
    if pattern.relative is not None:
        every = (
            step.uniform
            and near
            and not pattern.sparse
            and pattern.chunk is None
            and (step.tokens == 1 or not pattern.causal)
        )
        return _by_bucket(step, pattern.relative, keys_BS, None if every else ~seen[:, None])
    if pattern.alibi is None:
        return seen[:, None]
    distance = (step.positions_BT[:, :, None] - keys_BS[:, None, :]).abs()
    numbers = pattern.alibi.slopes
    made = lambda: torch.tensor(numbers, dtype=torch.float32, device=step.device)  # noqa: E731
    slopes = step.constant(pattern.alibi, made)
    bias = -slopes[:, None, None] * distance[:, None]
    return bias.masked_fill_(~seen[:, None], -torch.inf).to(dtype)


def _ends(step: Step, pattern: AttentionPattern) -> Tensor | None:
    """Returns the last position that each token attends to, None for its own."""
    return step.ends_BT if pattern.window is not None or not step.ends_in_windows else None


def _ends_of(keys_BS: Tensor, ends_BT: Tensor, step: Step) -> Tensor:
    """Returns the last position that each key's own token attends to (B, S), its own if it is of an earlier pass."""
    first_B1 = step.positions_BT[:, :1]
    at_BS = (keys_BS - first_B1).clamp(0, ends_BT.shape[1] - 1).expand(len(ends_BT), -1)
    return torch.where(keys_BS >= first_B1, ends_BT.gather(1, at_BS), keys_BS)


def _by_bucket(step: Step, part: RelativeBuckets, keys_BS: Tensor, hidden: Tensor | None) -> Tensor:
    """Returns (B or 1, H, T, S): the stack's bias per head and distance, -inf where masked."""
    assert step.relative_BH is not None, "the stack has no bias table"
    ahead = keys_BS[:, None, :] - step.positions_BT[:, :, None]
    bias = F.embedding(buckets(part, ahead), step.relative_BH).permute(0, 3, 1, 2)
    return bias if hidden is None else bias.masked_fill(hidden, -torch.inf)


def seen_keys(step: Step, pattern: AttentionPattern, keys_BS: Tensor) -> Tensor:
    """Returns (B or 1, T, S), True where a query attends to a key."""
    seen: Tensor | None = None
    for condition in _conditions(step, pattern, keys_BS):
        if seen is None:
            seen = condition
        else:  # of all sequences, where the others were of one
            seen = seen & condition if len(condition) > len(seen) else seen.logical_and_(condition)
        del condition  # so that the next one takes its place
    there = keys_BS[:, None, :] >= 0
    seen = there.repeat(1, step.tokens, 1) if seen is None else seen.logical_and_(there)
    # padding may attend to nothing, and the softmax of nothing is NaN: let it attend to the first key
    seen[:, :, 0] |= ~seen.any(-1)
    return seen


def _conditions(step: Step, pattern: AttentionPattern, keys_BS: Tensor) -> Iterator[Tensor]:
    """Yields what must be true of a query and a key (B or 1, T, S), without distances, which take eight times as much.

    Keys ahead that are attended to (images) are not limited by the window.
    """
    queries, keys = step.positions_BT[:, :, None], keys_BS[:, None, :]
    last = _ends(step, pattern)
    if pattern.causal:
        yield keys <= (queries if last is None else last[:, :, None])
    near = _near(pattern, queries, keys)
    if near is not None and last is not None and step.ends_past_windows:
        near = near | (queries <= _ends_of(keys_BS, last, step)[:, None, :])
    if near is not None:
        yield near
    del near
    if pattern.chunk is not None:
        same = queries // pattern.chunk == keys // pattern.chunk
        yield same if pattern.summary is None else same | (keys % pattern.chunk >= pattern.chunk - pattern.summary)
        del same
    if step.documents_BT is not None:
        yield step.documents_BT[:, :, None] == step.documents_BT[:, None, :]


def _near(pattern: AttentionPattern, queries: Tensor, keys: Tensor) -> Tensor | None:
    """Returns where a key is in the query's window, or a multiple of the stride away; None for everywhere."""
    within = None
    if pattern.window is not None:
        within = queries < keys + pattern.window
        if not pattern.causal:
            within.logical_and_(keys < queries + pattern.window)
    if pattern.stride is None:
        return within
    strided = (queries - keys) % pattern.stride == 0
    return strided if within is None else strided | within
