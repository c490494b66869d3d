"""The native kernels beside torch: every format and every tail, for each instruction set that this machine has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace

import one_mixer
import pytest
import strategies
import torch
import torch.nn.functional as F
from block_scales import drawn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import asbuilt
from asbuilt.checkpoint.packed import packed_spec
from asbuilt.dtypes import BLOCKS
from asbuilt.kernels import convolution, native, packed
from asbuilt.kernels import rows as plain_rows
from asbuilt.kernels.delta_rule import Tokens, by_tokens
from asbuilt.nn import build, experts, native_layers, stored_tensors
from asbuilt.nn.build import interleave
from asbuilt.nn.cache import Cache, KVCache
from asbuilt.nn.model import Model
from asbuilt.spec import (
    Attention,
    Branch,
    GatedDeltaNet,
    GatedMLP,
    MixtureOfExperts,
    Part,
    RMSNorm,
    Rotary,
    Router,
    ShortConvolution,
    weights,
)
from asbuilt.spec.edit import transform
from asbuilt.spec.linear import maps_by_path


def _kinds() -> list[str]:
    """The instruction sets of this machine and build, none without the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.SWITCH, "1")
        native.library.cache_clear()
        lib = native.library()
    native.library.cache_clear()
    return [] if lib is None else lib.asbuilt_usable().decode().split()


KINDS, ready = _kinds(), native.ready


@pytest.fixture(params=KINDS or ["none"], autouse=True)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loads the library, which other tests run without, with each instruction set of this machine."""
    if not KINDS:
        pytest.skip("the native kernels are not installed (make builds them where there is a compiler)")
    monkeypatch.setenv(native.SWITCH, request.param)
    caches = (native.library, native.number)
    for one in caches:
        one.cache_clear()
    assert native.instructions() == request.param
    with torch.inference_mode():
        yield
    native.library().asbuilt_choose(KINDS[0].encode())  # type: ignore[union-attr]
    for one in caches:
        one.cache_clear()


def mixed(raw: Tensor, format: str) -> Tensor:
    made = raw.clone()
    native.interleave(made, format)
    return made


@pytest.mark.parametrize("format", sorted(packed.EXPANDED))
def test_rows_are_interleaved_and_looked_up(format: str) -> None:
    rows = int(torch.randint(1, 71, ()))
    raw = drawn(format, rows, 2 * BLOCKS[format][0])
    made = mixed(raw, format)
    assert torch.equal(native.as_stored(made, format), raw)
    index = torch.randint(0, rows, (3, 5))
    assert torch.equal(native.look_up(index, made, format), packed.expand(raw, format, torch.float32)[index])
    for wrong in (-1, rows):
        with pytest.raises(IndexError):
            native.look_up(torch.tensor([wrong]), made, format)


@pytest.mark.parametrize("format", sorted(packed.EXPANDED))
@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_is_that_of_inputs_rounded_twice(format: str, threads: int) -> None:
    """To the last bits of float32, and within the stated bound of the exact product; also where x is not aligned."""
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 2, 3, 4, 7, 33):
            rows, inputs = int(torch.randint(1, 71, ())), int(torch.randint(1, 4, ())) * BLOCKS[format][0]
            raw = drawn(format, rows, inputs)
            dense = packed.expand(raw, format, torch.float32).double()
            x = torch.randn(tokens, inputs + 3)[:, 3:] * torch.rand(tokens, 1).exp()
            bias = torch.randn(rows)
            (found,) = native.products(x, [(mixed(raw, format), format, bias)], native.ready(x))
            groups = x.reshape(tokens, -1, 32)
            most = groups.abs().amax(-1, keepdim=True)
            scaled = groups * (torch.full_like(most, 127) / most)
            fine = ((scaled - scaled.round()) * 254).round()
            rounded = ((254 * scaled.round() + fine) * (most / (127 * 254))).view(tokens, inputs)
            whole = rows // native.GROUP * native.GROUP  # the rows that are left are multiplied by x as it is
            want = torch.cat((rounded.double() @ dense[:whole].T, x.double() @ dense[whole:].T), 1) + bias
            size = rounded.double().abs() @ dense.abs().T + 1
            assert ((found - want).abs() / size).max() < 1e-6
            bound = (most / (2 * 127 * 254)).expand_as(groups).reshape(tokens, inputs).double() @ dense.abs().T
            assert ((found - bias - x.double() @ dense.T).abs() <= bound * 1.01 + 1e-6 * size).all()
    finally:
        torch.set_num_threads(1)


def by_halves(x: Tensor, w: Tensor) -> Tensor:
    """x W^T in float64, of x and W as sums of two bfloat16 each, without the product of the low ones."""
    x, w = x.float(), w.float()
    high_x, high_w = x.bfloat16(), w.bfloat16()
    low_x, low_w = (x - high_x.float()).bfloat16(), (w - high_w.float()).bfloat16()
    whole_w = high_w.double() + low_w.double()
    return high_x.double() @ whole_w.T + low_x.double() @ high_w.double().T


@pytest.mark.parametrize("format", sorted(packed.EXPANDED))
@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_are_multiplied_in_float32(format: str, threads: int) -> None:
    """By weights as they are expanded: what is left is float32's rounding, beside float64; with tiles, of their halves.

    Sums of up to 256 products, each rounded at up to the size of the sum: sixteen roundings at random, twice as many
    without fused multiply-adds. NVFP4's and MXFP4's scales are drawn over many powers of two, so that one product may
    be that large from the beginning on.
    """
    torch.set_num_threads(threads)
    try:
        for tokens in (48, 53, 390, 800):
            rows, inputs = int(torch.randint(1, 140, ())), int(torch.randint(1, 11, ())) * BLOCKS[format][0]
            raw, bias = drawn(format, rows, inputs), torch.randn(rows)
            dense = packed.expand(raw, format, torch.float32).double()
            x = torch.randn(tokens, inputs + 3)[:, 3:]
            (found,) = native.products(x, [(mixed(raw, format), format, bias)], native.ready(x))
            size, want = x.double().abs() @ dense.abs().T + 1, x.double() @ dense.T
            if native.instructions() == "amx":
                assert ((found - want - bias).abs() <= (size - 1) / 2**16 + 2e-6 * size).all()
                want = by_halves(x, dense)
            assert ((found - want - bias).abs() / size).max() < 2e-6
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("format", ["q4_1", "q6_k", "iq2_s", None])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_model_in_bfloat16_may_round_many_rows_to_it(format: str | None, threads: int) -> None:
    """With tiles x and W are both rounded, and multiplied once; without, and for few rows, nothing is."""
    torch.set_num_threads(threads)
    try:
        for tokens in (3, 47, 48, 390, 800):
            rows, inputs = int(torch.randint(1, 140, ())), int(torch.randint(1, 5, ())) * 256
            raw = torch.randn(rows, inputs).bfloat16() if format is None else drawn(format, rows, inputs)
            dense = (raw.float() if format is None else packed.expand(raw, format, torch.float32)).double()
            weight, bias, x = (
                raw if format is None else mixed(raw, format),
                torch.randn(rows),
                torch.randn(tokens, inputs),
            )
            given = [(weight, format, bias)]
            (found,) = native.products(x, given, native.ready(x), torch.bfloat16)
            (usual,) = native.products(x, given, native.ready(x))
            if native.instructions() != "amx" or tokens < (12 if format is None else 48):
                assert torch.equal(found, usual)
                continue
            size, want = x.double().abs() @ dense.abs().T + 1, x.bfloat16().double() @ dense.bfloat16().double().T
            assert ((found - want - bias).abs() / size).max() < 2e-6
            assert ((found - x.double() @ dense.T - bias).abs() <= size / 2**7).all()
            assert not torch.equal(found, usual)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", list(native.NUMBERS))
def test_plain_numbers_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    for tokens in (1, 2, 3, 11, 12, 50, 400):
        rows, inputs = int(torch.randint(1, 140, ())), int(torch.randint(1, 600, ()))
        weight, bias = torch.randn(rows, inputs).to(dtype), torch.randn(rows)
        x = torch.randn(tokens, inputs + 3)[:, 3:]
        (found,) = native.products(x, [(weight, None, bias)], native.ready(x))
        size, want = x.double().abs() @ weight.double().abs().T + 1, x.double() @ weight.double().T
        if native.instructions() == "amx" and tokens >= 12 and dtype is not torch.float32:
            want = by_halves(x, weight)
        assert ((found - want - bias).abs() / size).max() < 1e-6
        narrow, offset = x.to(dtype), bias.to(dtype)  # both rounded already
        found, want = native.linear(narrow, weight, offset), F.linear(narrow.float(), weight.float(), offset.float())
        assert found is not None
        torch.testing.assert_close(found, want.to(dtype), atol=1e-3, rtol=2 * torch.finfo(dtype).eps)


def test_several_matrices_of_different_kinds_share_their_inputs() -> None:
    x, plain = torch.randn(20, 256), torch.randn(9, 256)
    first, last = mixed(drawn("q4_k", 17, 256), "q4_k"), mixed(drawn("q8_0", 17, 256), "q8_0")
    given = [(first, "q4_k", None), (plain, None, None), (last, "q8_0", None)]
    for ours, one in zip(native.products(x, given, native.ready(x)), given, strict=True):
        assert torch.equal(ours, native.products(x, [one], native.ready(x))[0])


def test_a_flop_counter_sees_every_product() -> None:
    x, weight = torch.randn(5, 64), torch.randn(9, 64)
    with FlopCounterMode(display=False) as counter:
        plain_rows.linear(x, weight)
    assert counter.get_total_flops() == 2 * 5 * 64 * 9


def test_inputs_that_are_not_finite_or_tiny() -> None:
    raw = drawn("q4_1", 16, 64)
    made = mixed(raw, "q4_1")
    for value, finite in ((float("nan"), False), (float("inf"), False), (1e-42, True), (0.0, True)):
        x = torch.full((1, 64), value)
        x[0, 1:] = 0
        for tokens in (1, 60):
            (y,) = native.products(x.expand(tokens, 64), [(made, "q4_1", None)], native.ready(x))
            assert bool(y.isfinite().all()) == finite


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library.cache_clear()
    monkeypatch.setenv(native.SWITCH, "avx3")
    with pytest.raises(asbuilt.InputError, match=r"ASBUILT_NATIVE.*avx3.*portable"):
        native.library()
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.library() is None
    assert not native.missing()
    native.library.cache_clear()
    monkeypatch.setenv(native.SWITCH, "1")
    assert native.library() is not None


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (5, 24), (130, 128), (64, 40)])
def test_the_delta_rule_is_that_of_its_definition(by_channel: bool, tokens: int, width: int) -> None:
    B, K, R, D = 2, 3, 1 if by_channel else 2, 24
    mixed_BTC = torch.randn(B, tokens, 2 * K * D + K * R * width + 5)[..., 5:]
    beta, decay = torch.randn(B, tokens, K * R), 3 * torch.randn(B, tokens, K * D if by_channel else K * R)
    rate, dt_bias, valid = torch.rand(K * R).exp(), torch.randn(decay.shape[-1]), torch.rand(B, tokens) > 0.2
    state = torch.randn(B * K, D, R * width)
    before = state.double()
    given = (mixed_BTC, beta, decay, rate, dt_bias, valid, (K, R, D, width), 1e-6)
    found = native.delta_rule(*given, state, past=True)
    assert found is not None
    q, k, v = mixed_BTC.double().split((K * D, K * D, K * R * width), -1)
    q, k = (
        x.view(B, tokens, K, D) / (x.view(B, tokens, K, D).square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)
    )
    g = -rate.double().view(K, R) * F.softplus(decay.double() + dt_bias).view(B, tokens, K, -1)
    g, b = g * valid[:, :, None, None], beta.double().sigmoid().view(B, tokens, K, R) * valid[:, :, None, None]
    told = Tokens(q * D**-0.5, k, v.view(B, tokens, K, R, width), g[:, :, :, None] if by_channel else g, b)
    want, after = by_tokens(told, before)
    torch.testing.assert_close(found.double(), want.reshape(found.shape), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), after, rtol=1e-5, atol=1e-5)


def test_no_decay_overflows_in_a_long_text() -> None:
    T, D, V = 100_000, 8, 8
    given = (
        torch.randn(1, T, 2 * D + V),
        torch.randn(1, T, 1),
        30 * torch.randn(1, T, 1),
        torch.ones(1),
        torch.zeros(1),
    )
    y = native.delta_rule(*given, None, (1, 1, D, V), 1e-6, None, past=False)
    assert y is not None
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution_is_the_librarys(silu: bool) -> None:
    x, w, bias, before = torch.randn(2, 37, 50)[..., 7:], torch.randn(43, 4), torch.randn(43), torch.randn(2, 43, 3)
    for b, past in ((None, None), (bias, before), (None, before)):
        found = native.convolve(x, w, b, past, silu=silu)
        wide = [None if one is None else one.double() for one in (b, past)]
        want = convolution.reference(x.double(), w.double(), *wide, silu=silu)
        assert found is not None
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_norms_and_gates_are_torchs() -> None:
    y, gate, weight = torch.randn(2, 9, 3, 19), 9 * torch.randn(2, 9, 62)[..., 5:], torch.randn(19)
    for gating, opened in (("silu", F.silu), ("sigmoid", torch.sigmoid)):
        found = native.gated_norm(y, gate, weight, 1e-5, gating=gating)
        want = F.rms_norm(y.double(), (19,), weight.double(), 1e-5) * opened(gate.double()).view(y.shape)
        assert found is not None
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    found = native.gated_norm(gate, None, None, 1e-5)
    assert found is not None
    torch.testing.assert_close(found, F.rms_norm(gate, (57,), None, 1e-5), rtol=1e-5, atol=1e-6)
    found = native.gated_norm(y, None, weight, 1e-5, offset=True)
    assert found is not None
    torch.testing.assert_close(found, F.rms_norm(y, (19,), weight + 1, 1e-5), rtol=1e-5, atol=1e-6)
    first, second = (20 * torch.randn(5, 80)).split((40, 40), -1)
    for name, shape in (("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))):
        found = native.gated_product(first, second, name)
        assert found is not None
        torch.testing.assert_close(found.double(), shape(first.double()) * second, rtol=1e-5, atol=1e-6)
    assert native.gated_product(first, second, "relu") is None


def test_under_autograd_or_in_another_dtype_torch_computes() -> None:
    x = torch.randn(2, 32)
    assert native.ready(x) is not None
    assert native.ready(x.double()) is None
    with torch.inference_mode(False), torch.enable_grad():
        assert native.ready(torch.randn(2, 32)) is None


# of a scale, so that weights are near 0.05
SCALE = {"q4_0": 0.01, "q4_1": 0.01, "q8_0": 7e-4, "q6_k": 4e-5}


def of_blocks(format: str, edit: Callable[[str, Part], Part] = lambda _, part: part) -> Model:
    """A small decoder whose matrices are blocks of the format, and whose other weights are drawn."""
    spec = asbuilt.decoder(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=512, n_vocab=77)
    spec = transform(spec, edit)
    paths = [*maps_by_path(spec), "embedding.weight"]
    made = build(packed_spec(spec, dict.fromkeys(paths, format)))
    for path, weight, _ in weights(made.spec):
        held = made.get_parameter(path)
        if weight.format is not None:
            held.copy_(drawn(format, len(held), weight.shape[1], SCALE[format]))
        else:
            held.data.copy_(0.9 + 0.2 * torch.rand_like(held))
    return made.eval()


def unturned(_: str, part: Part) -> Part:
    return replace(part, positions=None) if isinstance(part, Attention) else part


def relu(_: str, part: Part) -> Part:
    return replace(part, activation="relu") if isinstance(part, GatedMLP) else part


def other_kinds(_: str, part: Part) -> Part:
    """Everything that one call computes besides what llama has: each factor is seen if it is left out."""
    if isinstance(part, Branch):
        return replace(part, scale=0.7 if part.name == "attention" else 1.3)
    if isinstance(part, RMSNorm):
        return replace(part, gain="offset")
    if isinstance(part, Attention):
        norms = {"q_norm": RMSNorm(d=64, eps=0.1), "k_norm": RMSNorm(d=64, eps=0.2, gain="none")}
        turned = Rotary(d_rotary=48, theta=50.0, pairing="adjacent")
        return replace(part, **norms, bias=True, output_bias=True, scale=0.2, positions=turned)  # type: ignore[arg-type]
    return replace(part, activation="gelu_tanh", bias=True) if isinstance(part, GatedMLP) else part


def without_positions(path: str, part: Part) -> Part:
    """The first layer without RoPE, the second with."""
    return replace(part, positions=None) if isinstance(part, Attention) and ".0." in path else part


def delta_nets(path: str, part: Part) -> Part:
    """The first layer a gated delta net, the second gated attention."""
    if isinstance(part, Attention):
        return replace(part, gating="channel")
    if not isinstance(part, Branch) or part.name != "attention" or not path.startswith("blocks.0."):
        return part
    net = GatedDeltaNet(
        d_model=256,
        n_key_heads=2,
        n_value_heads=4,
        d_key=20,
        d_value=64,
        gating="sigmoid",
        length_eps=0.01,
        norm=RMSNorm(d=64, eps=0.1, gain="offset"),
        conv=ShortConvolution(channels=336, kernel=3, bias=True, activation=None),
    )
    return replace(part, body=net, scale=0.7)


def usual_nets(path: str, part: Part) -> Part:
    """The same with SiLU."""
    made = delta_nets(path, part)
    if isinstance(made, Branch) and isinstance(made.body, GatedDeltaNet):
        conv = replace(made.body.conv, kernel=4, bias=False, activation="silu")
        return replace(made, body=replace(made.body, gating="silu", conv=conv))
    return made


@pytest.mark.parametrize("edit", [lambda _, part: part, other_kinds, without_positions, delta_nets])
@pytest.mark.parametrize("format", ["q4_1", "q8_0", "q6_k"])
def test_layers_in_one_call_are_the_modules(format: str, edit: Callable[[str, Part], Part]) -> None:
    """One token of texts of different lengths, beside the modules and beside expanded weights."""
    made, copied = of_blocks(format, edit), of_blocks(format, edit)
    for ours, theirs in zip(copied.parameters(), made.parameters(), strict=True):
        ours.copy_(theirs)
    stored = {path: tensor.clone() for path, tensor in stored_tensors(made).items()}
    assert interleave(made) > 0
    assert interleave(made) == 0  # again: nothing is left
    assert all(torch.equal(tensor, stored[path]) for path, tensor in stored_tensors(made).items())
    assert made.native is not None
    ids = torch.randint(0, 77, (3, 12))
    valid = torch.arange(12) >= torch.tensor([[0], [4], [7]])
    found = []
    for fused in (made.native, None):
        made.native = fused
        cache = Cache(made.spec, batch=3, capacity=300, dtype=torch.float32)
        made(ids, cache=cache, valid_BT=valid)
        found.append([made(ids[:, i : i + 1], cache=cache) for i in range(4)])
    cache = Cache(made.spec, batch=3, capacity=300, dtype=torch.float32)
    copied(ids, cache=cache, valid_BT=valid)
    exact = [copied(ids[:, i : i + 1], cache=cache) for i in range(4)]
    for fused, modules, expanded in zip(*found, exact, strict=True):
        # both are as far from the dense product as 16 bits of the inputs allow; a factor left out is 100 times that
        assert (fused - expanded).norm() / expanded.norm() < 1e-3
        assert (modules - expanded).norm() / expanded.norm() < 1e-3


@pytest.mark.parametrize("edit", [lambda _, part: part, other_kinds])
def test_rope_of_one_text_is_computed_for_runs_of_positions(
    edit: Callable[[str, Part], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_layers, "RUN", 4)
    made, ids = of_blocks("q8_0", edit), torch.randint(0, 77, (1, 14))
    interleave(made)
    whole = made(ids, cache=Cache(made.spec, batch=1, capacity=14, dtype=torch.float32))
    cache = Cache(made.spec, batch=1, capacity=14, dtype=torch.float32)
    steps = [made(ids[:, :2], cache=cache), *(made(ids[:, i : i + 1], cache=cache) for i in range(2, 14))]
    assert (torch.cat(steps, 1) - whole).norm() / whole.norm() < 1e-3


def narrow_heads(_: str, part: Part) -> Part:
    """Heads that are no multiple of a vector, three queries to a key."""
    if isinstance(part, Attention):
        return replace(
            part, n_heads=6, n_kv_heads=2, d_head=20, positions=Rotary(d_rotary=20), q=None, k=None, v=None, o=None
        )
    return part


@pytest.mark.parametrize("dtype", list(native.NUMBERS))
@pytest.mark.parametrize("edit", [other_kinds, without_positions, narrow_heads, delta_nets, usual_nets])
def test_many_tokens_through_layers_of_plain_weights(
    dtype: torch.dtype, edit: Callable[[str, Part], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens after texts of different lengths, and steps: about as near to float64 as the modules, or nearer."""
    spec = transform(asbuilt.decoder(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=200, n_vocab=77), edit)
    made = strategies.randomised(spec, 3, torch.float32).to(dtype).eval()
    modules, exact = deepcopy(made), deepcopy(made).double()
    assert interleave(made) == 0
    assert made.native is not None
    calls, run = [], made.native
    made.native = lambda x, step: calls.append(step.tokens) or run(x, step)  # type: ignore[func-returns-value]
    ids = torch.randint(0, 77, (3, 160))
    valid = torch.arange(9) >= torch.tensor([[0], [4], [7]])
    pieces = [ids[:, :9], ids[:, 9:140], ids[:, 140:143], ids[:, 143:144], ids[:, 144:145]]
    found = []
    for model in (made, modules, exact):
        monkeypatch.setattr(native, "ready", ready if model is made else lambda *_, **__: None)
        cache = Cache(spec, batch=3, capacity=200, dtype=model.dtype)
        model(pieces[0], cache=cache, valid_BT=valid)  # by the modules: it has padding
        found.append(torch.cat([model(one, cache=cache).double() for one in pieces[1:]], 1))
    assert calls == [131, 3, 1, 1]
    assert as_near(*found)
    assert as_near(*(logits[:, 131:] for logits in found))


def odd_heads(_: str, part: Part) -> Part:
    """Heads of an odd width, without positions."""
    if isinstance(part, Attention):
        return replace(part, n_heads=6, n_kv_heads=3, d_head=27, positions=None, q=None, k=None, v=None, o=None)
    return part


@pytest.mark.parametrize("edit", [lambda _, part: part, narrow_heads, odd_heads])
@pytest.mark.parametrize("kv", [None, "fp32", "fp16", "int8:head", "int4:head"])
def test_a_model_in_bfloat16_attends_to_every_cache(kv: str | None, edit: Callable[[str, Part], Part]) -> None:
    """In pieces, with scores that stand far apart: as near to float64 over the same cache as the modules."""
    spec = asbuilt.decoder(d_model=256, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=200, n_vocab=77)
    made = strategies.randomised(transform(spec, edit), 3, torch.float32).to(torch.bfloat16).eval()
    for name in "qk":
        made.get_parameter(f"blocks.0.attention.body.{name}.weight").mul_(3)
    modules, exact = deepcopy(made), deepcopy(made).double()
    interleave(made)
    pieces = torch.randint(0, 77, (2, 300)).split([70, 229, 1], 1)
    found = []
    for model in (made, modules, exact):
        cache = Cache(model.spec, batch=2, capacity=310, dtype=model.dtype, kv=None if model is exact else kv)
        found.append(torch.cat([model(piece, cache=cache).double() for piece in pieces], 1))
    assert as_near(*found)


@pytest.mark.parametrize("edit", [lambda _, part: part, other_kinds, narrow_heads, odd_heads, usual_nets])
@pytest.mark.parametrize("kv", ["fp16", "fp8", "int8:head", "fp8:head", "int4:head"])
def test_layers_read_and_write_caches_in_fewer_bits(
    kv: str, edit: Callable[[str, Part], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those that torch makes of the same keys and values; tokens attend to them as the modules' do."""
    layers = 2 if edit is usual_nets else 1  # the attention comes second
    spec = asbuilt.decoder(d_model=256, n_layers=layers, n_heads=4, n_kv_heads=2, d_ff=200, n_vocab=77)
    made = strategies.randomised(transform(spec, edit), 3, torch.float32).eval()
    interleave(made)
    run, calls = made.native, []
    assert run is not None
    made.native = lambda x, step: calls.append(step.tokens) or run(x, step)  # type: ignore[func-returns-value]
    pieces = torch.randint(0, 77, (2, 240)).split([150, 87, 1, 1, 1], 1)
    plain, cache, again = (
        Cache(made.spec, batch=2, capacity=260, dtype=torch.float32, kv=held) for held in (None, kv, kv)
    )
    made(pieces[0], cache=plain)
    ours = [made(piece, cache=cache) for piece in pieces]
    assert calls == [150, *(piece.shape[1] for piece in pieces)]
    ((path, held),) = ((path, layer) for path, layer in cache.layers.items() if isinstance(layer, KVCache))
    assert held.code is not None
    for stored, numbers in zip(held.tensors, plain.layers[path].tensors, strict=True):
        assert torch.equal(stored[:, :, :150], held.code.pack(numbers[:, :, :150]))
    # the modules round keys that differ by float32's noise: they are given ours
    made.native, place = None, 0
    for piece, logits in zip(pieces, ours, strict=True):
        given = tuple(stored[:, :, place : place + piece.shape[1]] for stored in held.tensors)
        monkeypatch.setattr(KVCache, "packed", lambda *_, given=given: given)
        theirs, place = made(piece, cache=again), place + piece.shape[1]
        assert (logits - theirs).norm() / theirs.norm() < 2e-5


@pytest.mark.parametrize("kv", ["fp8", "int8:head", "fp8:head", "int4:head"])
def test_codes_of_extreme_keys_and_values(kv: str) -> None:
    """Zeros, numbers from the smallest to the largest, and texts with a number that is not finite."""
    spec = asbuilt.decoder(d_model=64, n_layers=1, n_heads=2, n_kv_heads=1, d_head=32, d_ff=32, n_vocab=9)
    made = strategies.randomised(transform(spec, unturned), 3, torch.float32).eval()
    interleave(made)
    assert made.native is not None
    maps = [made.get_parameter(f"blocks.0.attention.body.{name}.weight") for name in "kv"]
    for sizes in (0.0, 1e-42, 1e-38, 1e-3, 448.0, 1e37):
        for weight in maps:
            weight.copy_(torch.randn_like(weight) * sizes)
        held = []
        for format in (None, kv):
            cache = Cache(made.spec, batch=1, capacity=9, dtype=torch.float32, kv=format)
            made(torch.arange(9)[None], cache=cache)
            held += [layer for layer in cache.layers.values() if isinstance(layer, KVCache)]
        plain, coded = held
        assert coded.code is not None
        for stored, numbers in zip(coded.tensors, plain.tensors, strict=True):
            assert torch.equal(stored, coded.code.pack(numbers)), sizes
    for bad in (float("nan"), float("inf")):
        maps[1][3, 7] = bad
        cache = Cache(made.spec, batch=1, capacity=9, dtype=torch.float32, kv=kv)
        assert made(torch.arange(9)[None], cache=cache).isnan().any() or kv == "fp8"


def as_near(ours: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    """Whether ours differ at most twice as much from the exact logits as theirs do, by the medians of tokens."""
    near, far = ((one - exact).norm(dim=-1).median() for one in (ours, theirs))
    return bool(near <= 2 * far)


@pytest.mark.parametrize(("d_ff", "stacks"), [(64, 3), (96, 3), (36, 0)])
def test_stacks_of_experts_are_multiplied_packed(d_ff: int, stacks: int) -> None:
    """Those whose matrices have a multiple of 8 rows, in each of 2 layers; beside expanded weights."""

    def routed(_: str, part: Part) -> Part:
        if not isinstance(part, GatedMLP):
            return part
        router = Router(d_model=64, n_experts=5, top_k=2, scoring="softmax", renormalise=True)
        return MixtureOfExperts(d_model=64, d_ff=d_ff, n_experts=5, activation="silu", router=router, bias=True)

    spec = transform(asbuilt.decoder(d_model=64, n_layers=2, n_heads=2, d_ff=64, n_vocab=77), routed)
    paths = [path for path, one in maps_by_path(spec).items() if one.plain.d_in % 32 == 0]
    plain = strategies.randomised(spec, 3, torch.float32)
    made = build(packed_spec(spec, dict.fromkeys(paths, "q8_0")))
    for path, weight, _ in weights(made.spec):
        held, number = made.get_parameter(path), plain.get_parameter(path)
        if weight.format is None:
            held.copy_(number)
        else:
            raw = drawn("q8_0", math.prod(held.shape[:-1]), weight.shape[-1], SCALE["q8_0"]).view(held.shape)
            held.copy_(raw)
            number.copy_(packed.expand(raw, "q8_0", torch.float32))
    stored = {path: tensor.clone() for path, tensor in stored_tensors(made).items()}
    mixtures = [one for one in made.modules() if isinstance(one, experts.MixtureOfExperts)]
    interleave(made)
    found = [sum((format or "").endswith(native.INTERLEAVED) for format in one.formats.values()) for one in mixtures]
    assert found == [stacks, stacks]
    assert all(torch.equal(tensor, stored[path]) for path, tensor in stored_tensors(made).items())
    ids = torch.randint(0, 77, (2, 40))
    for step in (ids, ids[:, :1]):
        ours, want = made(step), plain(step)
        assert (ours - want).norm() / want.norm() < 1e-3


@pytest.mark.parametrize("edit", [lambda _, part: part, usual_nets])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_text_is_computed_in_slabs(edit: Callable[[str, Part], Part], dtype: torch.dtype) -> None:
    width = 32 if edit is not usual_nets else 256
    spec = asbuilt.decoder(d_model=width, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=64, n_vocab=77, max_positions=2000)
    spec = transform(spec, edit)
    made = strategies.randomised(spec, 3, torch.float32).to(dtype)
    modules, exact = deepcopy(made), deepcopy(made).double()
    interleave(made)
    for shape in ((1, 1700), (5, 300), (40, 45)):
        ids, found = torch.randint(0, 77, shape), []
        for model in (made, modules, exact):
            cache = Cache(spec, batch=shape[0], capacity=shape[1], dtype=model.dtype)
            found.append(model(ids, cache=cache).double())
        assert as_near(*found)


def test_a_hook_or_another_kind_of_layer_runs_the_modules() -> None:
    made, ids, seen = of_blocks("q8_0"), torch.randint(0, 77, (1, 3)), []
    interleave(made)
    hook = made.get_submodule("blocks.1.ffn.body").register_forward_hook(lambda *_: seen.append(1))
    cache = Cache(made.spec, batch=1, capacity=9, dtype=torch.float32)
    made(ids, cache=cache)
    made(ids[:, :1], cache=cache)
    assert len(seen) == 2
    hook.remove()
    want = made(ids[:, :1], cache=cache)
    assert len(seen) == 2
    again, fresh = deepcopy(made), Cache(made.spec, batch=1, capacity=9, dtype=torch.float32)
    again(ids, cache=fresh)
    again(ids[:, :1], cache=fresh)
    found = again(ids[:, :1], cache=fresh)
    assert (found - want).norm() / want.norm() < 1e-3  # of whose tokens modules computed one
    other = of_blocks("q8_0", relu)
    interleave(other)
    assert other.native is None
    other(ids, cache=Cache(other.spec, batch=1, capacity=9, dtype=torch.float32))


def test_what_does_not_fit_is_never_read_beyond_its_end() -> None:
    """A cache of another dtype or batch, inputs of another width: torch's own errors, or torch computes."""
    made, ids = of_blocks("q8_0"), torch.randint(0, 77, (2, 1))
    interleave(made)
    wide = Cache(made.spec, batch=2, capacity=9, dtype=torch.float64)
    usual = Cache(made.spec, batch=2, capacity=9, dtype=torch.float32)
    made(ids, cache=usual)
    assert made.native is not None
    step = made.begin((2, 1), ids.device, wide, None, "fused")
    assert made.native(torch.zeros(2, 1, 256), step) is None
    step = made.begin((1, 1), ids.device, usual, None, "fused")
    assert made.native(torch.zeros(1, 1, 256), step) is None
    raw = mixed(drawn("q8_0", 16, 64), "q8_0")
    with pytest.raises(RuntimeError, match="96 inputs"):
        native.products(torch.zeros(1, 96), [(raw, "q8_0", None)], native.ready())
    x, w = torch.zeros(2, 3, 8), torch.zeros(8, 4)
    assert native.convolve(x, w, None, torch.zeros(1, 8, 3), silu=True) is None
    given = (torch.zeros(1, 3, 24), torch.zeros(1, 3, 1), torch.zeros(1, 3, 1), torch.ones(1), torch.zeros(1), None)
    assert native.delta_rule(*given, (1, 1, 8, 8), 1e-6, torch.zeros(2, 8, 8), past=True) is None


def test_gradients_flow_past_interleaved_weights() -> None:
    made = of_blocks("q4_0")
    ids = torch.randint(0, 77, (1, 5))
    with torch.inference_mode(False), torch.enable_grad():
        made = of_blocks("q4_0").requires_grad_(False)
        norm = made.get_parameter("norm.weight").requires_grad_(True)
        made(ids.clone()).sum().backward()
        want = norm.grad.clone()  # type: ignore[union-attr]
        norm.grad = None
        interleave(made)
        made(ids.clone()).sum().backward()
    torch.testing.assert_close(norm.grad, want)


@pytest.mark.parametrize("decays", ["head", "channel"])
def test_a_delta_net_is_the_same_with_and_without(decays: str) -> None:
    """The whole mixer in float32 beside float64, which torch computes: prefill, then steps, of texts with padding."""
    part = GatedDeltaNet(
        d_model=32,
        n_key_heads=2,
        n_value_heads=2 if decays == "channel" else 4,
        d_key=16,
        d_value=8,
        decays=decays,  # type: ignore[arg-type]
        norm=RMSNorm(d=8),
        conv=ShortConvolution(channels=80 if decays == "channel" else 96, kernel=4),
    )
    spec = one_mixer.alone(part, part)
    ids, valid = one_mixer.text(spec, 2, 90, 1), torch.arange(90) >= torch.tensor([[0], [11]])
    found = []
    for dtype in (torch.float32, torch.float64):
        model = strategies.randomised(spec, 3, torch.float32).to(dtype)
        cache = Cache(spec, batch=2, capacity=100, dtype=dtype)
        whole = model(ids, cache=cache, valid_BT=valid)
        found.append(torch.cat([whole[:, 11:], *(model(ids[:, i : i + 1], cache=cache) for i in range(4))], 1).double())
    one_mixer.near(found[0], found[1], 1e-5)
