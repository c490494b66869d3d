"""Building: initial scales, and maps that stay together, or come apart without anyone noticing."""

from __future__ import annotations

import copy
import math

import pytest
import strategies
import torch
from hypothesis import given, settings

from asbuilt.kernels import norm as norm_kernel
from asbuilt.nn import build
from asbuilt.nn.linear import FusedLinears
from asbuilt.nn.model import Model
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    BlockIndexer,
    Branch,
    EntryIndexer,
    GatedMLP,
    Head,
    Indexer,
    LayerNorm,
    TokenEmbedding,
    walk,
    weights,
)
from asbuilt.spec import Model as Spec


def wide(n_layers: int = 8) -> Spec:
    attention = Attention(d_model=64, n_heads=4, n_kv_heads=2, d_head=24, bias=True, output_bias=True)
    ffn = GatedMLP(d_model=64, d_ff=96, activation="silu", bias=True)
    block = Block(
        branches=(
            Branch(name="attention", body=attention, norm=LayerNorm(d=64)),
            Branch(name="ffn", body=ffn),
            Branch(name="more", body=MLP(d_model=64, d_ff=64, activation="relu", bias=True)),
        )
    )
    embedding = TokenEmbedding(n_vocab=80, d_model=64)
    return Spec(embedding=embedding, blocks=(block,) * n_layers, head=Head(d_model=64, n_vocab=80), max_positions=32)


def test_initial_scales() -> None:
    spec = wide()
    parameters = dict(build(spec, seed=3).named_parameters())
    for path, weight, _ in weights(spec):
        values = parameters[path]
        if weight.role == "gain":
            assert bool((values == 1).all())
        elif weight.role == "bias":
            assert bool((values == 0).all())
        else:
            writes = path.endswith(("o.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * spec.n_layers) if writes else 0.02
            standard_error = std / math.sqrt(2 * values.numel())
            assert values.std().item() == pytest.approx(std, abs=6 * standard_error), path


def test_seeds_repeat_and_differ() -> None:
    one, same, other = (build(wide(1), seed=s).get_parameter("head.weight") for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def logits(model: Model) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(10)[None])


def together(model: Model) -> list[FusedLinears]:
    return [group for module in model.modules() for group in getattr(module, "_together", [])]


@given(strategies.models())
@settings(max_examples=20)
def test_together_equals_one_by_one(model: Model) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        joined = model(ids)
    with torch.enable_grad():
        apart = model(ids)
    torch.testing.assert_close(joined, apart.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", ["to", "deepcopy", "assign", "in_place", "data"])
def test_changed_parameters_are_never_stale(change: str) -> None:
    model = build(wide(2), dtype=torch.float64)
    fresh = build(wide(2), dtype=torch.float64, seed=9)
    if change == "to":
        model = model.to(torch.float32).to(torch.float64)
        assert all(m.weight.data_ptr() in g.places for g in together(model) for m in g.maps)
    if change == "deepcopy":
        model = copy.deepcopy(model)
    if change == "assign":
        model.load_state_dict(fresh.state_dict(), assign=True)
    elif change == "data":
        for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
            mine.data = theirs.data.clone()
    else:
        model.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(logits(model), logits(fresh), rtol=1e-12, atol=1e-12)


def test_rms_norm_against_the_library_forward_and_backward() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        x = torch.randn(7, 33, dtype=dtype) * 3
        weight = torch.randn(33, dtype=dtype)
        torch.testing.assert_close(
            norm_kernel.normalise(x, weight, 1e-5)[0],
            norm_kernel.reference(x, weight, 1e-5),
            rtol=tolerance,
            atol=tolerance,
        )
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    apply = norm_kernel.RMSNormFunction.apply
    for offset in (False, True):
        assert torch.autograd.gradcheck(lambda a, b, offset=offset: apply(a, b, 1e-3, offset), (x, weight))


@given(strategies.models())
@settings(max_examples=15)
def test_every_parameter_that_can_matter_gets_a_gradient(model: Model) -> None:
    model(torch.zeros(2, 5, dtype=torch.long)).square().sum().backward()
    choosing = tuple(path for path, part in walk(model.spec) if isinstance(part, Indexer | EntryIndexer | BlockIndexer))
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and not path.startswith(choosing):  # what only chooses is not learned so
            assert parameter.grad is not None, path
            assert bool(parameter.grad.isfinite().all()), path


def test_a_model_says_what_it_computes_in_and_where_and_follows_its_weights() -> None:
    built = build(wide(1), dtype="bf16", seed=None)
    assert (built.dtype, built.device) == (torch.bfloat16, torch.device("cpu"))
    assert built.to(torch.float64).dtype == torch.float64
    moved = copy.deepcopy(built).to("meta")
    assert (moved.device.type, moved.dtype, built.device.type) == ("meta", torch.float64, "cpu")
