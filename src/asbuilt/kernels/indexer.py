"""Choosing keys: an indexer's scores, and the keys of the largest ones.

Shapes: batch B, tokens T, keys S, heads H, width D, blocks of keys N.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.spec.indexer import QUERIES


def index_scores(q_BTHD: Tensor, k_BSD: Tensor, weight_BTH: Tensor) -> Tensor:
    """Returns sum over heads of weight relu(q . k), (B, T, S), in float32 or wider, a few queries at a time."""
    wide = torch.promote_types(q_BTHD.dtype, torch.float32)
    keys_BDS = k_BSD.to(wide).transpose(1, 2)
    made = []
    for q, weight in zip(q_BTHD.split(QUERIES, 1), weight_BTH.split(QUERIES, 1), strict=True):
        scores = torch.bmm(q.to(wide).flatten(1, 2), keys_BDS).relu_().view(*q.shape[:3], -1)
        made.append(torch.matmul(weight.to(wide)[:, :, None], scores)[:, :, 0])
    return made[0] if len(made) == 1 else torch.cat(made, 1)


def reference_scores(q_BTHD: Tensor, k_BSD: Tensor, weight_BTH: Tensor) -> Tensor:
    """Returns the same, as in the definition."""
    return torch.einsum("bths,bth->bts", torch.einsum("bthd,bsd->bths", q_BTHD, k_BSD).relu(), weight_BTH)


def block_scores(q_BTHD: Tensor, k_BSD: Tensor, seen_BTS: Tensor, block: int) -> Tensor:
    """Returns the largest q . k of each block of keys that are seen, (B, T, H, N), in float32 or wider; -inf of none.

    A few queries at a time.
    """
    wide = torch.promote_types(q_BTHD.dtype, torch.float32)
    keys_BDS = k_BSD.to(wide).transpose(1, 2)
    short, made = -k_BSD.shape[1] % block, []
    for q, seen in zip(q_BTHD.split(QUERIES, 1), seen_BTS.split(QUERIES, 1), strict=True):
        scores = torch.bmm(q.to(wide).flatten(1, 2), keys_BDS).view(*q.shape[:3], -1)
        scores.masked_fill_(~seen[:, :, None], -torch.inf)
        padded = F.pad(scores, (0, short), value=-torch.inf) if short else scores
        made.append(padded.unflatten(-1, (-1, block)).amax(-1))
    return made[0] if len(made) == 1 else torch.cat(made, 1)


def chosen_blocks(scores_BTHN: Tensor, own_BT: Tensor, top_k: int, local: int) -> Tensor:
    """Returns which `top_k` blocks are chosen, (B, H, T, N): those of the largest scores beside `local` ones.

    These are the query's own block and those before it.
    """
    near = (own_BT[:, :, None] - torch.arange(local, device=own_BT.device)).clamp(min=0)
    near = near[:, :, None].expand(*scores_BTHN.shape[:3], local)
    return largest(scores_BTHN.scatter(-1, near, torch.inf), top_k).transpose(1, 2)


def largest(scores_BTS: Tensor, top_k: int) -> Tensor:
    """Returns which are the `top_k` largest scores of each query, (B, T, S); of equal ones the first.

    A sort would order equal scores too, but takes longer; `topk` alone chooses among them as it likes, by the number of
    keys. Scores of -inf are never chosen.
    """
    if scores_BTS.shape[-1] <= top_k:
        return scores_BTS > -torch.inf
    least = scores_BTS.topk(top_k, dim=-1).values[..., -1:]
    above, equal = scores_BTS > least, (scores_BTS == least) & (least > -torch.inf)
    left = top_k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left))


def places(chosen_BTS: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns the places of the chosen keys, (B, T, top_k), and which of these are chosen, if there are fewer."""
    index = chosen_BTS.to(torch.uint8).topk(min(top_k, chosen_BTS.shape[-1]), dim=-1, sorted=False).indices
    return index, chosen_BTS.gather(-1, index)
