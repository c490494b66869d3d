"""AdamW in 8 bits: what is held, how near it is, and how many bytes."""

from __future__ import annotations

import random

import pytest
import torch

from asbuilt import build, decoder
from asbuilt.plan.train import train
from asbuilt.train.batch import Batch
from asbuilt.train.eight_bit import AdamW8bit, coded, expanded, values
from asbuilt.train.optimizer import optimizers
from asbuilt.train.settings import Optimizer
from asbuilt.train.step import train_step


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_of_256_values_is_held(signed: bool) -> None:
    table = torch.tensor(values(signed))
    assert len(set(values(signed))) == 256
    x = torch.randn(random.randint(257, 2000)) * 10.0 ** torch.randint(-3, 3, (1,))
    x = x if signed else x.square()
    codes, scales = coded(x, signed=signed)
    assert codes.dtype == torch.uint8
    assert len(scales) == -(-len(x) // 256)
    back = expanded(codes, scales, signed=signed)
    for i in random.sample(range(len(x)), 50):
        near = x[256 * (i // 256) : 256 * (i // 256) + 256].abs().max()
        assert scales[i // 256] == near
        nearest = float((table - x[i] / near).abs().min())
        assert float((back[i] - x[i]).abs() / near) == pytest.approx(nearest, abs=1e-6)


def test_zeros_stay_zeros() -> None:
    codes, scales = coded(torch.zeros(300), signed=True)
    assert bool((expanded(codes, scales, signed=True) == 0).all())


def test_small_tensors_are_adamw_s_exactly() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(7, 5)) for _ in range(2))
    numbers = {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.3}
    one, other = AdamW8bit([{"params": [ours]}], **numbers), torch.optim.AdamW([theirs], **numbers)  # type: ignore[arg-type]
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(7, 5)
        one.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_state_takes_the_bytes_that_the_plan_bills_and_the_loss_falls_alike() -> None:
    spec = decoder(d_model=72, n_layers=2, n_heads=2, n_vocab=301)
    ids = torch.randint(301, (4, 16))
    losses = {}
    for name in ("adamw", "adamw-8bit"):
        model = build(spec, seed=random.randrange(2**31))
        made = optimizers(model, Optimizer(name=name, lr=3e-3))  # type: ignore[arg-type]
        batch = Batch(ids=ids, targets=ids.roll(-1, 1))
        losses[name] = [train_step(model, [batch], made, clip=1.0).loss for _ in range(40)]
        plan = train(spec, "h100-sxm", dtype="fp32", seq=16, optimizer=name)
        held = sum(x.nbytes for x in _tensors(made.made[0][0]))
        assert held == sum(plan.state.optimizer.values())
    assert losses["adamw-8bit"][-1] < 0.3 * losses["adamw-8bit"][0]
    assert losses["adamw-8bit"][-1] == pytest.approx(losses["adamw"][-1], abs=0.3)


def _tensors(made: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [x for each in made.state.values() for x in each.values() if isinstance(x, torch.Tensor) and x.dim()]
