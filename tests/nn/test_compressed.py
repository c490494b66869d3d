"""Compressed attention: entries are those of the definition, and a token attends to its window and to full blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS, randomised

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.compressed import by_definition, compress
from asbuilt.nn.cache import Cache
from asbuilt.nn.compressed import CompressedAttention as Module
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import (
    Block,
    Branch,
    CompressedAttention,
    Compressor,
    EntryIndexer,
    Head,
    Model,
    Pass,
    TokenEmbedding,
)
from asbuilt.spec.compressed import entry_pairs

ENTRIES = Compressor(d_model=6, d_head=4, ratio=3)
PART = CompressedAttention(d_model=6, n_heads=2, d_head=4, q_rank=5, window=4, groups=2, o_rank=3, compressor=ENTRIES)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@given(SEEDS, st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_entries_are_those_of_the_definition(
    dtype: torch.dtype, tolerance: float, seed: int, blocks: int, ratio: int, overlap: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = 6 if overlap else 3
    kv, gate = torch.randn(2, blocks * ratio, width, dtype=dtype, generator=generator)
    bias = torch.randn(ratio, width, dtype=dtype, generator=generator)
    lead = ratio if overlap else 0  # zeros before the text
    values, gates = (torch.cat((x.new_zeros(lead, width), x)).view(1, -1, ratio, width) for x in (kv, gate))
    have = compress(values, gates, bias, torch.zeros(1, dtype=torch.long), overlap)
    want = by_definition(kv, gate, bias, overlap)
    torch.testing.assert_close(have[0], want, rtol=tolerance, atol=tolerance)


def test_one_token_against_the_definition() -> None:
    """The 11th of 11 tokens: the last 4 keys and 3 entries, a sink, and two groups of one head each."""
    built = module(PART, "a").double()
    assert isinstance(built, Module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(11, 6, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        have = built(x[None], Step((1, 11), x.device))[0, -1]
        compressor = built.get_submodule("compressor")
        entries = by_definition(compressor.kv(x), compressor.gate(x), compressor.bias, False)  # type: ignore[operator]
        keys = torch.cat((built.kv(x)[-4:], entries))
        queries, mixed = built.q_up(built.q_down(x[-1])), []
        for h in range(2):
            scores = torch.cat((keys @ queries[4 * h : 4 * h + 4] / 2, built.sinks[h : h + 1]))
            head = scores.softmax(0)[:-1] @ keys
            mixed.append(built.o_down[3 * h : 3 * h + 3] @ head)
        torch.testing.assert_close(have, built.o_up(torch.cat(mixed)), rtol=1e-10, atol=1e-10)


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 5), st.none() | st.integers(1, 4))
def test_pairs_one_by_one(past: int, tokens: int, ratio: int, most: int | None) -> None:
    seen = [(p + 1) // ratio for p in range(past, past + tokens)]
    want = sum(n if most is None else min(n, most) for n in seen)
    assert entry_pairs(Pass(tokens=tokens, past=past), ratio, most) == want


def test_what_is_cached() -> None:
    """Of 20 tokens 6 entries of 4 numbers, the last 4 keys, and kv and gate of an open block of 3."""
    block = Block(branches=(Branch(name="attention", body=PART),))
    head = Head(d_model=6, n_vocab=5)
    spec = Model(embedding=TokenEmbedding(n_vocab=5, d_model=6), blocks=(block,), head=head, max_positions=64)
    kept = 6 * 4 + 4 * 4 + 3 * 8
    assert cost.cache(spec, 20, "fp8").at_seq == kept
    cache = Cache(spec, batch=2, capacity=20, dtype=torch.float32)
    assert cache.nbytes == 2 * 4 * kept
    assert cost.cache(spec, 1, "bf16").unbounded == math.ceil(2 * 4 / 3)
    randomised(spec, 0, torch.float32)(torch.zeros(2, 20, dtype=torch.long), cache=cache)
    assert cache.nbytes == 2 * 4 * kept


def test_entries_are_chosen_of_the_same_blocks() -> None:
    other = EntryIndexer(q_rank=5, n_heads=1, top_k=2, compressor=Compressor(d_model=6, d_head=4, ratio=2))
    with pytest.raises(InputError, match="indexer"):
        PART.resized(indexer=other)
