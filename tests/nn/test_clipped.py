"""Clipped maps: input and result clamped, an adapter in between, nothing changed by bounds that are infinite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_parts import LATENT

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.memory.linear import of_map as memory_of_map
from asbuilt.nn import build
from asbuilt.nn.linear import of_map
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    LanguageModel,
    Linear,
    Lora,
    Model,
    Packed,
    TokenEmbedding,
    buffers,
    dumps,
    loads,
)
from asbuilt.spec.adapters import adapted, without_adapters
from asbuilt.spec.linear import transform_maps

PLAIN = Linear(d_in=32, d_out=6, bias=True)
CLIPPED = replace(PLAIN, clipped=True)
BOUNDS = {"input_min": -0.5, "input_max": 0.3, "output_min": -0.2, "output_max": 0.4}


def model(clipped: bool = True) -> Model:
    """A model of one block, whose maps are all clipped or all plain."""
    bodies = {
        "attention": Attention(d_model=6, n_heads=2, n_kv_heads=1, d_head=4),
        "ffn": GatedMLP(d_model=6, d_ff=8, activation="silu"),
    }
    spec = LanguageModel(
        embedding=TokenEmbedding(n_vocab=7, d_model=6),
        blocks=(Block(branches=tuple(Branch(name=name, body=body) for name, body in bodies.items())),),
        head=Head(d_model=6, n_vocab=7),
        max_positions=16,
    )
    return transform_maps(spec, lambda _, one: replace(one.plain, clipped=clipped))


@pytest.mark.parametrize(
    "part",
    [CLIPPED, Lora(base=CLIPPED, rank=2, alpha=4.0), Packed(base=CLIPPED, format="q8_0")],
    ids=["plain", "adapter", "packed"],
)
def test_what_lies_between_the_clamps_is_the_map_without_them(part: Linear | Lora | Packed) -> None:
    generator = torch.Generator().manual_seed(0)
    made, bare = of_map(part), of_map(PLAIN if isinstance(part, Linear) else replace(part, base=PLAIN))
    assert {name for name, _ in made.named_buffers()} == set(BOUNDS)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.is_floating_point():
                parameter.normal_(generator=generator)
            else:  # blocks of q8_0: a scale of 2^-8 in half precision, and whole numbers
                parameter.random_(0, 200, generator=generator)
                parameter[:, :2] = torch.tensor([0, 28], dtype=torch.uint8)
            bare.get_parameter(name).copy_(parameter)
        x = torch.randn(5, 32, generator=generator)
        torch.testing.assert_close(made(x), bare(x), rtol=0, atol=0)  # bounds start infinite
        for name, bound in BOUNDS.items():
            made.get_buffer(name).fill_(bound)
        torch.testing.assert_close(made(x), bare(x.clamp(-0.5, 0.3)).clamp(-0.2, 0.4), rtol=0, atol=0)
        assert (made(x).amin(), made(x).amax()) == (torch.tensor(-0.2), torch.tensor(0.4))


def test_bounds_are_buffers_of_the_map_and_nothing_else_changes() -> None:
    spec, plain = model(), model(clipped=False)
    assert {path for path, _, _ in buffers(spec)} == {
        f"blocks.0.{name}.{bound}"
        for name in (*(f"attention.body.{x}" for x in "qkvo"), *(f"ffn.body.{x}" for x in ("gate", "up", "down")))
        for bound in BOUNDS
    }
    assert cost.total_parameters(spec) == cost.total_parameters(plain)
    assert cost.stored_extra(spec)["buffers"] == 7 * 4
    ids = torch.arange(5)[None]
    assert torch.equal(build(spec)(ids), build(plain)(ids))
    assert loads(dumps(spec)) == spec
    assert {path for path, _, _ in buffers(adapted(spec, rank=1, alpha=1.0))} == {path for path, _, _ in buffers(spec)}
    assert without_adapters(adapted(spec, rank=1, alpha=1.0)) == spec
    assert transform_maps(spec, lambda _, one: one.plain.unclipped) == plain
    half = spec.blocks[0].shard(2)
    assert isinstance(half, Block)
    assert len([*buffers(half)]) == 7 * 4


def test_bounds_keep_their_width_in_lower_precision() -> None:
    built = build(model(), dtype="bfloat16")
    assert {tensor.dtype for tensor in built.buffers()} == {torch.float32}
    assert built(torch.arange(5)[None]).dtype == torch.bfloat16


def test_an_adapters_memory_adds_to_that_of_the_clamps() -> None:
    names = [saved.name for saved in memory_of_map(Lora(base=CLIPPED, rank=2, alpha=1.0)).keeps("q", 3)]
    assert names == ["q clamped", "q unclamped", "q bounds", "q lora_b input"]
    assert memory_of_map(PLAIN).keeps("q", 3) == ()


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="clipped: must be false in a stack of maps"):
        Linear(d_in=2, d_out=2, copies=3, clipped=True)
    for name in ("k_up", "v_up"):
        with pytest.raises(InputError, match=rf"{name}: must be a map without clamps"):
            replace(LATENT, **{name: replace(LATENT.maps[name], clipped=True)})  # type: ignore[type-var]
    with pytest.raises(InputError, match="up: must be"):
        GatedMLP(d_model=6, d_ff=8, activation="silu", up=Linear(d_in=6, d_out=9, clipped=True, belongs="ffn"))
