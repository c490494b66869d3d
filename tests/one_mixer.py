"""What holds of every mixer that remembers by a state: models of it alone, and checks of them."""

from __future__ import annotations

from itertools import pairwise

import strategies
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import cost
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model as Module
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import Block, Branch, Head, Mixer, Model, Pass, RMSNorm, TokenEmbedding


def alone(*mixers: Mixer, n_vocab: int = 7) -> Model:
    """Layers of these mixers and nothing else."""
    d_model = mixers[0].d_model
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=tuple(Block(branches=(Branch(name="mixer", body=one, norm=RMSNorm(d=d_model)),)) for one in mixers),
        head=Head(d_model=d_model, n_vocab=n_vocab),
        max_positions=512,
    )


def stacks(mixers: SearchStrategy[Mixer]) -> SearchStrategy[Model]:
    """One or two layers of what is drawn."""
    return st.lists(mixers, min_size=1, max_size=2).map(lambda drawn: alone(*drawn))


def text(spec: Model, batch: int, tokens: int, seed: int) -> Tensor:
    """Token ids (B, T)."""
    return torch.randint(spec.n_vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def near(have: Tensor, want: Tensor, close: float) -> None:
    """Fails unless both are equal but for `close` of the largest number."""
    torch.testing.assert_close(have, want, rtol=close, atol=close * max(1.0, float(want.abs().max())))


@torch.no_grad()
def check_pieces(spec: Model, tokens: int, cuts: tuple[int, ...], seed: int) -> None:
    """A text in pieces, one token at a time at the end, is as the whole, in both widths of numbers."""
    for dtype, close in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model, ids = strategies.randomised(spec, seed, dtype), text(spec, 2, tokens, seed)
        wanted = model(ids)
        cache = Cache(spec, batch=2, capacity=tokens, dtype=dtype)
        places = sorted({0, tokens, max(0, tokens - 2), max(0, tokens - 1), *(cut for cut in cuts if cut < tokens)})
        pieces = [model(ids[:, a:b], cache=cache) for a, b in pairwise(places)]
        near(torch.cat(pieces, 1), wanted, close)


@torch.no_grad()
def check_ragged(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    """Two texts in one batch, padded on either side, and one more token of each, are as each alone."""
    model, ids, width = strategies.randomised(spec, seed), text(spec, 2, max(lengths) + 1, seed), max(lengths)
    batch, valid = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        place = slice(width - n, None) if left else slice(n)
        batch[row, place], valid[row, place] = ids[row, :n], True
    cache = Cache(spec, batch=2, capacity=width + 1, dtype=torch.float64)
    together = model(batch, cache=cache, valid_BT=valid)
    uncached = model(batch, valid_BT=valid)
    after = model(torch.stack([ids[row, n : n + 1] for row, n in enumerate(lengths)]), cache=cache)
    for row, n in enumerate(lengths):
        whole = model(ids[row : row + 1, : n + 1])
        near(together[row][valid[row]], whole[0, :n], 1e-9)
        near(uncached[row][valid[row]], whole[0, :n], 1e-9)
        near(after[row], whole[0, n:], 1e-9)


@torch.no_grad()
def check_long(mixer: Mixer, tokens: int = 100_000) -> None:
    """A hundred thousand tokens leave everything finite."""
    spec = alone(mixer)
    model: Module = strategies.randomised(spec, 0, torch.float32)
    cache = Cache(spec, batch=1, capacity=tokens, dtype=torch.float32)
    assert model(text(spec, 1, tokens, 0), cache=cache, last=True).isfinite().all()
    assert all(t.isfinite().all() for layer in cache.layers.values() for t in layer.tensors)  # type: ignore[attr-defined]


def check_products(spec: Model, batch: int, tokens: int, past: int) -> None:
    """A pass after cached tokens, and one with its backward pass, multiply what is declared."""
    model = build(spec, device="meta")
    cache = Cache(spec, batch=batch, capacity=past + tokens, dtype=torch.float32, device="meta")
    cache.lengths = (past,) * batch
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, cache=cache)
    assert counter.get_total_flops() == cost.flops(spec, Pass(tokens=tokens, batch=batch, past=past)).forward
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == cost.flops(spec, Pass(tokens=tokens, batch=batch)).training


def check_saved(spec: Model, batch: int, tokens: int, dtype: torch.dtype) -> None:
    """Autograd keeps what is declared."""
    kept, _ = measured.saved_bytes(strategies.randomised(spec, 0, dtype), tokens, batch)
    assert cost.saved(spec, Pass(tokens=tokens, batch=batch, width=dtype.itemsize)).all == kept


@torch.inference_mode()
def check_peak(part: Mixer, tokens: int, dtype: torch.dtype) -> None:
    """The allocator's peak of two texts is near the declared one."""
    made, x = module(part, "x").to(dtype), torch.ones(2, tokens, part.d_model, dtype=dtype)
    made(x, Step((2, tokens), x.device, dtype=dtype))  # the library's own buffers
    seen = measured.peak_bytes(lambda: made(x, Step((2, tokens), x.device, dtype=dtype)))
    run = Pass(tokens=tokens, batch=2, width=dtype.itemsize)
    assert 0.8 * seen <= memory(part).peak_bytes(run) <= 1.25 * seen
