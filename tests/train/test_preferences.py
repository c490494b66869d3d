"""Direct preference optimisation, against its formula in plain torch."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import small_chats
import torch
import torch.nn.functional as F
from small_chats import assistant, recipe, spelt, user
from torch import Tensor

from asbuilt import build, decoder
from asbuilt.nn.model import Model
from asbuilt.train import loop
from asbuilt.train.batch import IGNORED, Preferences
from asbuilt.train.chats import Pair
from asbuilt.train.data import PairData
from asbuilt.train.preferences import preference_loss
from asbuilt.train.step import evaluate


def drawn(n_vocab: int, pairs: int, tokens: int, smoothing: float) -> Preferences:
    """Pairs of answers of different lengths, with padding."""
    ids = torch.randint(n_vocab, (2 * pairs, tokens + 1))
    targets = ids[:, 1:].clone()
    valid = torch.ones_like(targets, dtype=torch.bool)
    for i in range(2 * pairs):
        first, last = random.randint(1, tokens - 2), random.randint(tokens - 1, tokens)
        targets[i, :first] = IGNORED
        targets[i, last:] = IGNORED
        valid[i, last:] = False
    reference = -30 * torch.rand(2 * pairs, dtype=torch.float64)
    return Preferences(
        ids=ids[:, :-1],
        targets=targets,
        valid=valid,
        reference=reference,
        beta=random.uniform(0.05, 0.5),
        smoothing=smoothing,
    )


def by_hand(model: Model, batch: Preferences) -> Tensor:
    """The sum over pairs of -(1 - s) ln sigmoid(h) - s ln sigmoid(-h), each written as ln(1 + e^-h)."""
    scores = model(batch.ids, valid_BT=batch.valid).log_softmax(-1)
    total = scores.new_zeros(())
    n = len(batch.ids) // 2
    for pair in range(n):
        said = []
        for row in (pair, n + pair):
            places = [t for t in range(batch.ids.shape[1]) if batch.targets[row, t] != IGNORED]
            said.append(sum(scores[row, t, batch.targets[row, t]] for t in places) - batch.reference[row])
        margin = batch.beta * (said[0] - said[1])
        s = batch.smoothing
        total = total + (1 - s) * torch.log1p(torch.exp(-margin)) + s * torch.log1p(torch.exp(margin))
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("rows", [None, 3])
def test_loss_and_gradients_are_those_of_the_formula(smoothing: float, rows: int | None) -> None:
    spec = decoder(d_model=16, n_layers=2, n_heads=2, n_vocab=23, max_positions=32)
    model = build(spec, dtype=torch.float64, seed=random.randrange(99))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    batch = drawn(23, 3, 9, smoothing)
    want = by_hand(model, batch)
    grads = torch.autograd.grad(want, list(model.parameters()))
    made = preference_loss(model, batch, rows=rows)
    torch.testing.assert_close(made.total, want, rtol=1e-9, atol=1e-9)
    assert torch.equal(made.nats, made.total.detach())
    for one, other in zip(torch.autograd.grad(made.total, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_starts_at_ln_2_and_prefers_what_was_chosen(kind: str, tmp_path: Path) -> None:
    """The mean over pairs, whatever their lengths; after the run the chosen answers have gained on the others."""
    file = small_chats.preferences(tmp_path)
    changes = (f"data.preferences={file}", "run.steps=25", "step.accumulate=2", "optimizer.lr=0.01")
    one = loop.prepare(recipe(tmp_path, "run", *changes, kind=kind, beta=0.3))
    batch = one.data.batch(0)
    assert isinstance(batch, Preferences)
    assert math.isclose(evaluate(one.model, [batch]), math.log(2), abs_tol=1e-5)
    assert math.isclose(evaluate(one.model, list(one.data.validation())), math.log(2), abs_tol=1e-5)
    first = one.step()
    assert math.isclose(first.loss, math.log(2), abs_tol=1e-5)
    counted = [int((one.data.batch(i).targets != IGNORED).sum()) for i in range(2)]
    assert first.tokens == sum(counted)
    assert [one.step().loss for _ in range(24)][-1] < 0.5 * math.log(2)
    gained, wanted = evaluate(one.model, [batch]), by_hand(one.model, batch) / 2
    assert math.isclose(gained, float(wanted.detach()), rel_tol=1e-4, abs_tol=1e-5)


def test_the_reference_is_the_checkpoint_s_own(tmp_path: Path) -> None:
    """ln p of both answers, from transformers; of the pairs that are read, and only those."""
    file = small_chats.preferences(tmp_path, 6)
    usual = (f"data.preferences={file}", "data.validation=0", "data.batch=1")
    one = loop.prepare(recipe(tmp_path, "run", *usual, kind="lora"))
    theirs = small_chats.theirs(tmp_path / "base")
    assert isinstance(one.data, PairData)
    pairs: list[Pair] = list(one.data.pairs)
    said = [json.loads(line) for line in file.read_text().splitlines()]
    for pair, line in zip(pairs, said, strict=True):
        for found, answer in zip(pair.reference, (line["chosen"], line["rejected"]), strict=True):
            ids, answers = spelt(tmp_path / "base", [user(line["prompt"]), assistant(answer)])
            with torch.no_grad():
                scores = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
            want = sum(float(scores[t, ids[t + 1]]) for t in range(len(ids) - 1) if answers[t + 1])
            assert math.isclose(found, want, rel_tol=1e-5, abs_tol=1e-4)
    few = loop.prepare(recipe(tmp_path, "few", *usual, "run.steps=2", kind="lora")).data
    assert isinstance(few, PairData)
    assert sum(pair.reference != (0.0, 0.0) for pair in few.pairs) == 2


def test_batches_of_a_rank_are_pairs(tmp_path: Path) -> None:
    """Two ranks read what one reads, pair by pair."""
    one = loop.prepare(recipe(tmp_path, "run", f"data.preferences={small_chats.preferences(tmp_path)}"))
    whole, halves = one.data.batch(3), [one.data.batch(3, rank, 2) for rank in range(2)]
    assert whole.counted == 2
    assert [half.counted for half in halves] == [1, 1]
    for row, (half, place) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        n = min(whole.ids.shape[1], halves[half].ids.shape[1])
        assert torch.equal(whole.ids[row, :n], halves[half].ids[place, :n])


def test_smoothing_of_a_half_would_prefer_nothing() -> None:
    """At s near 1/2 the loss is least where the margin is zero, whichever answer was chosen."""
    spec = decoder(d_model=8, n_layers=1, n_heads=1, n_vocab=11, max_positions=16)
    model = build(spec, seed=1)
    batch = replace(drawn(11, 1, 5, 0.0), smoothing=0.5 - 1e-9)
    with torch.no_grad():
        assert float(preference_loss(model, batch).total) >= math.log(2) - 1e-6
        assert F.logsigmoid(torch.zeros(())) == pytest.approx(-math.log(2))
