"""Tensor parallelism: ranks compute each layer together, each with its heads, columns and rows of the vocabulary.

A map whose rows are divided (`split` "out") needs nothing of the others; the results of one whose columns are divided
are summed over the ranks. What a divided body reads is the same on all ranks, and its gradient is summed: one sum
forward and one backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3). A mixture of experts is summed once too,
at its end: every rank routes all rows, and has columns of each expert. Of a weight inside that every rank has whole,
such as a norm of each head or a router's, every rank has a part of the gradient; they are summed once a step.

Shapes: rows N, width M, a rank's part of the vocabulary V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from asbuilt import spec
from asbuilt.nn.block import Branch
from asbuilt.nn.build import build, stored_tensors
from asbuilt.nn.embedding import TokenEmbedding
from asbuilt.nn.experts import MixtureOfExperts
from asbuilt.nn.head import Head
from asbuilt.nn.linear import Linear, Matrix
from asbuilt.nn.model import Model
from asbuilt.spec.part import stored_weights, walk
from asbuilt.train.many.extent import Extent, whole_of
from asbuilt.train.many.vocabulary import measured
from asbuilt.train.recompute import products_are_kept


class _Copied(torch.autograd.Function):
    """x forward; backward the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_reduced(d, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum of the ranks' x forward; backward the gradient, which is that of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return d, None


class _SummedProduct(torch.autograd.Function):
    """The sum of the ranks' x, which nothing else uses, in its place; backward the gradient, which is that of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        if not products_are_kept():
            dist.all_reduce(x.data, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return d, None


def _all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    made = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(made, group=group)
    return made


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns x, which all ranks have, as what each of them goes on with alone."""
    made = _Copied.apply(x, group)
    assert isinstance(made, Tensor)
    return made


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the sum of the ranks' x, which all of them have then."""
    made = _Summed.apply(x, group)
    assert isinstance(made, Tensor)
    return made


@torch.no_grad()
def share(model: Model, own: spec.Model, extents: dict[str, Extent]) -> Model:
    """Returns the model of `own`, with this rank's part of each weight; rows that pad a vocabulary are 0."""
    made, whole = build(own, dtype=model.dtype, device=model.device, seed=None), stored_tensors(model)
    for path, tensor in stored_tensors(made).items():
        extent = extents[path]
        if tensor.shape != extent.sizes:
            tensor.zero_()
        whole_of(extent.sizes).cut(tensor).copy_(extent.cut(whole[path]))
    return made


def compute_together(model: Model, whole: spec.Model, group: ProcessGroup) -> None:
    """Has a model of a rank's share of `whole` compute what the whole one does, with the other ranks of the group."""
    for path, body in _bodies(model, whole):
        body.register_forward_pre_hook(partial(_enter, group))
        if isinstance(body, MixtureOfExperts):
            body.register_forward_hook(partial(_leave, group))
        for name, one in _maps(whole.at(path)).items():
            linear = body.get_submodule(name)
            if one.plain.split == "in":
                assert isinstance(linear, Linear)
                linear.product = partial(_product, linear, group)  # type: ignore[method-assign]
    mine, head = model.spec, model.head
    if getattr(mine.embedding, "n_vocab", 0) < getattr(whole.embedding, "n_vocab", 0):
        assert isinstance(model.embedding, TokenEmbedding)
        model.embedding.rows = partial(_rows, model.embedding, group)  # type: ignore[method-assign]
    if isinstance(head, Head) and mine.n_vocab < whole.n_vocab:
        head.product = partial(_logits, head, group)  # type: ignore[method-assign]
        start = min(dist.get_rank(group) * mine.n_vocab, whole.n_vocab)
        model.measured = partial(measured, group=group, start=start, held=min(mine.n_vocab, whole.n_vocab - start))


def partial_weights(own: spec.Model, whole: spec.Model) -> list[str]:
    """Returns the paths of the weights in divided bodies that every rank has whole, but for biases after the sum."""
    bodies: list[str] = []
    after: set[str] = set()
    for at, part in walk(whole):
        if isinstance(part, spec.Branch) and part.body != own.at(f"{at}.body"):
            bodies.append(f"{at}.body.")
            after |= {f"{at}.body.{name}.bias" for name, one in _maps(part.body).items() if one.plain.split == "in"}
    shapes = {path: weight.shape for path, weight, _ in stored_weights(own)}
    return [
        path
        for path, weight, _ in stored_weights(whole)
        if weight.shape == shapes[path] and path.startswith(tuple(bodies)) and path not in after
    ]


def _maps(body: spec.Part) -> Mapping[str, spec.Map]:
    return body.maps if isinstance(body, spec.Mapped) else {}


def _bodies(model: Model, whole: spec.Model) -> Iterator[tuple[str, nn.Module]]:
    """Yields the bodies of branches that ranks divide."""
    for path, one in model.named_modules():
        if isinstance(one, Branch) and whole.at(f"{path}.body") != model.spec.at(f"{path}.body"):
            yield f"{path}.body", one.body


def _enter(group: ProcessGroup, body: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return copied(given[0], group), *given[1:]


def _leave(group: ProcessGroup, body: nn.Module, given: tuple[Any, ...], made: Tensor) -> Tensor:
    return summed(made, group)


def _product(of: Linear, group: ProcessGroup, x: Tensor) -> Tensor:
    # one matrix product, whose result selective checkpointing keeps: the sum, in place of this rank's part
    part = x.flatten(0, -2) @ of.weight.T
    made = _SummedProduct.apply(part, group)
    assert isinstance(made, Tensor)
    made = made.unflatten(0, x.shape[:-1])
    return made if of.bias is None else made + of.bias


def _rows(of: TokenEmbedding, group: ProcessGroup, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
    own_BT = tokens_BT - dist.get_rank(group) * len(of.weight)
    here_BT = (own_BT >= 0) & (own_BT < len(of.weight))
    x_BTM = of.table.rows(own_BT.where(here_BT, 0), dtype)
    return summed(x_BTM * here_BT[..., None], group)


def _logits(of: Head, group: ProcessGroup, x: Tensor, matrix: Matrix) -> Tensor:
    return matrix.product(copied(x, group), of.bias)
