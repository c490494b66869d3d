"""Mixtures of experts: what is computed, one row and expert at a time; what is billed, case by case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import strategies
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SEEDS
from torch import Tensor

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.grouped import group_counts, grouped_product
from asbuilt.nn.experts import MixtureOfExperts as Module
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.linear import Linear
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import ClampedGate, ExpertGroups, GatedMLP, MixtureOfExperts, Pass, Router
from asbuilt.spec.experts import GroupScore

WIDTH = 5
ROWS = st.integers(1, 9)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Module, int]:
    """A mixture in float64, every weight drawn, and the seed."""
    part, seed = draw(strategies.mixtures(WIDTH)), draw(SEEDS)
    built = module(part, "ffn").double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*built.parameters(), *built.buffers()):
            tensor.normal_(generator=generator)
    assert isinstance(built, Module)
    return built, seed


def drawn_rows(rows: int, seed: int) -> Tensor:
    return torch.randn(1, rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))


def run(built: Module, x_BTM: Tensor, kernel: str = "fused") -> Tensor:
    return built(x_BTM, Step((x_BTM.shape[0], x_BTM.shape[1]), x_BTM.device, kernel=kernel))  # type: ignore[arg-type]


def one_row(built: Module, x: Tensor) -> Tensor:
    """The definition, for one vector, one expert after the other."""
    part, router = built.part, built.part.router
    logits = built.router.weight @ normed(built.router.norm, x)
    logits = router.logit_scale * (logits + (0 if built.router.bias is None else built.router.bias))
    scores = {
        "softmax": logits.exp() / logits.exp().sum(),
        "sigmoid": 1 / (1 + (-logits).exp()),
        "sqrt_softplus": (1 + logits.exp()).log().sqrt(),
    }[router.scoring]
    chosen = chosen_by(built, scores.detach())
    if router.nearness is not None:
        scores = in_turn(logits, chosen, router.nearness)
    total = sum(scores[e] for e in chosen) + router.eps if router.renormalise else 1.0
    given = normed(built.norm, x)
    given = given if part.d_latent is None else latent(built, "into_latent", given)
    y = torch.zeros_like(given)
    for e in chosen:
        w = router.scale * scores[e] / total * (built.router.expert_scale[e] if router.expert_scale else 1)
        y = y + (one_expert(built, e, w * given) if part.weighs == "inputs" else w * one_expert(built, e, given))
    y = normed(built.post_norm, y if part.d_latent is None else latent(built, "from_latent", y))
    if built.shared is not None:
        shared = normed(built.shared_post_norm, run_shared(built, normed(built.shared_norm, x)))
        y = y + (torch.sigmoid(built.shared_gate.weight @ x) * shared if part.shared_gate else shared)
    return y


def in_turn(logits: Tensor, chosen: list[int], nearness: float) -> dict[int, Tensor]:
    """The weight of each chosen expert: its part of the exponentials of those left that are near it."""
    left, said, weights = set(range(len(logits))), logits.tolist(), {}
    for e in chosen:
        near = [i for i in left if (said[e] - said[i]) / max(abs(said[i]), said[e]) <= nearness]
        weights[e] = logits[e].exp() / sum((logits[i].exp() for i in near), torch.zeros(()))
        left.remove(e)
    return weights


def normed(norm: Any, x: Tensor) -> Tensor:  # noqa: ANN401  # a norm's module, or None
    return x if norm is None else norm(x[None])[0]


def latent(built: Module, name: str, x: Tensor) -> Tensor:
    one: Linear = getattr(built, name)
    return one.weight @ x + (0 if one.bias is None else one.bias)


def chosen_by(built: Module, scores: Tensor) -> list[int]:
    """The experts of the largest corrected scores, in groups no worse than the worst that is open."""
    router = built.part.router
    corrected = (scores + built.router.correction if router.correction else scores).tolist()
    allowed = list(range(router.n_experts))
    if router.groups is not None:
        size, counted = router.n_experts // router.groups.n_groups, 2 if router.groups.score == "two_best" else 1
        groups = [allowed[first : first + size] for first in range(0, router.n_experts, size)]
        groups.sort(key=lambda group: -sum(sorted((corrected[e] for e in group), reverse=True)[:counted]))
        allowed = [e for group in groups[: router.groups.top_groups] for e in group]
    return sorted(allowed, key=lambda e: -corrected[e])[: router.top_k]


def one_expert(built: Module, e: int, x: Tensor) -> Tensor:
    def mapped(name: str, x: Tensor) -> Tensor:
        return getattr(built, name)[e] @ x + (getattr(built, f"{name}_bias")[e] if built.part.bias else 0)

    gating, activation = built.part.gating, ACTIVATIONS[built.part.activation]
    if isinstance(gating, ClampedGate):
        gate, up = mapped("gate", x), mapped("up", x).clip(-gating.limit, gating.limit)
        if not gating.activated:
            gate = torch.where(gate > gating.limit, gating.limit, gate)
        opened = gate * torch.sigmoid(gating.alpha * gate)
        if gating.activated:
            opened = torch.where(opened > gating.limit, gating.limit, opened)
        return mapped("down", (up + gating.shift) * opened)
    if gating == "none":
        return mapped("down", activation(mapped("up", x)))
    return mapped("down", activation(mapped("gate", x)) * mapped("up", x))


def run_shared(built: Module, x: Tensor) -> Tensor:
    assert built.shared is not None
    return built.shared(x[None, None], Step((1, 1), x.device))[0, 0]


@given(mixtures(), ROWS, st.sampled_from(("fused", "reference")), st.booleans())
def test_against_the_definition(drawn: tuple[Module, int], rows: int, kernel: str, training: bool) -> None:
    built, seed = drawn
    x = drawn_rows(rows, seed)
    with torch.set_grad_enabled(training):
        have = run(built, x, kernel)
        want = torch.stack([one_row(built, row) for row in x[0]])
    torch.testing.assert_close(have[0], want, rtol=1e-9, atol=1e-9)


@given(mixtures(), ROWS, st.data())
@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours(drawn: tuple[Module, int], rows: int, data: st.DataObject) -> None:
    built, seed = drawn
    x = drawn_rows(rows, seed)
    order = data.draw(st.permutations(range(rows)))
    whole = run(built, x)
    torch.testing.assert_close(run(built, x[:, order]), whole[:, order], rtol=1e-11, atol=1e-11)
    alone = torch.cat([run(built, x[:, i : i + 1]) for i in range(rows)], 1)
    torch.testing.assert_close(alone, whole, rtol=1e-11, atol=1e-11)


@given(mixtures(), ROWS)
@settings(max_examples=30)
def test_gradients_are_those_of_the_definition(drawn: tuple[Module, int], rows: int) -> None:
    built, seed = drawn
    x = drawn_rows(rows, seed).requires_grad_()
    inputs = [x, *built.parameters()]
    have = torch.autograd.grad(run(built, x).square().sum(), inputs)
    plain = torch.stack([one_row(built, row) for row in x[0]]).square().sum()
    want = torch.autograd.grad(plain, inputs, allow_unused=True)
    for mine, theirs, tensor in zip(have, want, inputs, strict=True):
        expected = torch.zeros_like(tensor) if theirs is None else theirs
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-8 * max(1.0, float(expected.abs().max())))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), SEEDS, st.booleans())
@torch.no_grad()
def test_grouped_products_group_by_group(counts: list[int], seed: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), 3, dtype=torch.float64, generator=generator)
    weight = torch.randn(len(counts), 4, 3, dtype=torch.float64, generator=generator)
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    bias = torch.randn(len(counts), 4, dtype=torch.float64, generator=generator) if biased else None
    want = torch.einsum("ri,roi->ro", x, weight[expert]) + (0 if bias is None else bias[expert])
    for kernel in ("fused", "reference"):
        torch.testing.assert_close(grouped_product(x, weight, counts, kernel, bias), want, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 40), st.integers(1, 7))
def test_on_the_meta_device_rows_are_spread_evenly(rows: int, experts: int) -> None:
    counts = group_counts(torch.empty(rows, device="meta"), experts)
    assert sum(counts) == rows
    assert max(counts) - min(counts) <= 1


def mixture(n_experts: int, top_k: int, **more: object) -> MixtureOfExperts:
    router = Router(d_model=4, n_experts=n_experts, top_k=top_k)
    return MixtureOfExperts(d_model=4, d_ff=3, n_experts=n_experts, activation="silu", router=router, **more)  # type: ignore[arg-type]


@given(st.integers(1, 4), st.data(), st.integers(1, 3))
def test_touched_is_the_mean_over_all_choices(n_experts: int, data: st.DataObject, rows: int) -> None:
    part = mixture(n_experts, data.draw(st.integers(1, n_experts)))
    choices = list(itertools.combinations(range(n_experts), part.top_k))
    every = list(itertools.product(choices, repeat=rows))
    mean = Fraction(sum(len(set().union(*chosen)) for chosen in every), len(every))
    assert float(part.touched(Pass(tokens=rows))) == pytest.approx(float(mean), rel=1e-12)
    if rows == 1:
        assert part.touched(Pass(tokens=1)) == part.top_k == mean


def test_moved_counts_the_experts_that_are_hit() -> None:
    part = mixture(8, 2)
    stacked = 3 * 8 * 4 * 3 * 2
    assert cost.moved(part, Pass(tokens=1), "bf16", "bf16").weights["ffn"] == stacked * 2 // 8
    assert cost.moved(part, Pass(tokens=500), "bf16", "bf16").weights["ffn"] == stacked
    assert cost.moved(part, Pass(tokens=1), "bf16", "bf16").weights["router"] == 8 * 4 * 2


@given(strategies.mixtures(WIDTH))
def test_active_parameters_are_those_of_one_token(part: MixtureOfExperts) -> None:
    maps = 2 if part.gating == "none" else 3
    wide = part.d_expert
    each = maps * part.d_ff * wide + part.bias * ((maps - 1) * part.d_ff + wide)
    idle = (part.n_experts - part.top_k) * each
    assert cost.active_parameters(part) == cost.total_parameters(part) - idle


BAD: dict[str, Callable[[], object]] = {
    "top_k": lambda: Router(d_model=4, n_experts=2, top_k=3),
    "scoring": lambda: Router(d_model=4, n_experts=2, top_k=1, scoring="relu"),  # type: ignore[arg-type]
    "router": lambda: MixtureOfExperts(
        d_model=4, d_ff=3, n_experts=3, activation="silu", router=Router(d_model=4, n_experts=2, top_k=1)
    ),
    "shared": lambda: mixture(2, 1, shared=GatedMLP(d_model=5, d_ff=3, activation="silu")),
    "shared_gate": lambda: mixture(2, 1, shared_gate=True),
    "eps": lambda: Router(d_model=4, n_experts=2, top_k=1, eps=1e-20),
    "scale": lambda: Router(d_model=4, n_experts=2, top_k=1, scale=0.0),
    "nearness": lambda: Router(d_model=4, n_experts=2, top_k=1, nearness=0.1, renormalise=True),
    "groups": lambda: Router(d_model=4, n_experts=5, top_k=1, groups=ExpertGroups(n_groups=2, top_groups=1)),
    "top_groups": lambda: ExpertGroups(n_groups=2, top_groups=2),
    "score": lambda: ExpertGroups(n_groups=2, top_groups=1, score="worst"),  # type: ignore[arg-type]
    "gating": lambda: mixture(2, 1, gating="half"),
    "weighs": lambda: mixture(2, 1, weighs="nothing"),
    "limit": lambda: ClampedGate(alpha=1.0, limit=0.0),
    "activation": lambda: MixtureOfExperts(
        d_model=4,
        d_ff=3,
        n_experts=2,
        activation="gelu",
        router=Router(d_model=4, n_experts=2, top_k=1),
        gating=ClampedGate(alpha=1.0, limit=7.0),
    ),
}


@pytest.mark.parametrize("field", BAD)
def test_what_cannot_be(field: str) -> None:
    with pytest.raises(InputError, match=rf"\.{field}\b"):
        BAD[field]()


@pytest.mark.parametrize(("size", "top_k", "score"), [(2, 3, "best"), (1, 1, "two_best")])
def test_groups_too_small(size: int, top_k: int, score: GroupScore) -> None:
    groups = ExpertGroups(n_groups=3, top_groups=1, score=score)
    with pytest.raises(InputError, match=r"Router\.(top_k|groups)"):
        Router(d_model=4, n_experts=3 * size, top_k=top_k, groups=groups)


@given(mixtures(), ROWS)
def test_a_correction_chooses_and_does_not_weigh(drawn: tuple[Module, int], rows: int) -> None:
    """Weights are the plain scores whatever is added, and no gradient reaches what is added."""
    built, seed = drawn
    router = built.router
    x = drawn_rows(rows, seed)[0].requires_grad_()
    assert all(not buffer.requires_grad for buffer in built.buffers())
    assert {name: tuple(b.shape) for name, b in router.named_buffers()} == {
        name: weight.shape for name, weight in built.part.router.buffers().items()
    }
    if not built.part.router.correction:
        return
    before = router(x)
    with torch.no_grad():
        router.correction += 10.0  # the same for all: no choice changes, and nothing else may
    after = router(x)
    assert torch.equal(before[1], after[1])
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)


def test_softmax_over_the_chosen_is_softmax_over_all_renormalised() -> None:
    """Why there is one field for it, and no order of softmax and choice."""
    logits = torch.randn(50, 9, dtype=torch.float64)
    chosen, places = logits.topk(4)
    scores = F.softmax(logits, -1).gather(-1, places)
    torch.testing.assert_close(scores / scores.sum(-1, keepdim=True), chosen.softmax(-1), rtol=1e-12, atol=1e-12)
