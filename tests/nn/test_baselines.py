"""Recurrent networks and convolutions over tokens: torch.nn's own, in pieces, with padding, and what they cost."""

from __future__ import annotations

from typing import Any

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asbuilt import cost
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn.encoder import pooler_activation
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import CELLS, CausalConvolution, CentredConvolution, Model, Part, Pass, Recurrent

STACKS = one_mixer.stacks(strategies.baselines(5))
LENGTHS = st.integers(1, 12)


def body(part: Any, seed: int) -> Any:  # noqa: ANN401
    return strategies.randomised(one_mixer.alone(part), seed).get_submodule("blocks.0.mixer.body")


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_torch(part: Recurrent) -> nn.RNN | nn.GRU | nn.LSTM:
    """torch.nn's network of the same sizes, in float64."""
    sizes: dict[str, Any] = {"bias": part.bias, "batch_first": True, "dtype": torch.float64}
    if part.cell in ("tanh", "relu"):
        return nn.RNN(part.d_model, part.d_hidden, nonlinearity=part.cell, **sizes)
    return (nn.GRU if part.cell == "gru" else nn.LSTM)(part.d_model, part.d_hidden, **sizes)


@given(strategies.recurrent(5), LENGTHS, strategies.SEEDS)
def test_it_is_torchs(part: Recurrent, tokens: int, seed: int) -> None:
    """Results and all gradients, with the same weights under torch's names."""
    made, other, x = body(part, seed), of_torch(part), drawn(2, tokens, 5, seed=seed)
    pairs = {"weight_ih_l0": made.x.weight, "weight_hh_l0": made.hidden}
    pairs |= {"bias_ih_l0": made.x.bias, "bias_hh_l0": made.hidden_bias} if part.bias else {}
    with torch.no_grad():
        for name, tensor in pairs.items():
            other.get_parameter(name).copy_(tensor)
    have, want = made(x, Step((2, tokens), x.device)), made.o(other(x)[0])
    one_mixer.near(have, want, 1e-10)
    dy = drawn(2, tokens, 5, seed=seed + 1)
    mine = torch.autograd.grad(have, [*pairs.values()], dy, materialize_grads=True)
    theirs = torch.autograd.grad(want, [other.get_parameter(name) for name in pairs], dy, materialize_grads=True)
    for one, two in zip(mine, theirs, strict=True):
        one_mixer.near(one, two, 1e-9)


@given(strategies.recurrent(5))
def test_it_holds_what_torchs_does(part: Recurrent) -> None:
    own = sum(weight.size for name, weight in part.local_weights().items() if not name.startswith("o."))
    assert own == sum(p.numel() for p in of_torch(part).parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_flops_of_a_token(cell: Any) -> None:  # noqa: ANN401
    """Of each gate, a product with the input and one with h; of a text's first token the former alone."""
    part = Recurrent(d_model=12, d_hidden=7, cell=cell)
    gates = {"lstm": 4, "gru": 3}.get(cell, 1)
    whole = sum(product.flops for product in part.multiplies(Pass(tokens=9, batch=2)))
    assert whole == 2 * 2 * (9 * gates * 7 * 12 + 8 * gates * 7 * 7 + 9 * 7 * 12)
    one = sum(product.flops for product in part.multiplies(Pass(tokens=1, past=5)))
    assert one == 2 * (gates * 7 * (12 + 7) + 7 * 12)


@given(strategies.causal_convolutions(5), LENGTHS, strategies.SEEDS)
@torch.no_grad()
def test_a_convolution_is_a_sum_of_shifted_products(part: CausalConvolution, tokens: int, seed: int) -> None:
    made, x = body(part, seed), drawn(2, tokens, 5, seed=seed)
    wanted = torch.zeros_like(x) if made.bias is None else made.bias.expand_as(x).clone()
    for i in range(part.kernel):
        late = part.dilation * (part.kernel - 1 - i)
        if late < tokens:
            wanted[:, late:] += x[:, : tokens - late] @ made.taps[:, :, i].T
    one_mixer.near(made(x, Step((2, tokens), x.device)), wanted, 1e-10)


@given(strategies.centred_convolutions(5), LENGTHS, st.integers(0, 3), st.integers(0, 3), strategies.SEEDS)
def test_a_centred_convolution_reads_both_sides(
    part: CentredConvolution, tokens: int, before: int, after: int, seed: int
) -> None:
    """Shifted products, activated; padding on either side, and its gradients, count for nothing."""
    built: Any = module(part, "x")
    made, x = built.double(), drawn(2, tokens, 5, seed=seed).requires_grad_()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed + i))
    rows = []
    for t in range(tokens):
        near = [(i, t + i - part.kernel // 2) for i in range(part.kernel)]
        inside = [x[:, at] @ made.taps[:, :, i].T for i, at in near if 0 <= at < tokens]
        rows.append(sum(inside, made.bias.expand(2, 5)))
    wanted = pooler_activation(part.activation)(torch.stack(rows, 1))
    dy = drawn(2, tokens, 5, seed=seed + 7)
    inputs = [x, *made.parameters()]
    want = torch.autograd.grad(wanted, inputs, dy)
    valid = torch.zeros(2, before + tokens + after, dtype=torch.bool)
    valid[:, before : before + tokens] = True
    wide = torch.nn.functional.pad(x, (0, 0, before, after), value=9.0)
    for given_x, step in ((x, Step((2, tokens), x.device)), (wide, Step(valid.shape, x.device, valid_BT=valid))):  # type: ignore[arg-type]
        have = made(given_x, step)
        have = have[:, before : before + tokens] if given_x is wide else have
        one_mixer.near(have, wanted, 1e-10)
        for one, two in zip(torch.autograd.grad(have, inputs, dy, retain_graph=True), want, strict=True):
            one_mixer.near(one, two, 1e-9)


@given(STACKS, LENGTHS, st.integers(1, 11), strategies.SEEDS)
def test_pieces_are_the_whole(spec: Model, tokens: int, cut: int, seed: int) -> None:
    one_mixer.check_pieces(spec, tokens, (cut,), seed)


@given(STACKS, st.tuples(st.integers(1, 9), st.integers(1, 9)), st.booleans(), strategies.SEEDS)
def test_padding_changes_nothing(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    one_mixer.check_ragged(spec, lengths, left, seed)


@given(STACKS, st.integers(1, 3), st.integers(1, 15), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=50)
def test_what_is_kept(spec: Model, batch: int, tokens: int, dtype: torch.dtype) -> None:
    one_mixer.check_saved(spec, batch, tokens, dtype)


CONVOLUTIONS = [CausalConvolution(d_model=64, kernel=3), CentredConvolution(d_model=64, kernel=3)]
PARTS = [Recurrent(d_model=64, d_hidden=96, cell=cell) for cell in CELLS] + CONVOLUTIONS


@pytest.mark.parametrize("part", PARTS, ids=lambda part: getattr(part, "cell", type(part).__name__))
@pytest.mark.parametrize("tokens", [1, 256])
def test_peak_is_the_allocators(part: Part, tokens: int) -> None:
    made, x = module(part, "x"), torch.zeros(2, tokens, 64)
    with torch.inference_mode():
        for parameter in made.parameters():
            parameter.zero_()
        made(x, Step((2, tokens), x.device))
        seen = measured.peak_bytes(lambda: made(x, Step((2, tokens), x.device)))
    found = memory(part).peak_bytes(Pass(tokens=tokens, batch=2, width=4))
    assert 0.6 * seen <= found <= 1.7 * seen


@pytest.mark.parametrize("cell", CELLS)
def test_a_hundred_thousand_tokens_are_finite(cell: Any) -> None:  # noqa: ANN401
    part = Recurrent(d_model=2, d_hidden=2, cell=cell)
    one_mixer.check_long(part, 100_000 if cell == "lstm" else 20_000)


@pytest.mark.parametrize(("cell", "states"), [("tanh", 1), ("gru", 1), ("lstm", 2)])
def test_the_state_is_of_one_size(cell: Any, states: int) -> None:  # noqa: ANN401
    spec = one_mixer.alone(Recurrent(d_model=4, d_hidden=10, cell=cell))
    assert cost.cache(spec, 999, "bf16").at_seq == cost.cache(spec, 1, "bf16").at_seq == states * 10 * 4
    spec = one_mixer.alone(CausalConvolution(d_model=4, kernel=3, dilation=8))
    assert cost.cache(spec, 999, "bf16").at_seq == 2 * 8 * 4 * 2
