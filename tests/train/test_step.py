"""A step: accumulation, clipping, groups, schedules, and what stops it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asbuilt import InputError, build, decoder
from asbuilt.nn.model import Model
from asbuilt.spec import LanguageModel
from asbuilt.train.batch import IGNORED, Batch
from asbuilt.train.loss import loss_of
from asbuilt.train.optimizer import optimizers
from asbuilt.train.schedule import SHAPES, Schedule
from asbuilt.train.settings import Name, Optimizer
from asbuilt.train.step import NotFinite, evaluate, train_step


def small() -> LanguageModel:
    return decoder(d_model=16, n_layers=2, n_heads=2, n_vocab=31)


def drawn(rows: int, ignored: float = 0.0) -> Batch:
    ids, targets = (torch.randint(31, (rows, 7)) for _ in range(2))
    return Batch(ids=ids, targets=targets.masked_fill(torch.rand(rows, 7) < ignored, IGNORED))


def joined(batches: list[Batch]) -> Batch:
    return Batch(ids=torch.cat([b.ids for b in batches]), targets=torch.cat([b.targets for b in batches]))


def test_accumulated_batches_of_unequal_counts_equal_one_batch() -> None:
    batches = [drawn(n, ignored) for n, ignored in ((1, 0.9), (3, 0.1), (2, 0.5))]
    seed = random.randrange(2**31)
    apart, together = (build(small(), dtype=torch.float64, seed=seed) for _ in range(2))
    given = Optimizer(name="sgd", lr=0.5, weight_decay=0.0)
    first = train_step(apart, batches, optimizers(apart, given))
    second = train_step(together, [joined(batches)], optimizers(together, given))
    assert first.tokens == second.tokens == sum(int((b.targets != IGNORED).sum()) for b in batches)
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    assert first.gradient_norm == pytest.approx(second.gradient_norm, rel=1e-9)
    for one, other in zip(apart.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def loss(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten())


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping_scales_gradients_to_the_norm(share: float) -> None:
    model, batch = build(small(), dtype=torch.float64, seed=random.randrange(2**31)), drawn(4)
    old = [p.detach().clone() for p in model.parameters()]
    whole = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in whole))
    made = train_step(
        model, [batch], optimizers(model, Optimizer(name="sgd", lr=0.1, weight_decay=0)), clip=norm * share
    )
    assert made.gradient_norm == pytest.approx(norm, rel=1e-9)
    factor = min(1.0, share * norm / (norm + 1e-6))  # torch adds 1e-6 to the norm
    for p, before, g in zip(model.parameters(), old, whole, strict=True):
        torch.testing.assert_close(p.detach(), before - 0.1 * factor * g, rtol=1e-9, atol=1e-12)


def test_only_the_declared_roles_decay() -> None:
    """With no gradient to speak of AdamW's step shrinks a decayed weight by lr * decay, and leaves the others."""
    for decayed in (("matrix",), ("matrix", "table"), ()):
        model = build(small(), seed=random.randrange(2**31))
        old = {path: p.detach().clone() for path, p in model.named_parameters()}
        made = optimizers(model, Optimizer(lr=0.1, weight_decay=0.5, decayed=decayed))  # type: ignore[arg-type]
        for p in made.parameters:
            p.grad = torch.zeros_like(p)
        made.step(0.5)
        for path, p in model.named_parameters():
            role = "gain" if "norm" in path else "table" if path.startswith("embedding") else "matrix"
            factor = 1 - 0.05 * 0.5 if role in decayed else 1.0
            torch.testing.assert_close(p.detach(), old[path] * factor, msg=path)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd"])
def test_every_optimizer_lowers_the_loss_of_a_batch(name: str) -> None:
    model, batch = build(small(), seed=random.randrange(2**31)), drawn(4)
    lr = {"adamw": 0.01, "muon": 0.01, "sgd": 0.3, "adafactor": 0.1}[name]
    made = optimizers(model, Optimizer(name=name, lr=lr))  # type: ignore[arg-type]
    assert len({id(p) for p in made.parameters}) == len(list(model.parameters()))
    losses = [train_step(model, [batch], made, clip=1.0).loss for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert evaluate(model, [batch]) == pytest.approx(float(loss(model, batch).detach()), abs=1e-5)


@given(st.integers(2, 500), st.integers(0, 100), st.floats(0, 1), st.floats(0.01, 1), st.sampled_from(SHAPES))
def test_schedules_by_their_definitions(steps: int, warmup: int, final: float, decay: float, shape: str) -> None:
    made = Schedule(shape=shape, warmup=warmup, final=final, decay=decay)  # type: ignore[arg-type]
    factors = [made.factor(step, steps) for step in range(steps)]
    for i, factor in enumerate(factors[:warmup]):
        assert factor == pytest.approx((i + 1) / warmup)
    rest = factors[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rest))
    if len(rest) < 2:
        return
    assert rest[0] == pytest.approx(1.0) or (shape == "wsd" and warmup > (1 - decay) * steps - 2)
    assert rest[-1] == pytest.approx(1.0 if shape == "constant" else final)
    if shape in ("cosine", "linear") and len(rest) % 2:
        assert rest[len(rest) // 2] == pytest.approx((1 + final) / 2)
    if shape == "wsd":
        flat = steps - max(1, round(decay * steps))
        assert all(f == pytest.approx(1.0) for f in factors[warmup:flat])


def test_nan_stops_before_the_update_and_names_the_tensor() -> None:
    model, batch = build(small()), drawn(2)
    made = optimizers(model, Optimizer())
    path, broken = random.choice([(n, p) for n, p in model.named_parameters() if "blocks" in n])
    with torch.no_grad():
        broken.flatten()[0] = math.nan
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NotFinite) as caught:
        train_step(model, [batch], made)
    assert caught.value.tensor == path
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().nan_to_num(7.0), old[name].nan_to_num(7.0))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": "adam"}, "optimizer.name"),
        ({"decayed": ("gian",)}, "optimizer.decayed"),
        ({"lr": -1.0}, "optimizer.lr"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=field):
        Optimizer(**given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"schedule\.shape"):
        Schedule(shape="cosin")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_clipping_divides_every_gradient(name: Name) -> None:
    """Also where the optimizer's kernel does it: gradients and weights are those of PyTorch's clipping before it.

    The second step is not clipped: its update shows what the first one left in the state.
    """
    found, share = [], random.uniform(0.01, 0.1)
    for library in (False, True):
        model = build(small(), seed=5)
        optimizer = optimizers(model, Optimizer(name=name, lr=0.01))
        ids = torch.arange(24).remainder(31).view(2, 12)
        batch = Batch(ids=ids, targets=ids.flip(1))
        for clip in (share, 0.0):
            if library:
                optimizer.zero_grad()
                (loss_of(model, batch).total / batch.counted).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
                assert norm > clip
                optimizer.step()
            else:
                train_step(model, [batch], optimizer, clip=clip)
        found.append({p: (x.detach(), x.grad) for p, x in model.named_parameters() if x.grad is not None})
    for path, pair in found[0].items():
        torch.testing.assert_close(pair, found[1][path], rtol=1e-4, atol=1e-6, msg=path)
