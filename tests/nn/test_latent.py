"""Latent attention: absorbed is expanded, both are the paper's equations, and what is cached is one narrow vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS
from torch import Tensor

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.nn.cache import Cache
from asbuilt.nn.latent import LatentAttention as Module
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import (
    Block,
    Branch,
    Head,
    LatentAttention,
    Model,
    Pass,
    RMSNorm,
    Rotary,
    TokenEmbedding,
    YaRN,
    dumps,
    loads,
)

WIDTH = 5
BATCHES, TOKENS = st.integers(1, 3), st.integers(1, 9)


@st.composite
def built(draw: st.DrawFn) -> tuple[Module, int]:
    """Latent attention in float64, every weight drawn, and the seed."""
    made, seed = module(draw(strategies.latents(WIDTH)), "a").double(), draw(SEEDS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    assert isinstance(made, Module)
    return made, seed


def rows(batch: int, tokens: int, seed: int) -> Tensor:
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))


@given(built(), BATCHES, TOKENS, st.sampled_from(("fused", "reference")))
@torch.no_grad()
def test_absorbed_is_expanded(drawn: tuple[Module, int], batch: int, tokens: int, kernel: str) -> None:
    """The same weights and tokens, both ways forced, for one token and for many."""
    attention, seed = drawn
    step = Step((batch, tokens), torch.device("cpu"), kernel=kernel)  # type: ignore[arg-type]
    q, latent, key = attention.project(rows(batch, tokens, seed), step)
    expanded = attention.expanded(q, latent, key, step, lambda: step.key_positions_BT)
    absorbed = attention.absorbed(q, torch.cat((latent, key), -1)[:, None], step, lambda: step.key_positions_BT)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-10, atol=1e-10 * max(1.0, float(expanded.abs().max())))


@given(built(), TOKENS)
@torch.no_grad()
def test_against_the_equations(drawn: tuple[Module, int], tokens: int) -> None:
    """Head by head and token by token, without positions: sections 2.1.2 and 2.1.3 of arXiv 2405.04434."""
    attention, seed = drawn
    part = attention.part
    if part.positions is not None:
        return
    x_TM = rows(1, tokens, seed)[0]
    step = Step((1, tokens), x_TM.device)
    have = attention(x_TM[None], step)[0]
    chosen = torch.ones(tokens, tokens, dtype=torch.bool) if step.choice is None else step.choice[0]
    norm: Callable[[torch.nn.Module | None, Tensor], Tensor] = lambda n, y: y if n is None else n(y)  # noqa: E731
    low = x_TM if part.q_rank is None else norm(attention.q_norm, attention.q_down(x_TM))
    queries = attention.q(low) if part.q_rank is None else attention.q_up(low)
    c_TR, shared_TP = norm(attention.kv_norm, attention.kv_down(x_TM)), attention.k_rope(x_TM)
    out = []
    for h in range(part.n_heads):
        q = queries[:, h * part.d_head : (h + 1) * part.d_head]
        k_up = attention.k_up.weight[h * part.d_nope : (h + 1) * part.d_nope]
        v_up = attention.v_up.weight[h * part.d_value : (h + 1) * part.d_value]
        for t in range(tokens):
            seen = [j for j in range(t + 1) if chosen[t, j]]
            scores = [float(q[t] @ torch.cat((k_up @ c_TR[j], shared_TP[j]))) for j in seen]
            weights = torch.softmax(torch.tensor(scores, dtype=torch.float64) / math.sqrt(part.d_head), -1)
            out.append(sum(weight * (v_up @ c_TR[j]) for weight, j in zip(weights, seen, strict=True)))
    mixed = torch.stack(out).view(part.n_heads, tokens, part.d_value).transpose(0, 1).flatten(1)  # type: ignore[arg-type]
    want = attention.o(mixed)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9 * max(1.0, float(want.abs().max())))


def test_one_query_absorbs_and_what_is_cached_is_not_expanded() -> None:
    """By the shapes that are multiplied: after a prompt of 7, one token makes no product over 8 rows of latents."""
    part = deepseek_v3(heads=2, d_model=16)
    spec = one_layer(part)
    model = strategies.randomised(spec, 0)
    cache = Cache(spec, batch=1, capacity=8, dtype=torch.float64)
    seen: list[int] = []
    for name in ("k_up", "v_up"):
        module = model.get_submodule(f"blocks.0.attention.body.{name}")  # a hook would have it called at every step
        module.forward = lambda x, forward=module.forward: seen.append(x.shape[1]) or forward(x)
    model(torch.zeros(1, 7, dtype=torch.long), cache=cache)
    assert seen == [7, 7]
    model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    assert seen == [7, 7]


def deepseek_v3(heads: int = 128, d_model: int = 7168) -> LatentAttention:
    """The attention of DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""
    yarn = YaRN(factor=40.0, original_context=4096, attention_factor=1.0)
    return LatentAttention(
        d_model=d_model,
        n_heads=heads,
        q_rank=1536,
        kv_rank=512,
        d_nope=128,
        d_rope=64,
        d_value=128,
        q_norm=RMSNorm(d=1536),
        kv_norm=RMSNorm(d=512),
        positions=Rotary(d_rotary=64, pairing="adjacent", scaling=yarn),
        mscale=1.0,
    )


def one_layer(part: LatentAttention) -> Model:
    block = Block(branches=(Branch(name="attention", body=part),))
    return Model(
        embedding=TokenEmbedding(n_vocab=3, d_model=part.d_model),
        blocks=(block,),
        head=Head(d_model=part.d_model, n_vocab=3),
        max_positions=64,
    )


def test_a_deepseek_shape_caches_576_numbers_per_token_and_layer() -> None:
    """As billed, and as allocated: not the 40,960 of 128 heads' keys and values."""
    part = deepseek_v3(d_model=2)
    assert cost.cache(part, 1, "fp8").per_token == 576
    assert part.n_heads * (part.d_head + part.d_value) == 40_960
    cache = Cache(one_layer(part), batch=3, capacity=11, dtype=torch.bfloat16)
    (layer,) = cache.layers.values()
    assert [tuple(tensor.shape) for tensor in layer.tensors] == [(3, 1, 11, 576)]
    assert cache.nbytes == 3 * 11 * 576 * 2


def test_the_softmax_scale_of_deepseek_v3() -> None:
    """192^-0.5 times (0.1 ln 40 + 1)^2, as its published code has it."""
    assert deepseek_v3().scale == pytest.approx(0.1352337788608801, rel=1e-15)


def test_decoding_costs_less_absorbed_than_expanded() -> None:
    """Per cached token 2 (R + P) + 2 R FLOPs a head, where expanding alone would take 2 R (d_nope + d_value)."""
    part, past = deepseek_v3(), 4095
    step = cost.flops(part, Pass(tokens=1, past=past))
    assert step.scores == 2 * 128 * (past + 1) * (576 + 512)
    expanding = 2 * (past + 1) * 512 * 128 * (128 + 128)
    assert step.forward < expanding / 10


@given(strategies.latents(WIDTH))
def test_json(part: LatentAttention) -> None:
    assert loads(dumps(part)) == part


BAD: dict[str, dict[str, Any]] = {
    "kv_rank": {"kv_rank": 0},
    "q_norm": {"q_norm": RMSNorm(d=1535)},
    "kv_norm": {"kv_norm": RMSNorm(d=576)},
    "positions": {"positions": Rotary(d_rotary=192)},
    "mscale": {"positions": Rotary(d_rotary=64)},
    "bias": {"bias": 1},
}


@pytest.mark.parametrize("field", BAD)
def test_what_cannot_be(field: str) -> None:
    with pytest.raises(InputError, match=rf"\.{field}\b"):
        replace(deepseek_v3(), **BAD[field])
