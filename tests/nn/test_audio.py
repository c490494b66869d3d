"""Models that hear: costs are those of the built ones, and a text in pieces is the whole."""

from __future__ import annotations

from typing import Any

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asbuilt import cost
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn.cache import Cache
from asbuilt.nn.fixed_inputs import sounds
from asbuilt.spec import (
    MLP,
    Attention,
    AudioEncoder,
    Block,
    Branch,
    CrossAttention,
    EncoderDecoder,
    LayerNorm,
    LearnedPositions,
    MelEmbedding,
    Model,
    Pass,
    TiedHead,
    TokenEmbedding,
)

CONTEXT = 24


def block(d_model: int, heads: int, *, source: tuple[int, int] | None) -> Block:
    """Pre-norm attention without biases of keys, cross-attention to a source (tokens, width), and a feed-forward."""
    biases: dict[str, Any] = {"bias": True, "output_bias": True, "key_bias": False}
    norm, decodes = LayerNorm(d=d_model), source is not None
    own = Attention(d_model=d_model, n_heads=heads, n_kv_heads=heads, d_head=3, causal=decodes, **biases)
    bodies: dict[str, Any] = {"attention": own}
    if source is not None:
        n, width = source
        cross = CrossAttention(d_model=d_model, d_source=width, n_source=n, n_heads=heads, d_head=5, **biases)
        bodies["cross"] = cross
    bodies["ffn"] = MLP(d_model=d_model, d_ff=2 * d_model, activation="gelu", bias=True)
    return Block(branches=tuple(Branch(name=name, norm=norm, body=body) for name, body in bodies.items()))


@st.composite
def hearers(draw: st.DrawFn) -> EncoderDecoder:
    """An encoder of sounds and a decoder of other sizes."""
    heard, written = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    n_tokens, n_vocab = draw(st.integers(1, 7)), draw(st.integers(2, 9))
    encoder = AudioEncoder(
        embedding=MelEmbedding(n_mels=draw(st.integers(1, 6)), n_tokens=n_tokens, d_model=heard),
        positions=LearnedPositions(n_positions=n_tokens, d_model=heard),
        blocks=(block(heard, draw(st.integers(1, 3)), source=None),) * draw(st.integers(1, 2)),
        norm=LayerNorm(d=heard),
        max_positions=n_tokens,
    )
    return EncoderDecoder(
        encoder=encoder,
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=written),
        positions=LearnedPositions(n_positions=CONTEXT, d_model=written),
        blocks=(block(written, draw(st.integers(1, 3)), source=(n_tokens, heard)),) * draw(st.integers(1, 2)),
        norm=LayerNorm(d=written),
        head=TiedHead(d_model=written, n_vocab=n_vocab),
        max_positions=CONTEXT,
    )


def text(spec: Model, batch: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(spec.n_vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@given(hearers(), st.integers(1, 3), st.integers(1, 9))
def test_flops_are_counted(spec: EncoderDecoder, batch: int, tokens: int) -> None:
    run = Pass(tokens=tokens, batch=batch)
    assert cost.flops(spec, run).forward == measured.flops(spec, tokens, batch)


@given(hearers(), st.integers(1, 3), st.integers(1, 9), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=25)
def test_what_is_saved_is_declared(spec: EncoderDecoder, batch: int, tokens: int, dtype: torch.dtype) -> None:
    model = strategies.randomised(spec, 0, dtype)
    run = Pass(tokens=tokens, batch=batch, width=dtype.itemsize)
    assert cost.saved(spec, run).all == measured.saved_bytes(model, tokens, batch)[0]


@given(hearers(), st.integers(1, 3), st.integers(1, CONTEXT))
def test_a_sound_has_its_own_length_in_the_cache(spec: EncoderDecoder, batch: int, tokens: int) -> None:
    """Keys and values of the sound are as fixed as a state; those of the text grow."""
    bill = cost.cache(spec, tokens, "fp32")
    n = spec.encoder.embedding.n_tokens  # type: ignore[union-attr]
    crosses = [b.branches[1].body for b in spec.blocks]
    assert bill.fixed == sum(2 * 4 * n * c.n_heads * c.d_head for c in crosses if isinstance(c, CrossAttention))
    assert bill.per_source_token == 0
    assert bill.at_seq == bill.fixed + tokens * bill.per_token
    assert Cache(spec, batch=batch, capacity=tokens, dtype=torch.float32).nbytes == batch * bill.at_seq


@given(hearers(), st.integers(1, 3), st.integers(2, 9), st.integers(1, 8), strategies.SEEDS)
@torch.no_grad()
def test_pieces_are_the_whole(spec: EncoderDecoder, batch: int, tokens: int, first: int, seed: int) -> None:
    model, ids = strategies.randomised(spec, seed), text(spec, batch, tokens, seed)
    audio = sounds(spec, ids).to(torch.float64)
    wanted, first = model(ids, audio=audio), min(first, tokens - 1)
    cache = Cache(spec, batch=batch, capacity=tokens, dtype=torch.float64)
    pieces = [model(ids[:, :first], audio=audio, cache=cache)]
    pieces += [model(ids[:, i : i + 1], cache=cache) for i in range(first, tokens)]
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("d_model", [64, 384])
def test_the_peak_is_that_of_the_convolutions(d_model: int) -> None:
    """Of few bands, many frames and a narrow block, so that nothing else is as large."""
    embedding = MelEmbedding(n_mels=4, n_tokens=512, d_model=d_model)
    ffn = Branch(name="ffn", body=MLP(d_model=d_model, d_ff=1, activation="relu"))
    spec = AudioEncoder(embedding=embedding, blocks=(Block(branches=(ffn,)),), max_positions=512)
    model = strategies.randomised(spec, 0, torch.float32)
    audio = torch.randn(2, 4, 1024)
    with torch.inference_mode():
        model(audio)
        got = measured.peak_bytes(lambda: model(audio))
    assert memory(spec).peak_bytes(Pass(tokens=512, batch=2, width=4)) == pytest.approx(got, rel=0.05)
