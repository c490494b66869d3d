"""The loss in chunks is the loss of whole logits, and never holds them."""

from __future__ import annotations

import math
import random
from typing import Any

import strategies
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asbuilt import build, decoder
from asbuilt.nn.model import Model
from asbuilt.spec import LanguageModel
from asbuilt.train.batch import IGNORED, Batch
from asbuilt.train.loss import loss_of


def drawn(model: Model, batch: int, tokens: int, ignored: float = 0.0) -> Batch:
    ids, targets = (torch.randint(model.spec.n_vocab, (batch, tokens)) for _ in range(2))
    return Batch(ids=ids, targets=targets.masked_fill(torch.rand(batch, tokens) < ignored, IGNORED))


def dense(model: Model, batch: Batch, z: float) -> Tensor:
    """The same, of all logits at once, each term by its definition."""
    log_p = model(batch.ids, **batch.inputs).log_softmax(-1)
    logits = model(batch.ids, **batch.inputs)
    terms = [
        -log_p[b, t, target] + z * logits[b, t].exp().sum().log() ** 2
        for b, row in enumerate(batch.targets.tolist())
        for t, target in enumerate(row)
        if target != IGNORED
    ]
    return torch.stack(terms).sum() if terms else logits.sum() * 0.0


def gradients(model: Model, total: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    total.backward()
    return {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}


@given(strategies.specs(), st.integers(1, 9), st.sampled_from((0.0, 0.01)), st.sampled_from((0.0, 0.5)), SEEDS)
def test_chunks_sum_to_the_whole(spec: LanguageModel, rows: int, z: float, ignored: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = build(spec, dtype=torch.float64, seed=seed)
    batch = drawn(model, 2, 5, ignored)
    made = loss_of(model, batch, z=z, rows=rows)
    expected = dense(model, batch, z)
    torch.testing.assert_close(made.total, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(made.nats, dense(model, batch, 0.0).detach(), rtol=1e-9, atol=1e-9)
    ours, theirs = gradients(model, made.total), gradients(model, expected)
    for path, whole in theirs.items():
        torch.testing.assert_close(ours.get(path, torch.zeros_like(whole)), whole, rtol=1e-8, atol=1e-9, msg=path)


def test_float32_gradients_differ_by_rounding_alone() -> None:
    n_vocab = random.randint(500, 900)
    model = build(decoder(d_model=32, n_layers=1, n_heads=2, n_vocab=n_vocab, tied=random.random() < 0.5))
    batch = drawn(model, 3, 40)
    loss = loss_of(model, batch, rows=17).total / batch.counted
    ours = gradients(model, loss)
    expected = F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten())
    assert abs(float((loss - expected).detach())) < 1e-5
    for path, whole in gradients(model, expected).items():
        assert float((ours[path] - whole).abs().max()) < 1e-5, path


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that any call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(t.numel() for t in tree_leaves(out) if _is(t))])
        return out


def _is(value: object) -> bool:
    return isinstance(value, Tensor)


def test_no_tensor_has_tokens_times_vocabulary() -> None:
    n_vocab, rows = random.randint(3000, 4000), random.randint(2, 9)
    model = build(decoder(d_model=8, n_layers=1, n_heads=2, n_vocab=n_vocab))
    batch = drawn(model, 2, 50)
    with Largest() as seen:
        loss_of(model, batch, z=1e-4, rows=rows).total.backward()
    assert seen.found == n_vocab * max(rows, 8)  # a chunk's logits, or the matrix of the head
    with Largest() as seen:
        F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten()).backward()
    assert seen.found == n_vocab * batch.counted


def test_a_new_model_knows_nothing() -> None:
    """The initial loss is ln V within 0.05, unless a tied head sees its own inputs as targets."""
    for n_vocab in (256, 50257):
        model = build(decoder(d_model=64, n_layers=2, n_heads=4, n_vocab=n_vocab), seed=random.randrange(2**31))
        batch = drawn(model, 4, 32)
        with torch.no_grad():
            assert abs(float(loss_of(model, batch).nats) / batch.counted - math.log(n_vocab)) < 0.05
    tied = build(decoder(d_model=256, n_layers=2, n_heads=4, n_vocab=256, tied=True), seed=random.randrange(2**31))
    with torch.no_grad():
        same = Batch(ids=batch.ids % 256, targets=batch.ids % 256)
        assert float(loss_of(tied, same).nats) / same.counted < math.log(256) - 0.5
