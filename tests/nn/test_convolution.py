"""The short convolution: equal to the library's, in pieces as at once, whatever padding and neighbours."""

from __future__ import annotations

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asbuilt import cost
from asbuilt.kernels import convolution as kernel
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn.cache import Cache
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import Pass, ShortConvolution

PARTS = st.builds(
    ShortConvolution,
    channels=st.integers(1, 6),
    kernel=st.integers(1, 5),
    bias=st.booleans(),
    activation=st.sampled_from(("silu", None)),
)


def built(part: ShortConvolution, seed: int, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    made, generator = module(part, "").to(dtype), torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(PARTS, st.integers(1, 3), st.integers(1, 9), st.booleans(), strategies.SEEDS)
def test_it_is_the_librarys_with_its_gradients(
    part: ShortConvolution, batch: int, tokens: int, past: bool, seed: int
) -> None:
    x, w = drawn(batch, tokens, part.channels, seed=seed), drawn(part.channels, part.kernel, seed=seed + 1)
    bias = drawn(part.channels, seed=seed + 2) if part.bias else None
    before = drawn(batch, part.channels, part.kernel - 1, seed=seed + 3) if past else None
    given = [t.requires_grad_() for t in (x, w, bias) if t is not None]
    silu, dy = part.activation == "silu", drawn(batch, tokens, part.channels, seed=seed + 4)
    wanted, got = (f(x, w, bias, before, silu=silu) for f in (kernel.reference, kernel.convolve))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    for ours, its in zip(torch.autograd.grad(got, given, dy), torch.autograd.grad(wanted, given, dy), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(kernel.convolve(x, w, bias, before, silu=silu), wanted, rtol=1e-10, atol=1e-10)


@given(PARTS, st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=6), strategies.SEEDS)
@torch.no_grad()
def test_ragged_pieces_are_each_text_alone(part: ShortConvolution, pieces: list[list[int]], seed: int) -> None:
    """Each pass brings row b `piece[b]` tokens, with padding on either side or between; single tokens too."""
    texts = [
        drawn(1, sum(counts), part.channels, seed=seed + row) for row, counts in enumerate(zip(*pieces, strict=True))
    ]
    model, cache = built(part, seed), Cache(part, batch=2, capacity=40, dtype=torch.float64)
    lengths, got, generator = (0, 0), [[], []], torch.Generator().manual_seed(seed)
    for counts in pieces:
        width = max(*counts, 1) + int(torch.randint(3, (), generator=generator)) * (counts != [1, 1])
        x, valid = drawn(2, width, part.channels, seed=seed + 9), torch.zeros(2, width, dtype=torch.bool)
        for row, n in enumerate(counts):
            valid[row, torch.randperm(width, generator=generator)[:n]] = True
            x[row, valid[row]] = texts[row][0, lengths[row] : lengths[row] + n]
        step = Step((2, width), x.device, past=lengths, valid_BT=None if valid.all() else valid, cache=cache)
        y = model(x, step)
        for row in range(2):
            got[row].append(y[row, valid[row]])
        lengths = tuple(n + m for n, m in zip(lengths, counts, strict=True))
    for row, text in enumerate(texts):
        if text.shape[1]:
            alone = model(text, Step((1, text.shape[1]), text.device))[0]
            torch.testing.assert_close(torch.cat(got[row]), alone, rtol=1e-10, atol=1e-10)


@given(PARTS, st.integers(1, 3), st.integers(2, 9), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=30)
def test_what_it_saves_and_needs(part: ShortConvolution, batch: int, tokens: int, dtype: torch.dtype) -> None:
    model, run = built(part, 0, dtype), Pass(tokens=tokens, batch=batch, width=dtype.itemsize)
    x, kept = torch.randn(batch, tokens, part.channels, dtype=dtype), 0
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x, Step((batch, tokens), x.device))
    kept = sum(t.nbytes for place, t in saved.items() if place not in own)
    assert kept == sum(s.nbytes(run.width) for s in memory(part).saves(run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_the_allocators(dtype: torch.dtype) -> None:
    part = ShortConvolution(channels=64, kernel=4)
    model, x = built(part, 0, dtype), torch.randn(2, 100, 64, dtype=dtype)
    with torch.inference_mode():
        peak = measured.peak_bytes(lambda: model(x, Step((2, 100), x.device)))
    declared = memory(part).peak_bytes(Pass(tokens=100, batch=2, width=dtype.itemsize))
    assert 0.9 * peak <= declared <= 1.1 * peak


def test_its_state_is_its_last_inputs() -> None:
    part = ShortConvolution(channels=6, kernel=4)
    assert cost.cache(part, 100, "bf16").fixed == 6 * 3 * 2 == cost.cache(part, 100, "bf16").at_seq
    assert Cache(part, batch=5, capacity=9, dtype=torch.bfloat16).nbytes == 5 * 36
    assert sum(cost.parameters(part).values()) == cost.parameters(part)["ssm"] == 24
