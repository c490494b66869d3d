"""N-gram embeddings. Shapes: batch B, new tokens T, model width M, tokens of an n-gram N."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asbuilt.nn.cache import StateCache
from asbuilt.nn.convolution import together
from asbuilt.nn.linear import Linear, Matrix, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import ngrams as spec


@computes(spec.HashedTable)
class HashedTable(PartModule):
    """Looks up the row that a token and those before it choose, and maps it to the model's width."""

    weight: Tensor
    project: Linear

    def __init__(self, part: spec.HashedTable, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, before: list[Tensor], n_vocab: int, dtype: torch.dtype) -> Tensor:
        """Returns (B, T, M); `before[i]` are the ids (B, T) of the tokens i before each."""
        rows_BT = hashed(before[: self.part.n], n_vocab, self.part.n_rows)
        return self.project(Matrix(self.weight).rows(rows_BT, dtype))


@computes(spec.NGrams)
class NGrams(nn.Module):
    """The mean of the token's vector and what the tables give."""

    def __init__(self, part: spec.NGrams, path: str) -> None:
        super().__init__()
        self.part, self.path = part, path
        self.tables = nn.ModuleList(HashedTable(one, f"{path}.tables.{i}") for i, one in enumerate(part.tables))

    def forward(self, x_BTM: Tensor, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M) of the tokens' own vectors."""
        before = self.before(tokens_BT, step)
        for table in self.tables:
            x_BTM = x_BTM + table(before, self.part.n_vocab, step.dtype)
        return x_BTM / (1 + len(self.tables))

    def before(self, tokens_BT: Tensor, step: Step) -> list[Tensor]:
        """Returns N tensors (B, T): the tokens, those before them and so on; stores the last ones.

        A ragged batch is read with each row's valid tokens moved together.
        """
        n, (B, T), valid = self.part.n, tokens_BT.shape, step.valid_BT
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        kept = tokens_BT.new_zeros(B, n - 1)
        if layer is not None and any(step.past):
            kept = layer.read()[0].to(tokens_BT.dtype)
        order = places = counts = None
        if valid is not None:
            order, places, counts = step.once("valid tokens first", lambda: together(valid))
        text = torch.cat((kept, tokens_BT if order is None else tokens_BT.gather(1, order)), 1)
        if layer is not None:
            last = torch.arange(n - 1, device=text.device)
            layer.write((text[:, T:] if counts is None else text.gather(1, counts + last),))
        found = within([text[:, n - 1 - i : n - 1 - i + T] for i in range(n)], self.part.boundary)
        return found if places is None else [one.gather(1, places) for one in found]


def within(before: list[Tensor], boundary: int | None) -> list[Tensor]:
    """Returns the ids, 0 for those of a text before the token's own, which ends in `boundary`."""
    if boundary is None:
        return before
    found, same = before[:1], torch.ones_like(before[0], dtype=torch.bool)
    for ids in before[1:]:
        same = same & (ids != boundary)
        found.append(ids * same)
    return found


def hashed(before: list[Tensor], n_vocab: int, n_rows: int) -> Tensor:
    """Returns (sum of before[i] n_vocab^i) mod n_rows, in whole numbers that stay below 2^63."""
    total = before[0]
    for i, ids in enumerate(before[1:], 1):
        total = total + ids * pow(n_vocab, i, n_rows)
    return total % n_rows
