"""Differential attention: the paper's equation, each softmax by itself, and the sizes of its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import one_mixer
import pytest
import strategies
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.nn.step import Step
from asbuilt.spec import Attention, Differential, Model, Pass, RMSNorm

TOKENS = 11


def usual(n_heads: int, n_kv_heads: int, d_head: int, **more: Any) -> Attention:  # noqa: ANN401  any field
    pairs = Differential(n_heads=n_heads, d_head=d_head, norm=RMSNorm(d=2 * d_head), start=0.3)
    sizes = {"d_model": 6, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head}
    return Attention(**sizes, differential=pairs, **more)


@given(st.sampled_from((1, 2)), st.sampled_from((1, 3)), st.integers(1, 4), strategies.SEEDS)
@torch.no_grad()
def test_it_is_the_papers(kv_pairs: int, group: int, d: int, seed: int) -> None:
    """(softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V, V of both key heads of a pair, normed."""
    part = usual(2 * kv_pairs * group, 2 * kv_pairs, d)
    made: Any = strategies.randomised(one_mixer.alone(part), seed).get_submodule("blocks.0.mixer.body")
    x = torch.randn(TOKENS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, k, v = ((x @ one.weight.T).unflatten(-1, (-1, d)).transpose(0, 1) for one in (made.q, made.k, made.v))
    own = made.differential
    weight = torch.exp(own.q1 @ own.k1) - torch.exp(own.q2 @ own.k2) + 0.3
    ahead = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def softmax(head: int) -> Tensor:
        scores = (q[head] @ k[head // group].T / d**0.5).masked_fill(ahead, -torch.inf)
        return scores.softmax(-1)

    pairs = []
    for pair in range(kv_pairs * group):
        values = torch.cat((v[pair // group], v[pair // group + kv_pairs]), -1)
        y = (softmax(pair) - weight * softmax(pair + kv_pairs * group)) @ values
        pairs.append(y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * own.norm.weight * (1 - 0.3))
    wanted = torch.cat(pairs, -1) @ made.o.weight.T

    one_mixer.near(made(x[None], Step((1, TOKENS), x.device, dtype=torch.float64))[0], wanted, 1e-9)


def plain(part: Attention) -> bool:
    """Whether pieces of a text have the keys of the whole: RoPE may depend on its length."""
    return part.differential is not None and getattr(part.positions, "scaling", None) is None


STACKS = one_mixer.stacks(strategies.attentions(5).filter(plain))


@given(STACKS, st.integers(1, 12), st.integers(1, 11), strategies.SEEDS)
@settings(max_examples=20)
def test_pieces_are_the_whole(spec: Model, tokens: int, cut: int, seed: int) -> None:
    one_mixer.check_pieces(spec, tokens, (cut,), seed)


@given(STACKS, st.tuples(st.integers(1, 9), st.integers(1, 9)), st.booleans(), strategies.SEEDS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much])  # few have pairs
def test_padding_changes_nothing(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    one_mixer.check_ragged(spec, lengths, left, seed)


def test_the_cache_is_that_of_as_many_heads() -> None:
    """Only what weights are multiplied with is twice as wide."""
    part = usual(4, 2, 3)
    plain = replace(part, differential=None)
    one, other = (cost.cache(one_mixer.alone(each), 10, "bf16") for each in (part, plain))
    assert one == other
    run = Pass(tokens=5)
    flops = {p.name: p.flops for p in part.multiplies(run)}
    assert flops == {p.name: p.flops * (2 if p.name == "mix" else 1) for p in plain.multiplies(run)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_kv_heads": 1}, "n_kv_heads"),
        ({"d_value": 4}, "differential"),
        ({"n_heads": 8}, "differential"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as refused:
        replace(usual(4, 2, 3), **fields)
    assert refused.value.field == f"Attention.{named}"


@pytest.mark.parametrize(("field", "value"), [("n_heads", 3), ("start", 1.0), ("start", 0.0), ("norm", None)])
def test_what_a_difference_refuses(field: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match=field):
        replace(Differential(n_heads=2, d_head=3, norm=RMSNorm(d=6), start=0.5), **{field: value})


def test_diffllama_refuses_odd_heads() -> None:
    config = {"model_type": "diffllama", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
    for key, changes in (("num_key_value_heads", {}), ("num_attention_heads", {"num_attention_heads": 3})):
        with pytest.raises(InputError, match=key):
            read_config(config | changes, "x")
