"""Gradients that are written by hand, beside those that autograd makes of the plain formula."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from asbuilt import build
from asbuilt.families import gpt2, llama
from asbuilt.kernels.attention import FEW_KEYS, attend, reference
from asbuilt.kernels.rotary import RopeTables, rotate
from asbuilt.nn.linear import FusedLinears, PartModule
from asbuilt.train.batch import Batch
from asbuilt.train.loss import NegativeLogLikelihood, loss_of, measured

DOUBLE = torch.float64


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_one_product_for_q_k_and_v_has_the_gradients_of_three(family: str) -> None:
    d, heads = random.choice([(8, 2), (12, 3)])
    sizes: dict[str, Any] = {"n_vocab": 17, "d_model": d, "n_layers": 2, "n_heads": heads, "max_positions": 16}
    spec = gpt2.build(**sizes) if family == "gpt2" else llama.build(**sizes, n_kv_heads=1, d_ff=11)
    ids = torch.randint(17, (2, 9))
    batch = Batch(ids=ids, targets=ids.roll(-1, 1))
    found: list[dict[str, torch.Tensor]] = []
    for apart in (False, True):
        model = build(spec, seed=3).to(DOUBLE)
        products = [one for part in model.modules() if isinstance(part, PartModule) for one in fused_of(part)]
        assert products
        for one in products if apart else ():
            one.separate()
        for _ in range(2):  # gradients add up
            loss_of(model, batch).total.backward()
        found.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for path, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][path], rtol=1e-9, atol=1e-12, msg=path)


def fused_of(part: PartModule) -> list[FusedLinears]:
    return part._together


@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_the_gradient_of_a_rotation(pairing: Literal["halves", "adjacent"]) -> None:
    """Beside a product with each pair's matrix, with cos and sin times a factor, as YaRN has them."""
    d, T, factor = 6, 5, 1.3
    angles_TP = torch.rand(T, d // 2, dtype=DOUBLE) * 7
    cos, sin = factor * angles_TP.cos(), factor * angles_TP.sin()
    whole = torch.zeros(T, d, d, dtype=DOUBLE)
    for i in range(d // 2):
        a, b = (i, i + d // 2) if pairing == "halves" else (2 * i, 2 * i + 1)
        whole[:, a, a] = whole[:, b, b] = cos[:, i]
        whole[:, a, b], whole[:, b, a] = -sin[:, i], sin[:, i]
    if pairing == "halves":
        turn = RopeTables(torch.cat((cos, cos), -1)[None, :, None], torch.cat((-sin, sin), -1)[None, :, None])
    else:
        both = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
        turn = RopeTables(*(x[None, :, None] for x in both))
    x_BTHD, dy = (torch.randn(2, T, 3, d, dtype=DOUBLE) for _ in range(2))
    x_BTHD.requires_grad_()
    wanted_y = torch.einsum("tij,bthj->bthi", whole, x_BTHD)
    (wanted,) = torch.autograd.grad(wanted_y, x_BTHD, dy)
    found_y = rotate(x_BTHD, turn, pairing)
    (found,) = torch.autograd.grad(found_y, x_BTHD, dy)
    torch.testing.assert_close(found_y, wanted_y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", ["causal", "added"])
def test_autocast_attends_to_few_keys_in_float32(masked: str) -> None:
    """Closer to float64's gradients than bfloat16 could be: only inputs and results are rounded."""
    T = random.choice([5, FEW_KEYS - 1])
    q, k, v = (torch.randn(1, 2, T, 8).bfloat16().requires_grad_() for _ in range(3))
    added = torch.randn(T, T).bfloat16() if masked == "added" else None
    dy = torch.randn(1, 2, T, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v, "causal" if added is None else added, scale=0.3, kernel="fused")
    assert found.dtype is torch.bfloat16
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = reference(wide[0], wide[1], wide[2], "causal" if added is None else added.double(), 0.3)
    pairs = zip(torch.autograd.grad(found, (q, k, v), dy), torch.autograd.grad(wanted, wide, dy.double()), strict=True)
    for a, b in pairs:
        assert float((a.double() - b).abs().max()) <= 2**-8 * float(b.abs().max())


def test_a_loss_has_one_backward_pass() -> None:
    """Its gradient takes the place of what it saved: a second pass is refused, not wrong."""
    model = build(gpt2.build(n_vocab=17, d_model=8, n_layers=1, n_heads=2, max_positions=8), seed=0)
    ids = torch.randint(17, (1, 8))
    total = loss_of(model, Batch(ids=ids, targets=ids)).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_logits_in_bfloat16_are_summed_in_float32() -> None:
    logits = torch.randn(7, 33).bfloat16().requires_grad_()
    kept, targets = logits.detach().clone(), torch.randint(33, (7,))
    z = random.choice([0.0, 0.01])
    total, nats = NegativeLogLikelihood.apply(logits, targets, z, False)
    wide = kept.float().requires_grad_()
    wanted = F.cross_entropy(wide, targets, reduction="sum")
    torch.testing.assert_close(nats, wanted.detach())
    whole = wanted + z * wide.logsumexp(-1).square().sum()
    torch.testing.assert_close(total, whole)
    total.backward()
    whole.backward()
    assert torch.equal(logits.detach(), kept)
    assert logits.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad, wide.grad.bfloat16(), rtol=2**-7, atol=1e-6)


def test_the_gradient_takes_the_place_of_logits_that_nothing_else_reads() -> None:
    """By torch; tests/kernels/test_native_gradients.py has the same of the native kernels."""
    x, w = torch.randn(9, 5, requires_grad=True), torch.randn(33, 5, requires_grad=True)
    targets, z = torch.randint(33, (9,)), random.choice([0.0, 0.01])
    logits = x @ w.t()
    (left := measured(logits, targets, z, spent=True)).total.backward()
    wanted = (x @ w.t()).detach().requires_grad_()
    torch.testing.assert_close(left.nats, F.cross_entropy(wanted, targets, reduction="sum").detach())
    (F.cross_entropy(wanted, targets, reduction="sum") + z * wanted.logsumexp(-1).square().sum()).backward()
    assert wanted.grad is not None
    torch.testing.assert_close(logits.detach(), wanted.grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted.grad @ w.detach())
    for kept in (torch.tanh, torch.exp):  # of which autograd saves the result
        logits = kept(x @ w.t())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            measured(logits, targets, z, spent=True).total.backward()


def test_logits_that_a_hook_sees_keep_their_place() -> None:
    model = build(gpt2.build(n_vocab=17, d_model=8, n_layers=1, n_heads=2, max_positions=9), seed=0)
    ids = torch.randint(17, (2, 9))
    assert model.yields_logits
    seen: list[torch.Tensor] = []
    assert model.head is not None
    model.head.register_forward_hook(lambda *seen_here: seen.append(seen_here[-1]))  # type: ignore[arg-type]
    assert not model.yields_logits
    loss_of(model, Batch(ids=ids, targets=ids)).total.backward()
    with torch.no_grad():
        torch.testing.assert_close(seen[0].flatten(0, -2), model(ids).flatten(0, 1))
