"""RWKV-7's mixers: chunks equal the recurrence, which is the paper's, in pieces and padded, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from one_mixer import near
from torch import Tensor

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.delta_rule import by_chunks
from asbuilt.kernels.generalised_delta_rule import Tokens, by_tokens, one_token
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn.cache import Cache
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import ChannelMixing, DeltaTimeMixing, HeadNorm, Model, Pass, TokenShift, delta_net
from asbuilt.spec.delta_time_mixing import TARGETS

CHUNK = 4


def drawn(tokens: int, heads: tuple[int, int, int], seed: int, strength: float = 1.0) -> Tokens:
    """Removal keys of length 1, rates from 0 to 1, and decays exp(-0.61 strength sigmoid(normal)), for two rows."""
    K, D, V = heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, tokens, *shape, dtype=torch.float64, generator=generator)

    c = normal(K, D)
    c = c / c.norm(dim=-1, keepdim=True)
    return Tokens(
        normal(K, D),
        c,
        c * normal(K, D).sigmoid(),
        normal(K, D),
        normal(K, 1, V),
        -0.61 * strength * normal(K, D).sigmoid(),
    )


@pytest.fixture
def short_chunks() -> Iterator[None]:
    """Chunks of a few tokens, so that short texts have several."""
    usual, delta_net.CHUNK = delta_net.CHUNK, CHUNK
    yield
    delta_net.CHUNK = usual


@st.composite
def stacks(draw: DrawFn) -> Model:
    """One layer, or two, of which the second's values move towards the first's; or a feed-forward between them."""
    first = draw(strategies.delta_time_mixings(5))
    if draw(st.booleans()):
        return one_mixer.alone(first)
    sizes = {"n_heads": first.n_heads, "d_value": first.d_value, "norm": first.norm}
    later = replace(draw(strategies.delta_time_mixings(5)), **sizes, move_rank=2, value_from="early")
    between = draw(st.lists(strategies.channel_mixings(5, receptance=False), max_size=1))
    return one_mixer.alone(replace(first, value_name="early"), *between, later)


HEADS = st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5))
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 37)


@given(HEADS, st.sampled_from(LENGTHS), st.booleans(), st.floats(0, 1), strategies.SEEDS)
def test_chunks_are_the_recurrence(
    heads: tuple[int, int, int], tokens: int, past: bool, strength: float, seed: int
) -> None:
    text = drawn(tokens, heads, seed, strength)
    state = torch.randn(2 * heads[0], *heads[1:], dtype=torch.float64) if past else None
    (y, after), (wanted, at_end) = by_chunks(text, state, CHUNK, keep=True), by_tokens(text, state)
    near(y, wanted, 1e-10)
    assert after is not None
    near(after, at_end, 1e-10)
    if tokens == 1:
        into = torch.full_like(at_end, torch.nan) if state is None else state
        near(one_token(text, state, into=into), wanted, 1e-10)
        near(into, at_end, 1e-10)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 320])
def test_in_float32_too(tokens: int) -> None:
    text = drawn(tokens, (2, 16, 8), 3)
    wanted, _ = by_tokens(text, None)
    got, _ = by_chunks(Tokens(*(x.float() for x in text)), None, 64, keep=False)
    near(got.double(), wanted, 1e-5)


@pytest.mark.parametrize("strength", [0.0, 1e-6, 1.0])
def test_nothing_overflows_in_100k_tokens(strength: float) -> None:
    """The first tokens equal the recurrence, and the last ones where all else is forgotten."""
    tokens, last = 100_000, 200
    text = Tokens(*(x.float() for x in drawn(last, (1, 4, 4), 1, strength)))
    text = text._replace(k=text.k / 100)
    long = Tokens(*(x[:1].repeat(1, tokens // last, *[1] * (x.ndim - 2)) for x in text))
    y, state = by_chunks(long, None, 64, keep=True)
    assert state is not None
    assert y.isfinite().all()
    assert state.isfinite().all()
    wanted, _ = by_tokens(Tokens(*(x[:1].double() for x in text)), None)
    near(y[:, :last].double(), wanted, 1e-4)
    if strength == 1.0:
        near(y[:, -100:].double(), wanted[:, -100:], 1e-4)


def written_out(part: DeltaTimeMixing, made: Any, x_TM: Tensor, lent: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Returns the output and the values of one text, by equations 3 to 21 of the paper, head by head, rows as there."""
    T, H = len(x_TM), part.n_heads
    before = torch.cat((torch.zeros_like(x_TM[:1]), x_TM[:-1]))
    mu = {name: getattr(made.shift, name) for name in TARGETS}
    mu = {name: m if part.shift.of_past else 1 - m for name, m in mu.items()}
    r_x, d_x, k_x, v_x, a_x, g_x = (x_TM + (before - x_TM) * mu[name] for name in TARGETS)
    r, k, v = r_x @ made.r.weight.T, k_x @ made.k.weight.T, v_x @ made.v.weight.T
    d = torch.tanh(d_x @ made.decay_down.weight.T) @ made.decay.weight.T + made.decay.bias
    w = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=x_TM.dtype)) * torch.sigmoid(d))
    a = torch.sigmoid(a_x @ made.rate_down.weight.T @ made.rate.weight.T + made.rate.bias)
    own = v
    if lent is not None:
        v = v + (lent - v) * torch.sigmoid(v_x @ made.move_down.weight.T @ made.move.weight.T + made.move.bias)
    g = torch.sigmoid(g_x @ made.gate_down.weight.T) @ made.gate.weight.T
    removal, written = (k * made.removal), k * (1 + (a - 1) * made.replacement)
    r, removal, written, v, a, w = (z.view(T, H, -1) for z in (r, removal, written, v, a, w))
    removal = removal / (removal.square().sum(-1, keepdim=True) + part.length_eps).sqrt()
    p = torch.empty(T, H, part.d_value, dtype=x_TM.dtype)
    for h in range(H):
        S = torch.zeros(part.d_value, part.d_key, dtype=x_TM.dtype)
        for t in range(T):
            c = removal[t, h]
            S = S @ (torch.diag(w[t, h]) - torch.outer(c, a[t, h] * c)) + torch.outer(v[t, h], written[t, h])
            p[t, h] = S @ r[t, h]
    normed = (p - p.mean(-1, keepdim=True)) / (p.var(-1, unbiased=False, keepdim=True) + part.norm.eps).sqrt()
    normed = normed * made.norm.weight + (made.norm.bias if part.norm.bias else 0)
    bonus = (r * made.bonus * written).sum(-1, keepdim=True) * v
    return (g * (normed + bonus).flatten(1)) @ made.o.weight.T, own


@pytest.mark.usefixtures("short_chunks")
@given(stacks(), st.sampled_from((1, 3, 4, 5, 20)), strategies.SEEDS)
@settings(max_examples=40)
@torch.no_grad()
def test_it_is_the_papers(spec: Model, tokens: int, seed: int) -> None:
    """Every mixer of a stack, on what it was given, and the feed-forward without a receptance."""
    model: Any = strategies.randomised(spec, seed)
    x = torch.randn(2, tokens, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    step, lent = Step((2, tokens), x.device), None
    for i, part in enumerate(block.branches[0].body for block in spec.blocks):
        made = model.get_submodule(f"blocks.{i}.mixer.body")
        y = made(x, step)
        if isinstance(part, ChannelMixing):
            before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
            mu = made.shift.up if part.shift.of_past else 1 - made.shift.up
            hidden = (x + (before - x) * mu) @ made.up.weight.T
            near(y, hidden.clamp(min=0) ** 2 @ made.down.weight.T, 1e-10)
            continue
        assert isinstance(part, DeltaTimeMixing)
        rows = [None, None] if part.value_from is None else lent
        assert rows is not None
        wanted, lent = zip(*(written_out(part, made, row, v) for row, v in zip(x, rows, strict=True)), strict=True)
        near(y, torch.stack(wanted), 1e-10)


@pytest.mark.usefixtures("short_chunks")
@given(stacks(), st.sampled_from(LENGTHS), st.integers(1, 19), strategies.SEEDS)
@settings(max_examples=40)
def test_pieces_are_the_whole(spec: Model, tokens: int, cut: int, seed: int) -> None:
    one_mixer.check_pieces(spec, tokens, (cut,), seed)


@pytest.mark.usefixtures("short_chunks")
@given(stacks(), st.tuples(st.integers(1, 9), st.integers(1, 9)), st.booleans(), strategies.SEEDS)
@settings(max_examples=40)
def test_padding_changes_nothing(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    one_mixer.check_ragged(spec, lengths, left, seed)


@pytest.mark.usefixtures("short_chunks")
@given(stacks(), st.integers(1, 3), st.integers(1, 15), st.integers(0, 9))
@settings(max_examples=50)
def test_several_chunks_multiply_what_is_declared(spec: Model, batch: int, tokens: int, past: int) -> None:
    one_mixer.check_products(spec, batch, tokens, past)


@pytest.mark.usefixtures("short_chunks")
@given(stacks(), st.integers(1, 3), st.integers(1, 15), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=30)
def test_several_chunks_keep_what_is_declared(spec: Model, batch: int, tokens: int, dtype: torch.dtype) -> None:
    one_mixer.check_saved(spec, batch, tokens, dtype)


@pytest.mark.usefixtures("short_chunks")
@given(stacks(), st.integers(1, 9), strategies.SEEDS)
@settings(max_examples=15)
def test_gradients_are_those_of_the_recurrence(spec: Model, tokens: int, seed: int) -> None:
    """Autograd through the recurrence, of the same parameters."""
    model, ids = strategies.randomised(spec, seed), one_mixer.text(spec, 2, tokens, seed)
    model(ids).square().sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    place = "asbuilt.nn.delta_time_mixing"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{place}.recomputed", lambda function, *tensors: function(*tensors))
        patched.setattr(f"{place}.by_chunks", lambda text, state, size, keep: by_tokens(text, state))
        patched.setattr(f"{place}.one_token", lambda text, state, into: by_tokens(text, state)[0])
        model(ids).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        near(got[name], p.grad, 1e-8)


def usual(n_heads: int, width: int, **more: Any) -> DeltaTimeMixing:  # noqa: ANN401  any field
    """One whose heads are as wide as the stream together."""
    return DeltaTimeMixing(
        d_model=n_heads * width,
        n_heads=n_heads,
        d_key=width,
        d_value=width,
        shift=TokenShift(d_model=n_heads * width, targets=TARGETS),
        norm=HeadNorm(d=width, n_heads=n_heads, bias=True),
        **{"decay_rank": 8, "rate_rank": 8, "gate_rank": 8, **more},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40, 64, 100, 600, 1000])
def test_the_peak_is_the_allocators(tokens: int, dtype: torch.dtype) -> None:
    part = usual(4, 32)
    built = module(part, "").to(dtype)
    for parameter in built.parameters():
        parameter.data.normal_(0.0, 0.05)
    x, cache = torch.randn(2, tokens, 128, dtype=dtype), Cache(part, batch=2, capacity=tokens, dtype=dtype)

    def run() -> None:
        built(x, Step((2, tokens), x.device, cache=cache, dtype=dtype))

    with torch.inference_mode():
        run()
        peak = measured.peak_bytes(run)
    declared = memory(part).peak_bytes(Pass(tokens=tokens, batch=2, width=dtype.itemsize))
    assert 0.8 * peak <= declared <= 1.25 * peak, declared / peak


def test_a_hundred_thousand_tokens_are_finite() -> None:
    one_mixer.check_long(usual(2, 2))


def test_the_state_is_one_matrix_for_each_head() -> None:
    """RWKV7-Goose-World3-1.5B: 32 heads of 64 x 64 numbers in float32 for each layer, and the token before."""
    spec = one_mixer.alone(usual(32, 64))
    for dtype, width in (("fp8", 1), ("bf16", 2), ("fp32", 4)):
        bill = cost.cache(spec, 4096, dtype)
        assert bill.fixed == bill.at_seq == 32 * 64 * 64 * 4 + 2048 * width
    assert Cache(spec, batch=3, capacity=9, dtype=torch.bfloat16).nbytes == 3 * cost.cache(spec, 9, "bf16").fixed


def test_values_move_towards_those_of_an_earlier_layer() -> None:
    lender, reader = usual(2, 3, value_name="early"), usual(2, 3, value_from="early", move_rank=2)
    one_mixer.alone(lender, reader, reader)
    allowed = "an earlier layer with the value_name early, of as many heads and as wide values"
    for layers in ((reader,), (reader, lender), (replace(lender, value_name="other"), reader)):
        with pytest.raises(InputError, match=allowed):
            one_mixer.alone(*layers)
    with pytest.raises(InputError, match="later layers that read the values named"):
        one_mixer.alone(lender)
    wide = replace(usual(3, 2, value_name="early"))
    with pytest.raises(InputError, match=allowed):
        one_mixer.alone(wide, reader)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"value_from": "early"}, "move_rank"),
        ({"move_rank": 3}, "move_rank"),
        ({"value_from": "early", "value_name": "late", "move_rank": 3}, "value_name"),
        ({"value_name": "not a name"}, "value_name"),
        ({"norm": HeadNorm(d=3, n_heads=3)}, "norm"),
        ({"shift": TokenShift(d_model=6, targets=("r", "k", "v"))}, "shift"),
        ({"decay_rank": 0}, "decay_rank"),
        ({"length_eps": 0.0}, "length_eps"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as refused:
        replace(usual(2, 3), **fields)
    assert refused.value.field == f"DeltaTimeMixing.{named}"
