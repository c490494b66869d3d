"""RWKV-7's delta rule: what is removed of a state, and at which rate, is chosen apart from what is written to it.

S_t = diag(w_t) S_(t-1) - e_t (c_t^T S_(t-1)) + k_t v_t^T and y_t = S_t^T q_t, with decays w per channel, a vector c
that reads what the state has for a token, and e that takes it away, which is c times a rate per channel. Peng et al.
2025 (arXiv 2503.14456), equations 13 to 17, the state transposed. With e = b k, c = w k and b v in place of v it is the
gated delta rule. Decays are given as logarithms g = log w <= 0, of which exp(-g) must not overflow: RWKV-7's are above
-0.61. Every other factor is the exponential of a difference that is at most 0, so no length of a text overflows.

Shapes as in `delta_rule`, with R = 1: q, c, e, k, g (B, T, K, D), v (B, T, K, 1, V), a state (G, D, V).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asbuilt.kernels.delta_rule import Span, chunks_of, decayed_scores, inverted


class Tokens(NamedTuple):
    """What the rule reads of every token."""

    q: Tensor
    c: Tensor
    e: Tensor
    k: Tensor
    v: Tensor
    g: Tensor

    def between(self, start: int, end: int) -> Tokens:
        """Returns some of the tokens."""
        return Tokens(*(x[:, start:end] for x in self))

    def prepared(self, size: int) -> Span:
        """Returns chunks of `size` tokens, ready for the scan of `delta_rule.by_chunks`.

        Within a chunk what is found, u_i = -c_i^T S_(i-1), solves (I + L) u = -(c^T S + M v), with L_ij = c_i . e_j and
        M_ij = c_i . k_j of decayed vectors for j < i, and the state S before the chunk.
        """
        q, c, e, k, v, g = (chunks_of(x, size) for x in self)
        sums = g.cumsum(2)
        # c reads the state before the decay of its own token
        reads, writes = torch.stack((c * (-g).exp(), q), 2), torch.stack((e, k), 2)
        del q, c, e, k, g
        known, seen = decayed_scores(reads, writes, sums).unbind(2)
        written = v[:, :, :, 0]
        end = sums[:, :, -1:]
        return Span(
            v=-(known[:, :, 1] @ written)[:, :, None],
            reads=(reads * sums.exp()[:, :, None]).flatten(2, 3),
            grown=None,
            inverse=inverted(known[:, :, 0])[:, :, None],
            scores=seen.transpose(2, 3).flatten(3)[:, :, None],
            keys=(writes * (end - sums).exp()[:, :, None]).flatten(2, 3).transpose(2, 3),
            left=None,
            decay=end.exp().transpose(2, 3)[..., None],
            written=written,
        )


def by_tokens(tokens: Tokens, state_GDV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (y (B, T, K, 1, V), the state after the last token), one token after the other."""
    q, c, e, k, v, g = tokens
    B, T, K, D = k.shape
    S = v.new_zeros(B, K, D, v.shape[-1]) if state_GDV is None else state_GDV.view(B, K, D, -1)
    made = []
    for t in range(T):
        found = c[:, t, :, None] @ S
        S = S * g[:, t, ..., None].exp() - e[:, t, ..., None] * found + k[:, t, ..., None] * v[:, t]
        made.append(q[:, t, :, None] @ S)
    return torch.stack(made, 1), S.flatten(0, 1)


def one_token(tokens: Tokens, state_GDV: Tensor | None, *, into: Tensor | None) -> Tensor:
    """Returns y (B, 1, K, 1, V) of one token after a state; the next state is written to `into`, if given.

    y = S_t^T q is computed from the earlier state: S^T (w q) - (q . e) S^T c + (q . k) v, so that it is read once.
    """
    q, c, e, k, v, g = (x.reshape(-1, 1, x.shape[-1]) for x in tokens)
    decay = g.exp()
    y, writes, values = (q * k).sum(-1, keepdim=True) * v, k, v
    if state_GDV is not None:
        found, before = torch.bmm(torch.cat((c, q * decay), 1), state_GDV).split(1, 1)
        y = y + before - (q * e).sum(-1, keepdim=True) * found
        writes, values = torch.cat((k, e), 1), torch.cat((v, -found), 1)
    if into is not None:
        with torch.no_grad():  # a cache has no gradient
            if state_GDV is not None:
                torch.mul(state_GDV, decay.transpose(1, 2), out=into)
            kept = float(state_GDV is not None)
            torch.baddbmm(into, writes.transpose(1, 2), values, beta=kept, out=into)
    return y.view(tokens.v.shape)
