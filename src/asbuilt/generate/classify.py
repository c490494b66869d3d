"""Labels of texts: what a classifier, a reward model or a reranker says of them, by the names that its config gives.

A reranker reads two texts at once, joined as its tokenizer joins them: `label_ids` takes their ids, and their types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asbuilt.checkpoint.load import as_source, headers, load
from asbuilt.checkpoint.source import Source
from asbuilt.errors import InputError
from asbuilt.generate.finite import require_vectors
from asbuilt.nn.model import Model
from asbuilt.spec import Classifier


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Scores of texts (n, labels) in float32, before a softmax or sigmoid, and the labels' names."""

    names: tuple[str, ...]
    scores: Tensor

    @property
    def best(self) -> list[str]:
        """The name of each text's highest score."""
        return [self.names[i] for i in self.scores.argmax(-1).tolist()]


def classify(source: Source | str | Path, texts: Sequence[str]) -> Labelled:
    """Returns the scores of each text, with its tokenizer's special tokens around it.

    Raises InputError for a model that does not label whole texts or has no tokenizer, for a text that is longer than
    its context, and for scores that are not finite.
    """
    source = as_source(source)
    head = _head(source)
    headers(source)  # raises if there are no weights
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer", field="MODEL", value=source.name, fix="give a folder with tokenizer.json")
    ids = [tokenizer.encode(text, wrap=True) for text in texts]
    for i, row in enumerate(ids):
        if not 1 <= len(row) <= source.spec.max_positions:
            allowed = f"1 to {source.spec.max_positions} tokens"
            raise InputError("does not fit the context", field=f"texts.{i}", value=len(row), allowed=allowed)
    named = source.reading.carried.get("id2label") or {}
    names = tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(head.n_labels))
    return Labelled(names=names, scores=label_ids(load(source, "float32"), ids))


@torch.inference_mode()
def label_ids(model: Model, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Returns the scores (n, labels) of lists of token ids, with each token's type if the model has types."""
    lengths = torch.tensor([len(row) for row in ids])
    longest = int(lengths.max())
    valid_BT = torch.arange(longest) < lengths[:, None]
    beside = {} if types is None else {"types_BT": _padded(types, longest)}
    scores = model(_padded(ids, longest), valid_BT=None if bool(valid_BT.all()) else valid_BT, **beside)
    require_vectors(scores, model, [f"text {i + 1}" for i in range(len(ids))])
    return scores


def _padded(rows: Sequence[Sequence[int]], longest: int) -> Tensor:
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


def _head(source: Source) -> Classifier:
    head = source.spec.head
    if not isinstance(head, Classifier) or head.per_token or "tokens" not in source.spec.reads:
        raise InputError(
            "does not label texts",
            field="MODEL",
            value=source.name,
            allowed="a model whose architectures is a class for sequence classification",
        )
    return head
