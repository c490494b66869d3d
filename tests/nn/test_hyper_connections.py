"""Hyper-connections: the matrix that mixes streams is doubly stochastic, and one token is as the equations have it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS
from torch import Tensor

from asbuilt.nn.streams import HyperConnection, StreamMerge
from asbuilt.spec import streams as spec


def drawn(part: spec.HyperConnection | spec.StreamMerge, seed: int) -> tuple[HyperConnection | StreamMerge, Tensor]:
    """The module in float64, every parameter drawn, and one token's streams."""
    kind = HyperConnection if isinstance(part, spec.HyperConnection) else StreamMerge
    built = kind(part, "s").double()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(generator=generator)
    return built, torch.randn(1, 1, part.n_streams * part.d_model, dtype=torch.float64, generator=generator)


@given(SEEDS, st.integers(1, 4), st.integers(1, 5))
@torch.no_grad()
def test_against_the_equations(seed: int, n: int, d_model: int) -> None:
    part = spec.HyperConnection(n_streams=n, d_model=d_model, eps=0.01, norm_eps=0.1, iterations=3)
    built, x = drawn(part, seed)
    assert isinstance(built, HyperConnection)
    flat, streams = x[0, 0], x.view(n, d_model)
    z = built.fn @ (flat / (flat.square().mean() + 0.1).sqrt())
    pre, post, mix = (z * torch.repeat_interleave(built.scale, torch.tensor(part.widths)) + built.base).split(
        part.widths
    )
    mixing = mix.view(n, n).exp() / mix.view(n, n).exp().sum(1, keepdim=True) + 0.01
    for step in range(5):
        mixing = mixing / (mixing.sum(step % 2, keepdim=True) + 0.01)
    read, *weights = built(x)
    y = torch.randn(d_model, dtype=torch.float64)
    want = 2 * torch.sigmoid(post)[:, None] * y + torch.stack([mixing[:, k] @ streams for k in range(n)])
    torch.testing.assert_close(read[0, 0], (torch.sigmoid(pre) + 0.01) @ streams, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        built.write(x, y[None, None], *weights)[0, 0].view(n, d_model), want, rtol=1e-9, atol=1e-9
    )


@given(SEEDS, st.integers(2, 4))
@torch.no_grad()
def test_mixing_keeps_the_sum_of_streams(seed: int, n: int) -> None:
    """After many iterations rows and columns sum to 1, so that what all streams have in common is kept."""
    built, x = drawn(spec.HyperConnection(n_streams=n, d_model=3, eps=1e-9, iterations=200), seed)
    assert isinstance(built, HyperConnection)
    same = x[..., :3].repeat(1, 1, n)
    _, post, mix = built(same)
    torch.testing.assert_close(built.write(same, torch.zeros(1, 1, 3).double(), post, mix), same, rtol=1e-3, atol=1e-3)


@given(SEEDS, st.integers(1, 4))
@torch.no_grad()
def test_merging_is_a_weighted_sum(seed: int, n: int) -> None:
    part = spec.StreamMerge(n_streams=n, d_model=3, eps=0.01, norm_eps=0.1)
    built, x = drawn(part, seed)
    flat = x[0, 0]
    z = built.fn @ (flat / (flat.square().mean() + 0.1).sqrt()) * built.scale + built.base
    torch.testing.assert_close(built(x)[0, 0], (torch.sigmoid(z) + 0.01) @ x.view(n, 3), rtol=1e-10, atol=1e-10)
