"""Attention of a training step by the native kernels, for each instruction set that is here, and when it is PyTorch's.

Values and gradients are held, number by number, to those of the textbook in float64 within what rounding each step to
float32 may add. With u = 2^-24 that is u D scale |q| |k|^T for scores, and for sums of n numbers u n times the sum of
their sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_native_gradients import _library  # noqa: F401  # each instruction set, with one or three threads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import asbuilt
from asbuilt.kernels import native, training_attention
from asbuilt.kernels.attention import Mask, fused, reference
from asbuilt.nn import build

UNIT = 2.0**-24


def heads(texts: int, n: int, tokens: int, d: int, size: float = 1.0, order: str | None = None) -> Tensor:
    """Draws (B, H, T, D) that lie by tokens or by heads, or in the order given."""
    made = size * torch.randn(texts, tokens, n, d).transpose(1, 2)
    order = order or random.choice(["tokens", "heads"])
    if order == "numbers":
        return made.transpose(2, 3).contiguous().transpose(2, 3)
    return made if order == "tokens" else made.contiguous()


Inputs = tuple[Tensor, Tensor, Tensor]


def drawn(size: float = 1.0, tokens: int | None = None, d: int | None = None) -> tuple[Inputs, bool]:
    """Draws q, k, v and whether queries see only earlier keys; as many key heads as there are threads, or more."""
    texts, key_heads, causal = random.randint(1, 2), random.randint(3, 4), random.random() < 0.6
    d = d or random.choice([1, 8, 20, 33, 64, 72, 130, training_attention.WIDEST])
    tokens = tokens or random.randint(2, 230)
    keys = tokens if causal else random.randint(1, 230)
    q = heads(texts, key_heads * random.randint(1, 3), tokens, d, size, order="tokens")
    return (q, heads(texts, key_heads, keys, d), heads(texts, key_heads, keys, d)), causal


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library has computed since."""
    seen: list[str] = []
    monkeypatch.setattr(training_attention, "LEAST", 0)
    plain = training_attention._job

    def counted(q: Tensor, k: Tensor, v: Tensor, dy: Tensor | None, *given: Any) -> Any:  # noqa: ANN401
        seen.append("values" if dy is None else "gradients")
        return plain(q, k, v, dy, *given)

    monkeypatch.setattr(training_attention, "_job", counted)
    return seen


def by(attend: Callable[..., Tensor], inputs: Inputs, dy: Tensor, mask: Mask, scale: float) -> list[Tensor]:
    """Returns the result and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    y = attend(q, k, v, mask, scale)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy)]


def bounds(inputs: Inputs, dy: Tensor, mask: Mask, scale: float) -> list[Tensor]:
    """Returns how far the result and the gradients may be from the exact ones of inputs in float64.

    Scores that are off by at most s change weights p by at most p (1 - p) (e^2s - 1); the log-sum-exp is rounded too.
    """
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1) if mask is not None else torch.tensor(False)
    weights = (scale * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf).softmax(-1)
    sizes = (scale * q.abs() @ k.abs().transpose(-1, -2)).masked_fill(hidden, 0).amax(-1, keepdim=True)
    n, d = k.shape[2] + q.shape[2] * group + 16, q.shape[-1] + 16
    of_scores = (2 * UNIT * d * sizes).clamp(max=50.0)
    of_weights = weights * (1 - weights) * of_scores.expm1() + weights * UNIT * (2 * sizes + n)
    slopes = dy.abs() @ v.abs().transpose(-1, -2)
    both = slopes + (weights * slopes).sum(-1, keepdim=True)
    of_slopes = of_weights * both + weights * ((of_weights * slopes).sum(-1, keepdim=True) + UNIT * (d + n) * both)
    dk, dv = of_slopes.transpose(-1, -2) @ q.abs() * scale, of_weights.transpose(-1, -2) @ dy.abs()
    more = [x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv)]
    return [of_weights @ v.abs(), of_slopes @ k.abs() * scale, *more]


def check(inputs: Inputs, causal: bool) -> list[Tensor]:
    """Holds the library's to the textbook's, and returns them."""
    texts, n, tokens, d = inputs[0].shape
    dy = heads(texts, n, tokens, d, order=random.choice(["tokens", "heads", "numbers"]))
    scale = random.choice([1.0, d**-0.5])
    mask: Mask = "causal" if causal else None
    found = by(fused, inputs, dy, mask, scale)
    wide = inputs[0].double(), inputs[1].double(), inputs[2].double()
    exact, allowed = by(reference, wide, dy.double(), mask, scale), bounds(wide, dy.double(), mask, scale)
    for name, one, other, bound in zip(("y", "dq", "dk", "dv"), found, exact, allowed, strict=True):
        beyond = (one.double() - other).abs() - bound
        assert bool((beyond <= 1e-30).all()), f"{name}: {float(beyond.max())} beyond {float(bound.max())}"
        assert one.transpose(1, 2).is_contiguous()
    return found


def test_drawn_shapes(calls: list[str]) -> None:
    for _ in range(6):
        check(*drawn())
    assert calls == ["values", "gradients"] * 6


@pytest.mark.parametrize("tokens", [2, 47, 48, 49, 96, 97, 192])
def test_blocks_that_end_at_the_last_token(tokens: int, calls: list[str]) -> None:
    check(*drawn(tokens=tokens, d=random.choice([5, 32])))
    assert len(calls) == 2


def test_extreme_scores(calls: list[str]) -> None:
    (q, k, v), causal = drawn(size=1e4)
    check((q, k, v), causal)  # one weight of most rows is 1, and all others 0
    check((1e-34 * q, k, v), causal)  # all weights of a row are equal
    check((q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)), causal)
    check((q, k[:, :, :1], v[:, :, :1]), causal=False)
    assert len(calls) == 8


def test_what_is_no_number_stays_in_its_row(calls: list[str]) -> None:
    (q, k, v), _ = drawn(tokens=60, d=24)
    k, v = k[:, :, :60], v[:, :, :60]
    if k.shape[2] < 60:
        k = v = torch.randn(q.shape[0], k.shape[1], 60, 24)
    row = random.randrange(60)
    q[:, :, row] = torch.tensor(float("nan"))
    y, dq, _, _ = by(fused, (q, k, v), torch.randn_like(q), "causal", 0.2)
    for found in (y, dq):
        assert bool(found[:, :, row].isnan().all())
        assert not bool(torch.cat((found[:, :, :row], found[:, :, row + 1 :]), 2).isnan().any())
    assert len(calls) == 2


def saved(attend: Callable[[], Tensor]) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """Returns what autograd keeps of it, as it lies."""
    kept: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []

    def pack(x: Tensor) -> Tensor:
        kept.append((x.shape, x.stride(), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend()
    return sorted(kept, key=str)


def test_it_keeps_what_pytorchs_keeps(calls: list[str]) -> None:
    (q, k, v), causal = drawn()
    for one in (q, k, v):
        one.requires_grad_()
    ours = saved(lambda: fused(q, k, v, "causal" if causal else None, 0.3))
    with native.switched_off():
        theirs = saved(lambda: fused(q, k, v, "causal" if causal else None, 0.3))
    assert ours == theirs
    assert calls == ["values"]


def test_otherwise_pytorch_attends(calls: list[str]) -> None:
    (q, k, v), _ = drawn(tokens=20, d=16)
    k = v = torch.randn(q.shape[0], k.shape[1], 20, 16)
    for one in (q, k, v):
        one.requires_grad_()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            return func(*args, **(kwargs or {}))

    seen = torch.ones(20, 20, dtype=torch.bool)
    for attend in (
        lambda: fused(q, k, v, seen, 0.3),
        lambda: fused(q, k, v, seen.float(), 0.3),
        lambda: fused(q.double(), k.double(), v.double(), None, 0.3),
        lambda: fused(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, 0.3),
        lambda: fused(q[:, :, :1], k, v, None, 0.3),
        lambda: fused(q.contiguous(), k, v, None, 0.3),
        lambda: fused(q, k, v.transpose(2, 3).contiguous().transpose(2, 3), None, 0.3),
        lambda: fused(q.detach(), k.detach(), v.detach(), None, 0.3),
    ):
        attend()
    with torch.no_grad():
        fused(q, k, v, "causal", 0.3)
    with native.switched_off():
        fused(q, k, v, "causal", 0.3)
    with Watching():
        fused(q, k, v, "causal", 0.3)
    torch.set_num_threads(q.shape[0] * k.shape[1] + 1)
    fused(q, k, v, "causal", 0.3)
    assert not calls


def test_gradients_that_a_mode_watches_are_pytorchs(calls: list[str]) -> None:
    given, causal = drawn()
    for one in given:
        one.requires_grad_()
    y = fused(*given, "causal" if causal else None, 0.3)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, given, dy, retain_graph=True)
    with FlopCounterMode(display=False):
        theirs = torch.autograd.grad(y, given, dy)
    assert calls == ["values", "gradients"]
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm() + 1)


def test_a_training_step_is_the_same_without(calls: list[str]) -> None:
    spec = asbuilt.decoder(
        d_model=48, n_layers=2, n_heads=4, n_kv_heads=random.choice([2, 4]), n_vocab=31, max_positions=64
    )
    model, ids = build(spec), torch.randint(31, (2, 50))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)

    def gradients() -> list[Tensor]:
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    ours = gradients()
    assert calls == ["values"] * 2 + ["gradients"] * 2
    with native.switched_off():
        theirs = gradients()
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm() + 1e-3)
