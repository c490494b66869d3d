"""What one of several ranks holds of a model, and what cannot be divided, by name. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asbuilt import spec
from asbuilt.errors import InputError
from asbuilt.spec.part import Part, walk

# Parts that are divided only where what they contain is.
AROUND = (spec.Model, spec.Block, spec.Branch, spec.Linear, spec.HeadNorm)


def tensor_share(model: spec.Model, tensor: int, vocabulary: bool = True) -> spec.Model:
    """Returns what one of `tensor` ranks holds and computes of a model, as the parts say (`Part.shard`).

    Without `vocabulary` it has the whole embedding and head. Raises InputError naming what cannot be divided: sizes
    that are no multiples, and parts whose ranks would need more of each other than sums.
    """
    if tensor == 1:
        return model
    reads = {*model.reads} - {"tokens", "types"}
    if reads:
        raise _refused(tensor, f"the model reads {' and '.join(sorted(reads))} too")
    try:
        own = model.shard(tensor)
    except InputError as error:
        raise _refused(tensor, f"{error.field} = {error.value} must be {error.allowed}") from error
    if not vocabulary:
        own = replace(own, embedding=model.embedding, head=model.head)
    for path, part in walk(model):
        mine = own.at(path) if path else own
        if mine != part and (why := _reason(part, mine)):
            raise _refused(tensor, f"{path} ({type(part).__name__}): {why}")
    return own


def _refused(tensor: int, why: str) -> InputError:
    fix = "leave it at 1, or divide by parallel.shard alone"
    return InputError(why, field="parallel.tensor", value=tensor, fix=fix)


def _reason(part: Part, own: Part) -> str:
    """Returns why a part cannot be divided as `own`; empty if it can."""
    if isinstance(part, AROUND):
        return ""
    check = CHECKS.get(type(part))
    return "ranks cannot compute it together" if check is None else check(part, own)


def _attention(part: spec.Attention, own: spec.Attention) -> str:
    if part.n_kv_heads * own.n_heads != own.n_kv_heads * part.n_heads:
        return f"n_kv_heads = {part.n_kv_heads} must be a multiple of the ranks"
    for name in ("indexer", "differential"):
        if getattr(part, name) is not None:
            return f"{name} is not divided"
    if not isinstance(part.positions, spec.Rotary | None):
        return f"positions of the kind {type(part.positions).__name__} are not divided"
    for name in ("q_norm", "k_norm"):
        if isinstance(norm := getattr(part, name), spec.RMSNorm | spec.LayerNorm) and norm.d != part.d_head:
            return f"{name} is over all heads"
    return ""


def _gated(part: spec.GatedMLP, own: spec.GatedMLP) -> str:
    return "its sparsity is by the mean over all columns" if part.sparsity is not None else ""


def _embedding(part: spec.TokenEmbedding, own: spec.TokenEmbedding) -> str:
    return "rows beyond the vocabulary; parallel.vocabulary=false leaves it whole" if part.extra else ""


def _plain(part: Part, own: Part) -> str:
    return ""


CHECKS: dict[type[Part], Callable[[Any, Any], str]] = {
    spec.Attention: _attention,
    spec.MLP: _plain,
    spec.GatedMLP: _gated,
    spec.TokenEmbedding: _embedding,
    spec.Head: _plain,
    spec.TiedHead: _plain,
}
