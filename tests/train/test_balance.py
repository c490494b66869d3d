"""Losses and corrections that keep experts in equal use, by their definitions."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from test_memorise import WIDTH, experts, learnt, with_body
from torch import Tensor

from asbuilt import InputError, build, decoder
from asbuilt.nn.experts import Router as Module
from asbuilt.nn.registry import module
from asbuilt.spec import LanguageModel, MixtureOfExperts, Router
from asbuilt.spec.experts import Scoring
from asbuilt.train.experts import Routing, auxiliary_loss, router_z_loss
from asbuilt.train.optimizer import optimizers
from asbuilt.train.settings import Experts, Optimizer
from asbuilt.train.step import train_step


def router(n_experts: int, top_k: int, scoring: Scoring = "softmax") -> Module:
    made = module(Router(d_model=8, n_experts=n_experts, top_k=top_k, scoring=scoring), "r")
    assert isinstance(made, Module)
    return made


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_auxiliary_loss_is_1_when_balanced_and_the_number_of_experts_when_one_has_all(scoring: Scoring) -> None:
    n_experts, top_k = random.randint(4, 9), random.randint(1, 3)
    one = router(n_experts, top_k, scoring)
    chosen = torch.stack([torch.arange(n * top_k, (n + 1) * top_k) % n_experts for n in range(n_experts)])
    equal = torch.full((n_experts, n_experts), random.uniform(-2, 2))
    assert float(auxiliary_loss(one, equal, chosen)) == pytest.approx(1.0, abs=1e-6)
    first = torch.full((5, n_experts), -40.0)
    first[:, 0] = 40.0
    assert float(auxiliary_loss(one, first, torch.zeros(5, 1, dtype=torch.long))) == pytest.approx(n_experts, rel=1e-5)


def test_the_auxiliary_loss_is_that_of_mixtral_s_code_over_k() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    n_experts, top_k = random.randint(4, 9), random.randint(1, 3)
    logits = torch.randn(50, n_experts)
    chosen = logits.topk(top_k, -1).indices
    theirs = load_balancing_loss_func((logits,), n_experts, top_k)
    assert isinstance(theirs, Tensor)
    assert float(auxiliary_loss(router(n_experts, top_k), logits, chosen)) * top_k == pytest.approx(float(theirs))
    expected = sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist()) / 50
    assert float(router_z_loss(logits)) == pytest.approx(expected, rel=1e-5)


def concentrated() -> LanguageModel:
    return with_body(decoder(d_model=WIDTH, n_layers=2, n_heads=4, n_vocab=64), "ffn", experts())


def test_the_correction_moves_by_the_rate_against_the_load() -> None:
    model, batch = build(concentrated(), seed=random.randrange(2**31)), learnt(concentrated())
    settings, rate = Experts(bias_rate=0.25), 0.25
    seen: dict[Module, Tensor] = {}
    for one in model.modules():
        if isinstance(one, Module):
            one.register_forward_hook(
                lambda own, _, out: seen.update({own: torch.bincount(out[1].flatten(), minlength=4)})
            )
    made = train_step(model, [batch], optimizers(model, Optimizer(lr=0.0, weight_decay=0.0)), experts=settings)
    for own, load in seen.items():
        mean = 4 * 32 * 2 / 4
        expected = [rate if n < mean else -rate if n > mean else 0.0 for n in load.tolist()]
        assert own.correction.tolist() == expected
    assert made.fullest == pytest.approx(sum(float(n.max()) / (4 * 32 * 2 / 4) for n in seen.values()) / len(seen))


@pytest.mark.parametrize("settings", [Experts(auxiliary=1.0), Experts(bias_rate=0.02)])
def test_balancing_spreads_what_would_concentrate(settings: Experts) -> None:
    """A router that prefers one expert is balanced by either; without, the preference stays."""
    fullest = {}
    for given in (Experts(), settings):
        torch.manual_seed(5)
        model = build(concentrated(), seed=7)
        for one in model.modules():
            if isinstance(one, Module):
                with torch.no_grad():
                    one.weight[0] += 0.1
        model.embedding.requires_grad_(False)
        batch = learnt(model.spec)
        made = optimizers(model, Optimizer(lr=3e-3, weight_decay=0.0))
        steps = [train_step(model, [batch], made, clip=1.0, experts=given) for _ in range(40)]
        fullest[given] = steps[-1].fullest
    assert fullest[settings] < 1.35
    assert fullest[settings] < fullest[Experts()]


def test_losses_of_experts_that_are_not_there_are_refused() -> None:
    with pytest.raises(InputError, match="no experts"):
        Routing(build(decoder(d_model=8, n_layers=1, n_heads=2, n_vocab=9)), Experts(auxiliary=0.1))
    body = experts()
    plain: MixtureOfExperts = replace(body, router=replace(body.router, correction=False))
    with pytest.raises(InputError, match="correction"):
        Routing(build(with_body(concentrated(), "ffn", plain)), Experts(bias_rate=0.1))
