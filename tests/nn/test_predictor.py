"""Layers for predicting further tokens: built and stored beside the model, in none of its passes and bills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.nn import build, stored_tensors
from asbuilt.nn.cache import Cache
from asbuilt.nn.language_model import Predictor as Module
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import (
    Head,
    LanguageModel,
    Pass,
    Predictor,
    RMSNorm,
    dumps,
    from_dict,
    loads,
    stored_weights,
    to_dict,
)

PREDICTORS = strategies.predictors(5, 4)


@given(strategies.specs(), st.integers(1, 9), st.integers(1, 9))
@torch.no_grad()
def test_a_predictor_changes_no_pass_and_no_bill(spec: LanguageModel, tokens: int, past: int) -> None:
    bare = replace(spec, predictors=())
    run = Pass(tokens=tokens, past=past)
    assert cost.flops(spec, run) == cost.flops(bare, run)
    assert cost.parameters(spec) == cost.parameters(bare)
    assert cost.active_parameters(spec) == cost.active_parameters(bare)
    assert cost.cache(spec, tokens, "bf16") == cost.cache(bare, tokens, "bf16")
    assert cost.moved(spec, run, "bf16", "bf16") == cost.moved(bare, run, "bf16", "bf16")
    assert memory(spec).peak_bytes(run) == memory(bare).peak_bytes(run)
    one, other = strategies.randomised(spec, 0), strategies.randomised(bare, 0)
    tensors = stored_tensors(one)
    for path, tensor in stored_tensors(other).items():
        tensor.copy_(tensors[path])
    ids = torch.zeros(1, tokens, dtype=torch.long)
    assert torch.equal(one(ids), other(ids))
    assert (
        Cache(spec, batch=1, capacity=9, dtype=torch.float32).layers.keys()
        == Cache(bare, batch=1, capacity=9, dtype=torch.float32).layers.keys()
    )


@given(strategies.specs())
def test_it_is_stored_and_initialised(spec: LanguageModel) -> None:
    built = build(spec)
    tensors = stored_tensors(built)
    assert {path: w.shape for path, w, _ in stored_weights(spec)} == {n: tuple(t.shape) for n, t in tensors.items()}
    joins = [tensor for path, tensor in tensors.items() if path.endswith(".join.weight")]
    assert len(joins) == len(spec.predictors)
    assert all(0 < float(join.std()) < 0.1 for join in joins)
    assert loads(dumps(spec)) == spec


@given(PREDICTORS, st.integers(1, 6))
def test_what_it_multiplies_is_counted(part: Predictor, tokens: int) -> None:
    built = module(part, "p").to("meta")
    x, ids = torch.zeros(1, tokens, 4, device="meta"), torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        built(ids, x, Step((1, tokens), x.device, kernel="reference"))
    bill = cost.flops(part, Pass(tokens=tokens))
    assert counter.get_total_flops() == bill.forward - bill.caching  # there is no cache


@given(PREDICTORS, strategies.SEEDS)
@torch.no_grad()
def test_it_reads_the_stream_and_the_next_token(part: Predictor, seed: int) -> None:
    """The embedding's half comes first, as eh_proj is stored."""
    built = module(part, "p").double()
    assert isinstance(built, Module)
    generator = torch.Generator().manual_seed(seed)
    for parameter in built.parameters():
        parameter.normal_(generator=generator)
    stream = torch.randn(1, 3, 4, dtype=torch.float64, generator=generator)
    ids = torch.tensor([[1, 0, 4]])
    step = Step((1, 3), stream.device)
    first, second = built.join.weight.split(4, 1)
    joined = (
        built.token_norm(built.get_parameter("embedding.weight")[ids]) @ first.T + built.stream_norm(stream) @ second.T
    )
    want = built.norm(built.block(joined, step)) @ built.head.weight.T  # type: ignore[union-attr]
    torch.testing.assert_close(built(ids, stream, step), want, rtol=1e-9, atol=1e-9 * max(1.0, float(want.abs().max())))


@given(PREDICTORS)
def test_what_cannot_be(part: Predictor) -> None:
    with pytest.raises(InputError, match=r"Predictor\.norm"):
        replace(part, norm=RMSNorm(d=3))
    with pytest.raises(InputError, match=r"Predictor\.head"):
        replace(part, head=Head(d_model=4, n_vocab=6))
    with pytest.raises(InputError, match=r"Model\.predictors"):
        from_dict(to_dict(strategies.scripted([0, 1], 4).spec) | {"predictors": [to_dict(part)]})
