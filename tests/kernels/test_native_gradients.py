"""The native kernels of a training step beside torch's values and gradients, for each instruction set that is here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from asbuilt.kernels import gates, native, native_gradients
from asbuilt.kernels.norm import RMSNormFunction
from asbuilt.kernels.rotary import RopeTables, rotate_joined
from asbuilt.train.loss import NegativeLogLikelihood


def _kinds() -> list[str]:
    """The instruction sets of this machine and build, none without the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.SWITCH, "1")
        native.library.cache_clear()
        lib = native.library()
    native.library.cache_clear()
    return [] if lib is None else lib.asbuilt_usable().decode().split()


KINDS = _kinds()


@pytest.fixture(params=KINDS or ["none"], autouse=True)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loads the library with each instruction set of this machine; what a test makes uses one or three threads."""
    if not KINDS:
        pytest.skip("the native kernels are not installed (make builds them where there is a compiler)")
    monkeypatch.setenv(native.SWITCH, request.param)
    native.library.cache_clear()
    native.number.cache_clear()
    assert native.instructions() == request.param
    torch.set_num_threads(random.choice([1, 3]))
    yield
    torch.set_num_threads(1)
    native.library().asbuilt_choose(KINDS[0].encode())  # type: ignore[union-attr]
    native.library.cache_clear()
    native.number.cache_clear()


def compare(
    made: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor], dtype: torch.dtype, cancelled: float = 0.0
) -> None:
    """Holds values and gradients by the library, in `dtype`, to those that torch computes of the same in float64.

    Values are differences of numbers whose sizes add up to `cancelled`, and have the rounding of these.
    """
    found = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    exact = [x.to(dtype).double().requires_grad_() for x in inputs]
    values = [[y] if isinstance(y, Tensor) else list(y) for y in (made(*found), made(*exact))]
    weights = [torch.randn_like(y) for y in values[1]]
    gradients = [
        torch.autograd.grad(
            [y for y in ys if y.requires_grad],
            xs,
            [w.to(y.dtype) for y, w in zip(ys, weights, strict=True) if y.requires_grad],
        )
        for ys, xs in zip(values, (found, exact), strict=True)
    ]
    rounding = 4e-6 if dtype is torch.float32 else 2**-6
    for pairs, lost in ((values, cancelled * 2**-23), (gradients, 0.0)):
        for a, b in zip(*pairs, strict=True):
            assert float((a.double() - b).detach().norm()) <= rounding * (float(b.detach().norm()) + 1e-6) + lost


def called(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Returns the names of what the library has computed since, of these functions."""
    seen: list[str] = []
    for name in names:
        plain = getattr(native_gradients, name)

        def wrapped(*given: object, plain: Callable[..., object] = plain, name: str = name, **named: object) -> object:
            made = plain(*given, **named)
            if made is not None:
                seen.append(name)
            return made

        monkeypatch.setattr(native_gradients, name, wrapped)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(native.ACTIVATIONS))
def test_activations(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch, "activated", "activated_gradient")
    shape = (random.randint(1, 40), random.randint(1, 900))
    compare(lambda x: gates.activated(x, name), [torch.randn(shape) * 4], dtype)
    assert seen == ["activated", "activated_gradient"]
    far = torch.tensor([[-1e4, -90.0, -0.0, 90.0, 1e4, float("nan")]], dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(gates.activated(far, name).sum(), far)
    assert slope[0, :5].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert bool(slope[0, 5].isnan())


@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm(offset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch, "norm", "norm_gradient")
    rows, width = random.randint(1, 150), random.randint(1, 90)
    x, weight = torch.randn(2, rows, width), torch.randn(width)
    compare(lambda x, w: RMSNormFunction.apply(x, w, 1e-3, offset), [x, weight], torch.float32)  # type: ignore[arg-type,return-value]
    compare(lambda x: RMSNormFunction.apply(x, None, 1e-3, offset), [x], torch.float32)  # type: ignore[arg-type,return-value]
    assert seen == ["norm", "norm_gradient"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_heads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch, "turned_apart", "joined_back")
    B, T, half = random.randint(1, 3), random.randint(1, 40), random.randint(1, 20)
    counts = random.randint(1, 4), random.randint(1, 3), random.randint(1, 3)
    texts = random.choice([1, B])
    cos, sin = (torch.randn(texts, T, 1, 2 * half).to(dtype) for _ in range(2))

    def made(heads: Tensor) -> tuple[Tensor, ...]:
        turn = RopeTables(cos.to(heads.dtype), sin.to(heads.dtype))
        q, k, v = rotate_joined(heads, counts, turn, "halves")
        return q.transpose(1, 2), k.transpose(1, 2), v  # whose gradients come in another order

    compare(made, [torch.randn(B, T, sum(counts), 2 * half)], dtype)
    assert seen == ["turned_apart", "joined_back"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z", [0.0, 0.01])
def test_cross_entropy(z: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch, "likelihood", "likelihood_gradient")
    rows, width = random.randint(1, 40), random.choice([1, 5, 33, 512, 1300])
    logits, targets = torch.randn(rows, width) * 6, torch.randint(width, (rows,))
    if width > 5:
        logits[targets == 0, 3] = float("-inf")
    cancelled = rows * float(logits.nan_to_num(neginf=0.0).abs().max())  # ln Z and l[target] of each row
    compare(lambda x: NegativeLogLikelihood.apply(x, targets, z, False), [logits], dtype, cancelled)  # type: ignore[arg-type,return-value]
    assert seen == ["likelihood", "likelihood_gradient"]
    # the gradient takes the place of logits that nothing else reads, those of x * 1 here
    compare(lambda x: NegativeLogLikelihood.apply(x * 1.0, targets, z, True), [logits], dtype, cancelled)  # type: ignore[arg-type,return-value]
    assert seen == ["likelihood", "likelihood_gradient"] * 2
    spent = logits.to(dtype, copy=True).requires_grad_() * 1.0
    (slope,) = torch.autograd.grad(NegativeLogLikelihood.apply(spent, targets, z, True)[0], spent)
    assert slope.data_ptr() == spent.data_ptr()
    read_twice = (logits.clamp(-9, 9).to(dtype).requires_grad_() * 0.1).exp()  # of which autograd saves the result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        NegativeLogLikelihood.apply(read_twice, targets, z, True)[0].backward()  # type: ignore[attr-defined]
    with pytest.raises((RuntimeError, IndexError)):
        NegativeLogLikelihood.apply(logits.to(dtype), torch.full((rows,), width), z, False)
    logits[0, 0] = float("nan")
    assert bool(NegativeLogLikelihood.apply(logits.to(dtype), targets, z, False)[1].isnan())
