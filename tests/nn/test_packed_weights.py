"""Weights held as blocks: what they expand to, what is multiplied with them, and that they are what they are billed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import gguf
import numpy as np
import pytest
import strategies
import torch
import torch.nn.functional as F
from block_scales import set_scales
from gguf import quants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import cost
from asbuilt.dtypes import BLOCKS, OWN_BLOCKS
from asbuilt.errors import InputError
from asbuilt.kernels import packed
from asbuilt.kernels.memory import linear as linear_memory
from asbuilt.kernels.memory import memory
from asbuilt.kernels.packed import EXPANDED, expand, linear
from asbuilt.measure.run import peak_bytes
from asbuilt.nn import build, stored_tensors
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    Linear,
    MixtureOfExperts,
    Packed,
    Part,
    Pass,
    RMSNorm,
    Router,
    TiedHead,
    TokenEmbedding,
    adapted,
    dumps,
    loads,
    weights,
)
from asbuilt.spec import Model as Spec
from asbuilt.spec.edit import transform
from asbuilt.spec.linear import Mapped

FORMATS = st.sampled_from(sorted(EXPANDED))
PUBLISHED = st.sampled_from(sorted(EXPANDED.keys() - OWN_BLOCKS.keys()))
D, FF, V = 256, 512, 40  # rows that every format's blocks divide


def blocks(format: str, *rows: int, width: int = D, seed: int = 0) -> Tensor:
    """Random blocks whose scales are of the size that weights have."""
    generator = torch.Generator().manual_seed(seed)
    size, nbytes = BLOCKS[format]
    raw = torch.randint(256, (*rows, width // size, nbytes), generator=generator, dtype=torch.uint8)
    return set_scales(raw, format, torch.rand(raw.shape[:-1], generator=generator) * 0.02).flatten(-2)


@given(PUBLISHED, st.integers(1, 3), st.integers(1, 3), strategies.SEEDS)
def test_blocks_expand_as_the_library_expands_them(format: str, rows: int, per_row: int, seed: int) -> None:
    """Bit by bit, of any bytes: scales that are no numbers too."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, per_row * BLOCKS[format][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = quants.dequantize(raw, gguf.GGMLQuantizationType[format.upper()])
    np.testing.assert_array_equal(expand(torch.from_numpy(raw), format, torch.float32).numpy(), want)
    surely = packed.finite(torch.from_numpy(raw), format)
    assert not surely or np.isfinite(want).all()


@given(FORMATS, st.integers(1, 9), st.booleans(), strategies.SEEDS)
def test_a_product_with_blocks_is_one_with_their_numbers(format: str, rows: int, bias: bool, seed: int) -> None:
    """Forward and backward, by tiles of rows, the last one smaller."""
    raw, generator = blocks(format, 7, seed=seed), torch.Generator().manual_seed(seed)
    x = torch.randn(2, rows, D, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [x] if b is None else [x, b]
    want = F.linear(x, expand(raw, format, torch.float64), b)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear_memory, "TILE", 3 * D)
        have = linear(x, raw, b, format=format)
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
        wanted = torch.autograd.grad(want.square().sum(), inputs)
        torch.testing.assert_close(torch.autograd.grad(have.square().sum(), inputs), wanted, rtol=1e-12, atol=1e-9)
    index = torch.tensor([[6, 0], [3, 3]])
    assert torch.equal(packed.look_up(index, raw, format, torch.float64), expand(raw, format, torch.float64)[index])


def stack(body: Part, *, tied: bool = False, format: str | None = None) -> Spec:
    """A model of two blocks, each attention or what is given, and experts or a feed-forward."""
    ffn = GatedMLP(d_model=D, d_ff=FF, activation="silu")
    router = Router(d_model=D, n_experts=3, top_k=2)
    mixture = MixtureOfExperts(d_model=D, d_ff=FF, n_experts=3, activation="silu", router=router, bias=True, shared=ffn)
    made = [
        Block(branches=(Branch(name="attention", body=body, norm=RMSNorm(d=D)), Branch(name="ffn", body=inner)))  # type: ignore[arg-type]  # pyright: ignore
        for inner in (ffn, mixture)
    ]
    head = TiedHead(d_model=D, n_vocab=V, format=format) if tied else Head(d_model=D, n_vocab=V, format=format)
    embedding = TokenEmbedding(n_vocab=V, d_model=D, format=format)
    return Spec(embedding=embedding, blocks=tuple(made), head=head, max_positions=32)


ATTENTION = Attention(d_model=D, n_heads=4, n_kv_heads=2, d_head=64, bias=True)


def held_packed(spec: Spec, format: str) -> Spec:
    """The model with every map and stack packed in one format."""

    def change(path: str, part: Part) -> Part:
        if not isinstance(part, Mapped):
            return part
        return part.with_maps({n: Packed(base=m.plain, format=format) for n, m in (part.maps | part.stacks).items()})

    return transform(spec, change)


def filled(spec: Spec, seed: int) -> tuple[Model, Model]:
    """A model with packed weights, and the plain one with what they expand to, all in float64."""
    packed_model = build(spec, dtype="fp64", seed=None)
    plain_spec = transform(spec, lambda _, part: plain(part))
    plain_model = build(plain_spec, dtype="fp64", seed=None)
    generator = torch.Generator().manual_seed(seed)
    others = stored_tensors(plain_model)
    with torch.no_grad():
        for i, (path, weight, _) in enumerate(weights(spec)):
            mine = packed_model.get_parameter(path)
            if weight.format is None:
                mine.normal_(0.0, 0.1, generator=generator)
                others.get(path, mine).copy_(mine)  # adapters are in the packed one alone
            else:
                mine.copy_(blocks(weight.format, *weight.shape[:-1], width=weight.shape[-1], seed=seed + i))
                others[path].copy_(expand(mine, weight.format, torch.float64))
    return packed_model.eval(), plain_model.eval()


def plain(part: Part) -> Part:
    """The part with nothing packed."""
    if isinstance(part, TokenEmbedding | Head | TiedHead):
        part = replace(part, format=None)
    return (
        part.with_maps({n: m.plain for n, m in (part.maps | part.stacks).items()}) if isinstance(part, Mapped) else part
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["q8_0", "q4_1", "q6_k", "mxfp4", "iq4_xs", "iq2_s", "nvfp4", "int4_wide"])
@torch.no_grad()
def test_a_packed_model_is_the_model_of_what_its_blocks_expand_to(format: str, tied: bool) -> None:
    """A whole pass and cached decoding, of attention, a feed-forward and experts."""
    spec = held_packed(stack(ATTENTION, tied=tied, format=format), format)
    mine, theirs = filled(spec, seed=3)
    ids = torch.randint(V, (2, 6))
    want = theirs(ids)
    torch.testing.assert_close(mine(ids), want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine(ids, kernel="reference"), want, rtol=1e-9, atol=1e-9)
    cache = Cache(spec, batch=2, capacity=6, dtype=torch.float64)
    mine(ids[:, :-1], cache=cache)
    torch.testing.assert_close(mine(ids[:, -1:], cache=cache), want[:, -1:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "q4_0"])
def test_blocks_take_the_bytes_they_are_billed_whatever_the_others_are_in(dtype: str) -> None:
    spec = held_packed(stack(ATTENTION, format="q5_1"), "q4_k")
    if dtype != "q4_0":
        model = build(spec, dtype=dtype, seed=0)
        assert sum(p.nbytes for p in model.parameters()) == cost.weight_bytes(spec, dtype)
        assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert {p.dtype for p in model.to(torch.float64).parameters()} == {torch.uint8, torch.float64}
    tables = 2 * V * D // 32 * 24
    maps = 2 * (2 * D * 256 + 2 * D * 128) + 2 * 3 * D * FF + 3 * 3 * D * FF
    packed_bytes = tables + maps // 256 * 144
    rest = [weight for _, weight, _ in weights(spec) if weight.format is None]
    assert cost.weight_bytes(spec, dtype) == packed_bytes + sum(cost.dtype(dtype).nbytes(weight) for weight in rest)
    assert cost.total_parameters(spec) == cost.total_parameters(transform(spec, lambda _, part: plain(part)))


def test_flops_are_those_of_the_plain_model_and_training_needs_no_gradient_of_blocks() -> None:
    spec = held_packed(stack(ATTENTION, format="q8_0"), "q8_0")
    bare = transform(spec, lambda _, part: plain(part))
    run = Pass(tokens=5, batch=2)
    assert cost.flops(spec, run).forward == cost.flops(bare, run).forward
    model = filled(spec, seed=1)[0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 5, dtype=torch.long), kernel="reference")
    assert counter.get_total_flops() == cost.flops(spec, run).forward
    frozen = {path for path, weight, _ in weights(spec) if weight.frozen}
    assert frozen == {path for path, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {path for path, p in model.named_parameters() if p.dtype == torch.uint8}


def test_an_adapter_beside_packed_maps_is_trained() -> None:
    """QLoRA's arrangement: blocks and biases stay, A and B get gradients."""
    spec = adapted(held_packed(stack(ATTENTION, format="q8_0"), "q4_0"), rank=2, alpha=4.0)
    model = filled(spec, seed=5)[0].train()
    model(torch.randint(V, (1, 7))).square().sum().backward()
    trained = {path for path, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert {path for path in trained if path.endswith(("lora_a", "lora_b"))} == {
        path for path, _, _ in weights(spec) if path.endswith(("lora_a", "lora_b"))
    }
    assert loads(dumps(spec)) == spec


def test_a_device_has_whole_blocks() -> None:
    part = Packed(base=Linear(d_in=128, d_out=6, bias=True, split="in"), format="q4_0")
    assert part.shard(2).holds()["weight"].stored_shape == (6, 2 * 18)
    with pytest.raises(InputError, match="32"):
        part.shard(8)
    out = Packed(base=Linear(d_in=128, d_out=6, bias=True, split="out"), format="q4_0").shard(3)
    assert {name: weight.stored_shape for name, weight in out.holds().items()} == {"weight": (2, 72), "bias": (2,)}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Packed(base=Linear(d_in=32, d_out=4), format="q9"), "Packed.format"),
        (lambda: Packed(base=Linear(d_in=32, d_out=4), format=None), "Packed.format"),  # type: ignore[arg-type]  # pyright: ignore
        (lambda: Packed(base=Linear(d_in=48, d_out=4), format="q4_0"), "Packed.format"),
        (lambda: Packed(base=Packed(base=Linear(d_in=32, d_out=4), format="q4_0"), format="q4_0"), "Packed.base"),  # type: ignore[arg-type]  # pyright: ignore
        (lambda: TokenEmbedding(n_vocab=4, d_model=48, format="q8_0"), "TokenEmbedding.format"),
        (lambda: Head(n_vocab=4, d_model=32, format="fp16"), "Head.format"),
        (lambda: build(stack(ATTENTION, format="q8_1")), "format"),
        (
            lambda: replace(stack(ATTENTION, tied=True), embedding=TokenEmbedding(n_vocab=V, d_model=D, format="q8_0")),
            "LanguageModel.head",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert refused.value.field == field


@pytest.mark.parametrize("format", sorted(EXPANDED))
@pytest.mark.parametrize("tokens", [1, 64])
@torch.inference_mode()
def test_expanding_takes_what_is_declared(format: str, tokens: int) -> None:
    """A tile of blocks beside what a plain map needs, held to the allocator's peak: never less, at most 15% more."""
    part = GatedMLP(d_model=D, d_ff=4096, activation="silu")
    body = part.with_maps({name: Packed(base=one, format=format) for name, one in part.plain_maps().items()})
    model = module(body, "ffn")
    for parameter in model.parameters():
        parameter.zero_()
    x, step = torch.zeros(1, tokens, D), Step((1, tokens), torch.device("cpu"))
    model(x, step)
    measured, declared = peak_bytes(lambda: model(x, step)), memory(body).peak_bytes(Pass(tokens=tokens, width=4))
    assert measured <= declared <= 1.15 * measured
