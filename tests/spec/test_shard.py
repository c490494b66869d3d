"""What one device of several holds: every weight whole or divided along one dimension, heads and experts kept whole."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import encoders, specs

from asbuilt import InputError, catalog, cost
from asbuilt.kernels.memory import memory
from asbuilt.spec import (
    MLP,
    Attention,
    HyperConnection,
    MixtureOfExperts,
    Model,
    Parallel,
    Part,
    Pass,
    RMSNorm,
    Router,
    StreamMerge,
    walk,
    weights,
)
from asbuilt.spec.part import runs

ANY = specs() | encoders()


def sharded(spec: Part, degree: int) -> Part | None:
    """One device's part, None where the degree does not divide it."""
    try:
        return spec.shard(degree)
    except InputError:
        return None


@given(ANY, st.integers(1, 6))
def test_a_weight_is_whole_or_divided_along_one_dimension(spec: Model, degree: int) -> None:
    own = sharded(spec, degree)
    if own is None:
        return
    for (path, whole, _), (at, part, _) in zip(weights(spec), weights(own), strict=True):
        assert path == at
        smaller = [(a, b) for a, b in zip(whole.shape, part.shape, strict=True) if a != b]
        assert len(smaller) <= 1
        for a, b in smaller:  # b of a each; key/value heads beyond their number are there several times
            assert a % b == 0
            assert degree % (a // b) == 0


@given(ANY, st.integers(1, 6), st.integers(1, 9), st.integers(0, 9))
def test_devices_together_do_all_the_work(spec: Model, degree: int, tokens: int, past: int) -> None:
    own = sharded(spec, degree)
    if own is None:
        return
    run = Pass(tokens=tokens, past=past if spec.decodes else 0, batch=2)
    whole, part = cost.flops(spec, run), cost.flops(own, run)
    assert whole.products <= degree * part.products
    mixing = mixed(spec, run)
    assert mixing == mixed(own, run)
    assert degree * (part.scores - mixing) == whole.scores - mixing  # heads are divided; else only streams are mixed
    assert memory(own).peak_bytes(run) <= memory(spec).peak_bytes(run)
    kept, held = cost.cache(spec, tokens, "fp32").at_seq, cost.cache(own, tokens, "fp32").at_seq
    assert Fraction(kept, degree) <= held <= kept


def mixed(spec: Part, run: Pass) -> int:
    """FLOPs of weighted sums of hyper-connections' streams, which every device has whole."""
    return sum(
        product.flops
        for _, part, seen in runs(spec, run)
        if isinstance(part, HyperConnection | StreamMerge)
        for product in part.multiplies(seen)
        if product.weight is None
    )


@given(ANY)
def test_one_device_holds_it_all(spec: Model) -> None:
    assert spec.shard(1) == spec


ATTENTION = Attention(d_model=12, n_heads=8, n_kv_heads=2, d_head=4, q_norm=RMSNorm(d=32), k_norm=RMSNorm(d=8))


def test_key_value_heads_beyond_their_number_are_replicated() -> None:
    for degree, (heads, kv_heads) in {1: (8, 2), 2: (4, 1), 4: (2, 1), 8: (1, 1)}.items():
        own = ATTENTION.shard(degree)
        assert (own.n_heads, own.n_kv_heads) == (heads, kv_heads)
        assert own.q_norm is not None
        assert own.k_norm is not None
        assert (own.q_norm.d, own.k_norm.d) == (heads * 4, kv_heads * 4)
    with pytest.raises(InputError, match=r"Attention.n_heads.*multiple of 3"):
        ATTENTION.shard(3)
    with pytest.raises(InputError, match="n_kv_heads"):
        Attention(d_model=12, n_heads=6, n_kv_heads=3, d_head=4).shard(2)


@pytest.mark.parametrize(("tensor", "expert", "d_ff"), [(4, 1, 3), (4, 2, 6), (4, 4, 12), (2, 4, 12), (1, 4, 12)])
def test_experts_are_kept_whole_first(tensor: int, expert: int, d_ff: int) -> None:
    """Experts go to `expert` devices; what is left of the tensor degree divides each of them."""
    router = Router(d_model=5, n_experts=8, top_k=2)
    part = MixtureOfExperts(
        d_model=5,
        d_ff=12,
        n_experts=8,
        activation="silu",
        router=router,
        shared=MLP(d_model=5, d_ff=8, activation="relu"),
    )
    own = part.shard(tensor, expert)
    assert (own.d_ff, own.n_experts, own.router) == (d_ff, 8, router)
    assert own.shared is not None
    assert own.shared.d_ff == 8 // tensor
    assert {*own.spreads()} <= {*own.holds()}
    with pytest.raises(InputError, match="expert parallel degree"):
        part.shard(1, 3)


def test_children_are_divided_where_the_part_says_nothing() -> None:
    both = Parallel(attention=ATTENTION, ffn=MLP(d_model=12, d_ff=6, activation="relu"))
    assert both.shard(2) == Parallel(attention=ATTENTION.shard(2), ffn=MLP(d_model=12, d_ff=3, activation="relu"))


def test_llama_in_eight() -> None:
    """Norms are whole, all else is in eight."""
    spec = catalog.find("llama-3-8b").spec()
    own = spec.shard(8)
    for (_, whole), (_, part) in zip(walk(spec), walk(own), strict=True):
        for name, weight in whole.holds().items():
            assert weight.size == part.holds()[name].size * (1 if whole.kind == "norm" else 8)
