"""Alternating updates, projected streams, low-rank residuals and cut gates, one token at a time by their equations."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.nn.altup import AlternatingUpdates, ProjectedStreams
from asbuilt.nn.block import Block, Branch
from asbuilt.nn.feedforward import GatedMLP
from asbuilt.nn.step import Step
from asbuilt.spec import (
    MLP,
    HyperConnection,
    Laurel,
    Model,
    PerLayerEmbedding,
    PerLayerInput,
    RMSNorm,
    TokenEmbedding,
)
from asbuilt.spec import Block as BlockSpec
from asbuilt.spec import Branch as BranchSpec
from asbuilt.spec import GatedMLP as GatedSpec
from asbuilt.spec import altup as spec

D = 3
NORM = RMSNorm(d=D, eps=0.1)


def randomise(built: nn.Module, seed: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    built.double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(generator=generator)
    return generator


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 0.1).sqrt() * weight


def step(tokens: int = 1) -> Step:
    return Step((1, tokens), torch.device("cpu"))


@given(SEEDS, st.integers(2, 4), st.booleans())
@torch.no_grad()
def test_a_block_predicts_and_corrects_its_streams(seed: int, n: int, reads: bool) -> None:
    vector = PerLayerInput(d_model=D, d=2, activation="relu") if reads else None
    updates = spec.AlternatingUpdates(
        n_streams=n, d_model=D, norm=NORM, vector=vector, vector_norm=NORM if reads else None
    )
    body = MLP(d_model=D, d_ff=4, activation="relu")
    built = Block(BlockSpec(branches=(BranchSpec(name="ffn", body=body),), updates=updates), "b")
    generator = randomise(built, seed)
    own = built.updates
    assert isinstance(own, AlternatingUpdates)
    x = torch.randn(1, 1, n * D, dtype=torch.float64, generator=generator)
    e = torch.randn(1, 1, 2, dtype=torch.float64, generator=generator)
    seen = step()
    seen.per_layer_BTP = e
    streams, gain = x.view(n, D), own.norm.get_parameter("weight")

    def weights(y: Tensor) -> Tensor:
        return torch.tanh(own.router @ normed(y, gain) / D)

    mix = (own.prediction @ weights(streams[0])).view(n, n)
    predicted = [streams[k] + sum(mix[k, j] * streams[j] for j in range(n)) for k in range(n)]
    ffn = built.get_submodule("ffn.body")
    up, down = (ffn.get_parameter(f"{name}.weight") for name in ("up", "down"))
    y = predicted[0] + down @ torch.relu(up @ predicted[0])
    by = own.correction @ weights(y) + 1
    corrected = [predicted[k] + by[k] * (y - predicted[0]) for k in range(n)]
    if reads:
        inner = own.get_submodule("vector")
        into, out = (inner.get_parameter(f"{name}.weight") for name in ("gate", "down"))
        made = out @ (torch.relu(into @ (own.vector_scale * corrected[0])) * e[0, 0])
        made = normed(made, own.get_parameter("vector_norm.weight"))
        corrected = [corrected[0], *(one + made for one in corrected[1:])]
    torch.testing.assert_close(built(x, seen)[0, 0].view(n, D), torch.stack(corrected), rtol=1e-9, atol=1e-9)


@given(SEEDS, st.integers(2, 4), st.sampled_from((1e-5, 2.0)))
@torch.no_grad()
def test_streams_are_projected_and_merged_at_the_size_of_the_first(seed: int, n: int, least: float) -> None:
    built = ProjectedStreams(spec.ProjectedStreams(n_streams=n, d_model=D, eps=least), "s")
    x = torch.randn(1, 2, D, dtype=torch.float64, generator=randomise(built, seed))
    streams = built.split(x)
    merged = built(streams)

    def size(one: Tensor) -> float:
        return math.sqrt(one.square().mean().item())

    def sized(one: Tensor, like: Tensor) -> Tensor:
        return one * size(like) / max(size(one), math.sqrt(least))

    for t in range(2):
        first = x[0, t]
        wanted = [first, *(sized(built.into[k] @ first, first) for k in range(n - 1))]
        torch.testing.assert_close(streams[0, t].view(n, D), torch.stack(wanted))
        back = [first, *(sized(built.out[k] @ wanted[k + 1], first) for k in range(n - 1))]
        torch.testing.assert_close(merged[0, t], torch.stack(back).mean(0))


@given(SEEDS)
@torch.no_grad()
def test_a_low_rank_residual_is_beside_the_body(seed: int) -> None:
    body, laurel = MLP(d_model=D, d_ff=4, activation="relu"), Laurel(d_model=D, rank=2, norm=NORM)
    branch = BranchSpec(name="ffn", norm=NORM, body=body, beside=laurel, scale=0.5, stream_scale=0.7)
    built = Branch(branch, "b")
    x = torch.randn(1, 1, D, dtype=torch.float64, generator=randomise(built, seed))
    w = dict(built.named_parameters())
    read = normed(x[0, 0], w["norm.weight"])
    low = normed(w["beside.right.weight"] @ (w["beside.left.weight"] @ read), w["beside.norm.weight"])
    y = w["body.down.weight"] @ torch.relu(w["body.up.weight"] @ read)
    torch.testing.assert_close(built(x, x, step())[0, 0], 0.7 * x[0, 0] + 0.5 * (y + read + low))


@given(SEEDS, st.sampled_from((0.1, 0.5, 0.95)))
@torch.no_grad()
def test_a_gate_is_cut_below_a_quantile_of_a_normal_distribution(seed: int, share: float) -> None:
    built = GatedMLP(GatedSpec(d_model=D, d_ff=7, activation="silu", sparsity=share), "f")
    x = torch.randn(1, 1, D, dtype=torch.float64, generator=randomise(built, seed))
    gate, up, down = (built.get_parameter(f"{name}.weight") for name in ("gate", "up", "down"))
    g = gate @ x[0, 0]
    spread = (g - g.mean()).square().mean().sqrt()
    cut = torch.relu(g - g.mean() - spread * NormalDist().inv_cdf(share))
    torch.testing.assert_close(built(x, step())[0, 0], down @ (F.silu(cut) * (up @ x[0, 0])))


@torch.no_grad()
def test_the_share_that_is_cut() -> None:
    """Of 100,000 numbers distributed normally, whatever their mean and spread."""
    built = GatedMLP(GatedSpec(d_model=1, d_ff=100_000, activation="relu", sparsity=0.95), "f")
    randomise(built, 5)
    seen = {}
    built.down.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[0]))
    built.gate.get_parameter("weight").mul_(3).add_(11)
    built(torch.ones(1, 1, 1, dtype=torch.float64), step())
    assert (seen["hidden"] == 0).double().mean().item() == pytest.approx(0.95, abs=0.003)


def model(**changes: object) -> Model:
    """Two blocks on two streams."""
    updates = spec.AlternatingUpdates(n_streams=2, d_model=D, norm=NORM)
    body = MLP(d_model=D, d_ff=4, activation="relu")
    fields: dict[str, Any] = {
        "embedding": TokenEmbedding(n_vocab=5, d_model=D),
        "blocks": (BlockSpec(branches=(BranchSpec(name="ffn", body=body),), updates=updates),) * 2,
        "streams": spec.ProjectedStreams(n_streams=2, d_model=D),
        "head": None,
        "max_positions": 4,
    }
    fields |= changes
    return Model(**fields)


def test_what_cannot_be() -> None:
    assert model().stream_width == 2 * D
    block = model().blocks[0]
    assert block.updates is not None
    with pytest.raises(InputError, match="streams"):
        model(streams=None)
    with pytest.raises(InputError, match="streams"):
        model(streams=spec.ProjectedStreams(n_streams=3, d_model=D))
    vector = PerLayerInput(d_model=D, d=2, activation="relu")
    reading = BlockSpec(
        branches=block.branches,
        updates=spec.AlternatingUpdates(n_streams=2, d_model=D, norm=NORM, vector=vector),
    )
    with pytest.raises(InputError, match="per_layer"):
        model(blocks=(reading,))
    table = PerLayerEmbedding(n_vocab=5, n_layers=1, d=2, d_model=D, norm=RMSNorm(d=2))
    assert model(blocks=(reading,), per_layer=table).per_layer == table
    connected = BranchSpec(name="ffn", body=block.branches[0].body, streams=HyperConnection(n_streams=2, d_model=D))
    with pytest.raises(InputError, match="updates"):
        BlockSpec(branches=(connected,), updates=block.updates)
    with pytest.raises(InputError, match="named updates"):
        BlockSpec(branches=(BranchSpec(name="updates", body=block.branches[0].body),), updates=block.updates)
    with pytest.raises(InputError, match="vector_norm"):
        spec.AlternatingUpdates(n_streams=2, d_model=D, norm=NORM, vector_norm=NORM)
    with pytest.raises(InputError, match="n_streams"):
        spec.AlternatingUpdates(n_streams=1, d_model=D, norm=NORM)
    with pytest.raises(InputError, match="sparsity"):
        GatedSpec(d_model=D, d_ff=7, activation="silu", sparsity=1.0)
    with pytest.raises(InputError, match="beside"):
        BranchSpec(name="ffn", body=block.branches[0].body, beside=Laurel(d_model=D + 1, rank=2))
