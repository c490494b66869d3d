"""The gated delta rule: token by token as in its definition, and in chunks.

S_t = a_t S_(t-1) + k_t (b_t (v_t - (a_t S_(t-1))^T k_t))^T and y_t = S_t^T q_t, with a decay a_t per head, or per
channel of the keys. Yang et al. 2024 (arXiv 2412.06464), equation 10; per channel: Kimi Team 2025 (arXiv 2510.26692).
Decays are given as logarithms g = log a <= 0, and every factor is the exponential of a difference that is at most 0:
nothing can overflow, however strong the decay or long the text.

Shapes: batch B, tokens T, key heads K, value heads per key head R, key width D, value width V, key heads of all rows G,
chunks N, tokens of a chunk C. q and k (B, T, K, D), v (B, T, K, R, V), b (B, T, K, R), g (B, T, K, R), or per channel
(B, T, K, 1, D) with R = 1, a state (G, D, R * V).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from asbuilt.spec.delta_net import SPAN


class Tokens(NamedTuple):
    """What the rule reads of every token."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor

    @property
    def by_channel(self) -> bool:
        """Whether decays are per channel."""
        return self.g.ndim == 5

    def between(self, start: int, end: int) -> Tokens:
        """Returns some of the tokens."""
        return Tokens(*(x[:, start:end] for x in self))

    def prepared(self, size: int) -> Span:
        """Returns chunks of `size` tokens, ready for the scan."""
        return prepared(self, size)


class Readable(Protocol):
    """The tokens of a delta rule, of this one or another: values, and what prepares some of them."""

    @property
    def v(self) -> Tensor:
        """Values (B, T, K, R, V)."""
        ...

    def between(self, start: int, end: int) -> Self:
        """Returns some of the tokens."""
        ...

    def prepared(self, size: int) -> Span:
        """Returns chunks of `size` tokens, ready for the scan."""
        ...


def by_tokens(tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (y (B, T, K, R, V), the state after the last token), one token after the other."""
    q, k, v, g, b = tokens
    _, T, K, D = k.shape
    S = v.new_zeros(len(v), K, D, *v.shape[3:]) if state is None else state.view(-1, K, D, *v.shape[3:])
    made = []
    for t in range(T):
        S = S * (g[:, t].transpose(-1, -2)[..., None] if tokens.by_channel else g[:, t, :, None, :, None]).exp()
        key = k[:, t, :, :, None, None]
        error = v[:, t] - (S * key).sum(2)
        S = S + key * (b[:, t, ..., None] * error)[:, :, None]
        made.append((S * q[:, t, :, :, None, None]).sum(2))
    return torch.stack(made, 1), S.flatten(3).flatten(0, 1)


def one_token(tokens: Tokens, state_GDW: Tensor | None, *, into: Tensor | None) -> Tensor:
    """Returns y (B, 1, K, R, V) of one token after a state; the next state is written to `into`, if given.

    y = S^T q is computed from the earlier state: a S^T q + (k . q) b (v - a S^T k), so that the state is read once.
    """
    B, _, K, D = tokens.k.shape
    q, k = (x.reshape(B * K, 1, D) for x in (tokens.q, tokens.k))
    v, b = tokens.v.reshape(B * K, *tokens.v.shape[3:]), tokens.b.reshape(B * K, -1, 1)
    decay = tokens.g.exp().reshape(B * K, *((D, 1) if tokens.by_channel else (1, -1)))
    read = torch.cat((k, q), 1)
    if state_GDW is None:
        error, before = v, None
    else:
        reading = read * decay.transpose(1, 2) if tokens.by_channel else read
        known, before = torch.bmm(reading, state_GDW).view(B * K, 2, *v.shape[1:]).unbind(1)
        if not tokens.by_channel:
            known, before = known * decay.transpose(1, 2), before * decay.transpose(1, 2)
        error = v - known
    new = error * b
    y = new * (q * k).sum(-1, keepdim=True)
    if into is not None:
        with torch.no_grad():  # a cache has no gradient
            if state_GDW is not None:
                torch.mul(state_GDW.unflatten(2, v.shape[1:]), decay[..., None], out=into.unflatten(2, v.shape[1:]))
            kept = float(state_GDW is not None)
            torch.baddbmm(into, k.transpose(1, 2), new.flatten(1)[:, None], beta=kept, out=into)
    return (y if before is None else y + before).view(B, 1, K, *v.shape[1:])


def by_chunks(tokens: Readable, state_GDW: Tensor | None, size: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Returns (y (B, T, K, R, V), the final state): chunks of `size` tokens, the last one padded, one after the other.

    Within a chunk the errors b (v - S^T k) of all tokens solve a triangular system, which is inverted for several
    chunks at once; chunks then interact through the state. `size` is a power of two. Without `keep` the state after the
    last chunk is not computed.
    """
    B, T, K, R, V = tokens.v.shape
    y = tokens.v.new_empty(B, -(-T // size), size, K, R, V)
    for start in range(0, T, SPAN * size):
        last = start + SPAN * size >= T
        span = tokens.between(start, start + SPAN * size).prepared(size)
        place = y[:, start // size :].permute(1, 0, 3, 4, 2, 5)
        state_GDW = _scan(span, state_GDW, place, keep=keep or not last)
        del span  # before the next one is prepared
    y = y.flatten(1, 2)
    return (y[:, :T].clone() if T % size else y), state_GDW  # a view would keep the padding alive


class Span(NamedTuple):
    """Several chunks, ready for the scan.

    `reads` (G, N, 2C, D) are keys and queries that read the state before the chunk, `grown` (G, N, R, 2, C, 1) the
    decays of what they read (None: in `reads`); `inverse` and `scores` (G, N, R, C, C) give the errors of a chunk, and
    what its queries read of them; `keys` (G, N, D, C) write them with the decays `left` (G, N, R, C, 1) (None: in
    `keys`) to a state decayed by `decay` (G, N, 1 or D, R, 1). With values that are `written` (G, N, C, V) as they are,
    for which R is 1, `scores` (G, N, 1, C, 2C) and `keys` (G, N, D, 2C) are those of errors, then those of values.
    """

    v: Tensor
    reads: Tensor
    grown: Tensor | None
    inverse: Tensor
    scores: Tensor
    keys: Tensor
    left: Tensor | None
    decay: Tensor
    written: Tensor | None = None


def prepared(tokens: Tokens, size: int) -> Span:
    """Returns the chunks of up to a span of tokens."""
    q, k, v, g, b = (chunks_of(x, size) for x in tokens)
    v, b = v.transpose(2, 3).contiguous(), b.transpose(2, 3)
    both = torch.cat((k, q), 2)
    if tokens.by_channel:
        sums = g[:, :, :, 0].cumsum(2)
        reads = both.unflatten(2, (2, size))
        scores = decayed_scores(reads, reads[:, :, :1], sums)[:, :, :, 0][:, :, None]
        end = sums[:, :, -1:]
        reads, grown = both * sums.exp().repeat(1, 1, 2, 1), None
        keys, left, decay = k * (end - sums).exp(), None, end.exp().transpose(2, 3)[..., None]
    else:
        sums = g.transpose(2, 3).cumsum(3)
        between = sums[..., :, None] - sums[..., None, :]
        later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
        factors = between.masked_fill(later, -torch.inf).exp()
        scores = (both @ k.transpose(2, 3)).unflatten(2, (2, size))[:, :, None] * factors[:, :, :, None]
        end = sums[..., -1:]
        reads, grown = both, sums.exp()[:, :, :, None, :, None]
        keys, left, decay = k, (end - sums).exp()[..., None], end.exp()[:, :, None]
    known, seen = scores.unbind(3)
    inverse = inverted(known.tril(-1) * b[..., None]) * b[..., None, :]
    return Span(v, reads, grown, inverse, seen, keys.transpose(2, 3), left, decay)


def chunks_of(x: Tensor, size: int) -> Tensor:
    """Returns (G, N, C, ...) of tokens (B, T, K, ...), padded with zeros: without keys they change nothing."""
    short = -x.shape[1] % size
    if short:
        x = torch.cat((x, x.new_zeros(len(x), short, *x.shape[2:])), 1)
    return x.unflatten(1, (-1, size)).movedim(3, 1).flatten(0, 1)


def _scan(span: Span, state_GDW: Tensor | None, y_NBKRCV: Tensor, *, keep: bool) -> Tensor | None:
    """Writes what the queries of several chunks read, and returns the final state."""
    G, N, R, C, V = span.v.shape
    for i in range(N):
        errors, read = span.v[:, i], None
        if state_GDW is not None:
            both = torch.bmm(span.reads[:, i], state_GDW).view(G, 2, C, R, V).permute(0, 3, 1, 2, 4)
            known, read = (both if span.grown is None else both * span.grown[:, i]).unbind(2)
            errors = errors - known
        errors = torch.bmm(span.inverse[:, i].reshape(G * R, C, C), errors.reshape(G * R, C, V))
        if span.written is not None:
            errors = torch.cat((errors, span.written[:, i]), 1)
        scores = span.scores[:, i].flatten(0, 1)
        y = torch.bmm(scores, errors) if read is None else torch.baddbmm(read.reshape(G * R, C, V), scores, errors)
        y_NBKRCV[i].copy_(y.view(y_NBKRCV.shape[1:]))
        if keep or i < N - 1:
            new = errors.view(G, R, -1, V)
            new = (new if span.left is None else new * span.left[:, i]).transpose(1, 2).flatten(2)
            if state_GDW is None:
                state_GDW = torch.bmm(span.keys[:, i], new)
            else:
                old = (state_GDW.view(G, -1, R, V) * span.decay[:, i]).view_as(state_GDW)
                into = None if torch.is_grad_enabled() else old
                state_GDW = torch.baddbmm(old, span.keys[:, i], new, out=into)
    return state_GDW


def decayed_scores(reads: Tensor, writes: Tensor, sums: Tensor) -> Tensor:
    """Returns x_i . (a_i y_j) for j < i, and for the second reads j = i too, of the decays a_i = exp(sums_i - sums_j).

    `reads` (G, N, 2, C, D) are the vectors x that read earlier tokens, then those that read their own too, as queries
    do; `writes` (G, N, W, C, D) are W sets of vectors y; `sums` (G, N, C, D) of log decays per channel; the result is
    (G, N, 2, W, C, C). The scores of the second half of a run of tokens with the first are one product, of decays from
    the end of the first half and up to it, none above 1; then those of each half's own halves.
    """
    G, N, _, C, D = reads.shape
    W = writes.shape[2]
    scores = reads.new_zeros(G * N, 2, W, C, C)
    scores[:, 1].diagonal(dim1=2, dim2=3).copy_((reads[:, :, 1:] * writes).sum(-1).flatten(0, 1))
    for half in _halves(C):
        gone = sums.view(G * N, -1, 2, half, D)
        middle = gone[:, :, 0, -1:]
        late = reads.view(G * N, 2, -1, 2, half, D)[:, :, :, 1] * (gone[:, None, :, 1] - middle[:, None]).exp()
        early = writes.view(G * N, W, -1, 2, half, D)[:, :, :, 0] * (middle - gone[:, :, 0]).exp()[:, None]
        late, early = (x.transpose(1, 2).reshape(-1, x.shape[1] * half, D) for x in (late, early))
        low = torch.bmm(late, early.transpose(1, 2)).view(G * N, -1, 2, half, W, half)
        place = _blocks(scores.flatten(0, 2), half)[:, :, 1, 0]
        place.copy_(low.permute(0, 2, 4, 1, 3, 5).flatten(0, 2))
    return scores.view(G, N, 2, W, C, C)


def inverted(lower: Tensor) -> Tensor:
    """Returns (I + L)^-1 of strictly lower triangular L (..., C, C), by inverses of blocks of twice the size each time.

    [[A, 0], [L, D]]^-1 = [[A^-1, 0], [-D^-1 L A^-1, D^-1]]: substitution block by block, without powers of L, whose
    entries grow as binomials and cancel.
    """
    C = lower.shape[-1]
    flat = lower.reshape(-1, C, C)
    inverse = torch.eye(C, dtype=flat.dtype, device=flat.device).repeat(len(flat), 1, 1)
    for half in _halves(C):
        low, made = _blocks(flat, half)[:, :, 1, 0], _blocks(inverse, half)
        if half > 1:  # else A and D are 1
            first, second = (made[:, :, i, i].reshape(-1, half, half).contiguous() for i in (0, 1))
            low = torch.bmm(torch.bmm(second, low.reshape(-1, half, half)), first).view_as(low)
        made[:, :, 1, 0].copy_(-low)
    return inverse.view_as(lower)


def _halves(size: int) -> list[int]:
    """Returns 1, 2, 4, ..., half of a power of two."""
    return [1 << i for i in range(size.bit_length() - 1)]


def _blocks(x: Tensor, half: int) -> Tensor:
    """Returns a view (X, blocks, 2, 2, half, half) of the diagonal blocks of (X, C, C), each as its four quarters."""
    n = x.shape[-1] // (2 * half)
    return x.view(len(x), n, 2, half, n, 2, half).diagonal(dim1=1, dim2=4).permute(0, 5, 1, 3, 2, 4)
