"""The mLSTM's recurrence: chunk by chunk, and token by token as in its definition.

Shapes: heads of all rows G, tokens T, key width K, value width V; q, k (G, T, K), values with an appended one
(G, T, V + 1), logarithms of both gates (G, T), memories with their normaliser as the last column (G, K, V + 1), and
stabilisers m (G). Beck et al. 2024 (arXiv 2405.04517), appendix A. Every exponent is a difference to m, the largest
logarithm of a weight so far, and so at most 0: nothing overflows however long a text is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """What the recurrence reads of each token; `write` and `forget` are log i and log f, -inf and 0 for padding."""

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    forget: Tensor


class State(NamedTuple):
    """C and n (G, K, V + 1) divided by e^m, and m (G)."""

    memory: Tensor
    m: Tensor


def by_chunks(tokens: Tokens, before: State | None, eps: float, size: int, *, keep: bool) -> tuple[Tensor, State]:
    """Returns what each token reads (G, T, V), and the state after the last one.

    Tokens within a chunk of `size` interact by masked products, and with earlier ones through the state, which is None
    at the start. Without `keep` the last chunk does not update the memory.
    """
    made, T = [], tokens.q.shape[1]
    memory, m = (None, tokens.forget.new_zeros(len(tokens.q))) if before is None else before
    for i, (q, k, v, write, forget) in enumerate(zip(*(x.split(size, 1) for x in tokens), strict=True)):
        total_GL = forget.cumsum(1)
        here_GL = write - total_GL  # the logarithm of a token's weight, as if nothing of the chunk had been forgotten
        largest_GL = torch.maximum(here_GL.cummax(1).values, m[:, None])
        scores = torch.bmm(q, k.transpose(1, 2)) * _weights(here_GL, largest_GL)
        read, kept_GL = torch.bmm(scores, v), (m[:, None] - largest_GL).exp()
        if memory is not None:
            read = torch.addcmul(read, torch.bmm(q, memory), kept_GL[..., None])
        made.append(_normalised(read, total_GL + largest_GL, eps))
        if keep or (i + 1) * size < T:
            written = torch.bmm((k * (here_GL - largest_GL[:, -1:]).exp()[..., None]).transpose(1, 2), v)
            memory = written if memory is None else torch.addcmul(written, memory, kept_GL[:, -1, None, None])
        m = total_GL[:, -1] + largest_GL[:, -1]
    return made[0] if len(made) == 1 else torch.cat(made, 1), State(memory, m)  # type: ignore[arg-type]


def _weights(here_GL: Tensor, largest_GL: Tensor) -> Tensor:
    """Returns (G, L, L): the weight of token s in what t reads, divided by e^m of t; 0 for s after t."""
    L = here_GL.shape[1]
    future = torch.ones(L, L, dtype=torch.bool, device=here_GL.device).triu_(1)
    return (here_GL[:, None, :] - largest_GL[:, :, None]).masked_fill_(future, -torch.inf).exp_()


def _normalised(read_GLW: Tensor, m_GL: Tensor, eps: float) -> Tensor:
    """Returns what is read of C, divided by what is read of n, whose absolute value is at least 1: e^-m as stored."""
    length_GL = torch.maximum(read_GLW[..., -1].abs(), (-m_GL).exp()) + eps
    return read_GLW[..., :-1] / length_GL[..., None]


def by_tokens(tokens: Tokens, before: State | None, eps: float) -> tuple[Tensor, State]:
    """Returns the same, token by token: f C + i k v^T is the memory, and q reads it."""
    q, k, v, write, forget = tokens
    G, T, K = q.shape
    memory, m = (q.new_zeros(G, K, v.shape[-1]), forget.new_zeros(G)) if before is None else before
    made = []
    for t in range(T):
        kept = forget[:, t] + m
        m = torch.maximum(kept, write[:, t])
        written = k[:, t, :, None] * v[:, t, None, :] * (write[:, t] - m).exp()[:, None, None]
        memory = memory * (kept - m).exp()[:, None, None] + written
        read = (q[:, t, :, None] * memory).sum(1)
        made.append(_normalised(read[:, None], m[:, None], eps))
    return torch.cat(made, 1), State(memory, m)
