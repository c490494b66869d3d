"""Caches in fewer bits: as billed, as reckoned by hand, and the same whichever way a text is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
from codes_by_hand import CODES, by_hand
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from strategies import SEEDS, models, random_tokens, randomised, specs, texts, translators
from test_draft import Scripted, stack
from torch import Tensor

import asbuilt.kernels.coded_attention as kernel
import asbuilt.nn.attention
import asbuilt.nn.cross
import asbuilt.nn.latent
import asbuilt.nn.masks
from asbuilt import cost
from asbuilt.cost.folded import Folded, tree
from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.kernels.attention import reference
from asbuilt.kernels.codes import Coded
from asbuilt.nn.cache import Cache, CodedCache
from asbuilt.nn.model import Model
from asbuilt.nn.step import Step
from asbuilt.spec import Attention, BlockIndexer, CrossAttention, Indexer, Pass, decoder, walk
from asbuilt.spec.compressed import CompressedAttention, Compressor
from asbuilt.spec.latent import LatentAttention
from asbuilt.spec.relative import Disentangled

FORMATS = st.sampled_from(CODES)
TOLERANCE = 1e-9


def parts(model: Any) -> list[Any]:  # noqa: ANN401
    return [part for _, part in walk(model.spec if isinstance(model, Model) else model)]


def coded(spec: Any) -> bool:  # noqa: ANN401
    """Whether a stack has a cache whose keys and values can be in codes."""
    return not any(isinstance(part, Compressor) for part in parts(spec))


CODED = models().filter(coded)


def same(a: Tensor, b: Tensor, close: float = TOLERANCE) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=close * max(1.0, float(b.abs().max())))


@contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SCRATCH", 1)
        patch.setattr(kernel, "FEWEST", 3)
        yield


@torch.no_grad()
def read(model: Model, tokens: Tensor, sizes: list[int], kv: str) -> Tensor:
    cache = Cache(model.spec, batch=len(tokens), capacity=tokens.shape[1], dtype=torch.float64, kv=kv)
    reach = (tokens.shape[1],) * len(tokens)
    return torch.cat([model(piece, cache=cache, reach=reach) for piece in tokens.split(sizes, 1)], 1)


@given(specs(), FORMATS, st.integers(1, 3), st.integers(1, 12), st.sampled_from(("fp64", "fp32", "bf16")))
def test_the_cache_has_the_bytes_that_are_billed(spec: Any, kv: str, batch: int, capacity: int, own: str) -> None:  # noqa: ANN401
    """States are in the compute dtype, float32 at least where they ask for it; all else has its codes and scales."""
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[own]
    billed = cost.cache(spec, capacity, kv, state=own)
    folds = Folded(tree(spec, spec), lambda path, weight, owner: Fraction(0))
    held = cost.cache_format(kv, own)
    assert folds.cache_numbers(capacity).nbytes(held) == billed.at_seq
    run = Pass(tokens=1, past=capacity - 1, batch=batch)
    assert sum(step.cache for step in folds.step(run, held).values()) == cost.moved(spec, run, "bf16", kv, own).cache
    if not coded(spec) and kv != own:
        with pytest.raises(InputError, match=r"kv-dtype: Compressor at .* holds its cache in the compute dtype alone"):
            Cache(spec, batch=batch, capacity=capacity, dtype=dtype, kv=kv)
        return
    cache = Cache(spec, batch=batch, capacity=capacity, dtype=dtype, kv=kv)
    tensors = [tensor for layer in cache.layers.values() for tensor in layer.tensors]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == cache.nbytes == batch * billed.at_seq


def test_the_bill_by_hand() -> None:
    """SmolLM2's shape: 30 layers, keys and values of 3 heads of 64; 66 bytes a vector, or 32 + 4 in 4 bits."""
    spec = decoder(d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, n_vocab=100, max_positions=64)
    found = {
        kv: cost.cache(spec, 10, kv).at_seq for kv in ("bf16", "fp8", "int4", "int8:head", "fp8:head", "int4:head")
    }
    vectors = 10 * 30 * 2 * 3
    sizes = {"bf16": 128, "fp8": 64, "int4": 32, "int8:head": 66, "fp8:head": 66, "int4:head": 36}
    assert found == {kv: size * vectors for kv, size in sizes.items()}
    assert cost.cache(spec, 10, "int8:head").per_token == 30 * 6 * 66
    assert (
        sum(row.cache_bytes_per_token * row.count for row in cost.rows(spec, Pass(tokens=4), "int4:head")) == 36 * 180
    )


@given(CODED, FORMATS, st.integers(1, 2), st.integers(1, 20), SEEDS, st.data())
def test_decode_equals_prefill(model: Model, kv: str, batch: int, count: int, seed: int, data: DataObject) -> None:
    """Tokens attend to what is stored, their own keys too, so pieces of any size give the same numbers."""
    tokens = random_tokens(model.spec.n_vocab, batch, count, seed=seed)
    first = data.draw(st.integers(0, count))
    pieces = [size for size in (first, *[1] * min(3, count - first), max(0, count - first - 3)) if size]
    with small_blocks():
        got = read(model, tokens, pieces, kv)
    same(got, read(model, tokens, [count], kv))


@given(CODED, FORMATS, st.data())
@torch.no_grad()
def test_a_ragged_batch_equals_each_row_alone(model: Model, kv: str, data: DataObject) -> None:
    rows = data.draw(texts(model.spec.n_vocab, max_tokens=12))
    longest = max(map(len, rows))
    tokens, valid = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.bool)
    for b, row in enumerate(rows):
        tokens[b, longest - len(row) :], valid[b, longest - len(row) :] = torch.tensor(row), True
    cache = Cache(model.spec, batch=len(rows), capacity=longest + 1, dtype=torch.float64, kv=kv)
    reach = (longest + 1,) * len(rows)
    with small_blocks():
        logits = model(tokens, cache=cache, valid_BT=valid, reach=reach)
        more = model(tokens[:, -1:], cache=cache, reach=reach)
    for b, row in enumerate(rows):
        alone = Cache(model.spec, batch=1, capacity=longest + 1, dtype=torch.float64, kv=kv)
        same(logits[b, valid[b]], model(torch.tensor([row]), cache=alone, reach=reach[:1])[0])
        same(more[b], model(tokens[b : b + 1, -1:], cache=alone, reach=reach[:1])[0])


def plainly_read(part: Any) -> bool:  # noqa: ANN401
    """Whether the only thing a layer caches are the keys and values that its attention reads."""
    if isinstance(part, Indexer | BlockIndexer | Disentangled | CompressedAttention):
        return False
    if isinstance(part, LatentAttention):
        return part.indexer is None
    return not isinstance(part, Attention) or not (part.caches_input or part.differential or not part.causal)


@given(models().filter(lambda model: all(map(plainly_read, parts(model)))), FORMATS, st.integers(1, 16), SEEDS)
@torch.no_grad()
def test_attention_is_to_the_keys_and_values_as_quantised_by_hand(model: Model, kv: str, count: int, seed: int) -> None:
    """The model without a cache, its keys, values and latents replaced by what NumPy makes of them."""
    tokens = random_tokens(model.spec.n_vocab, 2, count, seed=seed)

    def rounded(x: Tensor) -> Tensor:
        return torch.from_numpy(by_hand(x.numpy(), kv))

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, kernel: str, **options: Any) -> Tensor:  # noqa: ANN401
        return reference(q, rounded(k), rounded(v), mask, **options)

    project = asbuilt.nn.latent.LatentAttention.project

    def projected(self: Any, x_BTM: Tensor, step: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        q, c, k = project(self, x_BTM, step)
        both = rounded(torch.cat((c, k), -1))
        return q, both[..., : c.shape[-1]], both[..., c.shape[-1] :]

    got = read(model, tokens, [max(1, count - 2)] + [1] * min(2, count - 1), kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asbuilt.nn.attention, "attend_in_runs", attend)
        patch.setattr(asbuilt.nn.latent.LatentAttention, "project", projected)
        want = model(tokens)
    same(got, want, 1e-8)


@given(st.builds(randomised, translators(), SEEDS), FORMATS, st.integers(1, 9), st.integers(1, 9), SEEDS)
@torch.no_grad()
def test_a_decoder_reads_its_source_from_codes(model: Model, kv: str, source: int, count: int, seed: int) -> None:
    """Token by token as at once: the pass that reads the source attends to its codes too."""
    tokens = random_tokens(model.spec.n_vocab, 2, source + count, seed=seed)
    read, written = tokens[:, :source], tokens[:, source:]

    def pieces(sizes: list[int]) -> Tensor:
        cache = Cache(model.spec, batch=2, capacity=count, source=source + 2, dtype=torch.float64, kv=kv)
        reach = (count,) * 2
        return torch.cat(
            [
                model(piece, source_BS=None if i else read, cache=cache, reach=reach)
                for i, piece in enumerate(written.split(sizes, 1))
            ],
            1,
        )

    with small_blocks():
        got = pieces([1] * count)
    same(got, pieces([count]))


def test_cross_attention_by_hand() -> None:
    """Alone: what it gives for keys and values that NumPy rounds, in the pass that reads the source and in the next."""
    part = CrossAttention(d_model=8, n_heads=2, d_head=4, d_source=6)
    torch.manual_seed(0)
    layer = asbuilt.nn.cross.CrossAttention(part, "cross").double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, source = torch.randn(2, 3, 8).double(), torch.randn(2, 5, 6).double()
    for kv in CODES:
        cache = Cache(part, batch=2, capacity=7, dtype=torch.float64, path="cross", kv=kv)
        first, then = (Step((2, 3), x.device, cache=cache) for _ in "12")
        first.source_BSM, cache.source_tokens = source, 5
        k, v = (y.view(2, 5, -1, 4).transpose(1, 2) for y in layer.kv(source))
        k, v = (torch.from_numpy(by_hand(y.detach().numpy(), kv)) for y in (k, v))
        q = layer.q(x).view(2, 3, 2, 4).transpose(1, 2)
        want = layer.o(reference(q, k, v, None, 0.5).transpose(1, 2).reshape(2, 3, 8))
        for step in (first, then):
            same(layer(x, step), want, 1e-12)


def test_a_cache_of_wide_numbers_changes_nothing_and_a_narrow_one_does() -> None:
    model = randomised(stack(), 1)
    tokens = random_tokens(7, 1, 9, seed=0)
    plain = model(tokens)
    same(read(model, tokens, [9], "fp64"), plain)
    off = {kv: float((read(model, tokens, [9], kv) - plain).abs().max()) for kv in ("fp32", "int8:head", "int4:head")}
    assert 0 < off["fp32"] < 1e-5 < off["int8:head"] < off["int4:head"]


@given(st.sampled_from((None, 3)), FORMATS, SEEDS, st.integers(1, 4), st.data())
def test_drafts_leave_greedy_text_as_it_is(
    window: int | None, kv: str, seed: int, count: int, data: DataObject
) -> None:
    """Tokens that are not accepted are taken back out of the codes, rings included."""
    model = randomised(stack(window=window), seed)
    prompt = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    plain = [t for (t,) in generate(model, [prompt], max_new_tokens=12, kv_dtype=kv)]
    wrong = data.draw(st.lists(st.integers(0, 6), min_size=12, max_size=12))
    script = [*prompt, *(p if data.draw(st.booleans()) else w for p, w in zip(plain, wrong, strict=True))]
    drafted = [t for (t,) in generate(model, [prompt], max_new_tokens=12, kv_dtype=kv, draft=Scripted(script, count))]
    assert drafted == plain


@given(FORMATS, SEEDS, st.data())
@torch.no_grad()
def test_taken_back_tokens_leave_the_bytes_as_they_were(kv: str, seed: int, data: DataObject) -> None:
    model = randomised(stack(), seed)
    tokens = random_tokens(7, 1, 12, seed=seed)
    length, more = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    cache = Cache(model.spec, batch=1, capacity=12, dtype=torch.float64, kv=kv)
    model(tokens[:, :length], cache=cache)
    before = {path: [x.clone() for x in layer.tensors] for path, layer in cache.layers.items()}
    mark = cache.mark(more)
    model(tokens[:, length : length + more], cache=cache)
    cache.rewind(mark, length)
    assert cache.lengths == (length,)
    for path, layer in cache.layers.items():
        for now, old in zip(layer.tensors, before[path], strict=True):
            kept = min(length, now.shape[2])
            assert torch.equal(now[:, :, :kept], old[:, :, :kept])


@given(st.sampled_from((None, 3)), FORMATS, SEEDS, st.data())
def test_rows_of_a_batch_stop_on_their_own(window: int | None, kv: str, seed: int, data: DataObject) -> None:
    model = randomised(stack(window=window), seed)
    prompts = data.draw(texts(7, rows=3, max_tokens=6))
    rows = [
        [t for t in column if t is not None]
        for column in zip(*generate(model, prompts, max_new_tokens=8, kv_dtype=kv, eos_ids=[3]), strict=True)
    ]
    alone = [
        [t for (t,) in generate(model, [prompt], max_new_tokens=8, kv_dtype=kv, eos_ids=[3]) if t is not None]
        for prompt in prompts
    ]
    assert rows == alone


def test_what_is_handed_to_attention() -> None:
    """Codes after a first pass, numbers in it; a user's own layer, which knows no codes, always gets numbers."""
    model = randomised(stack(window=None), 2)
    seen: list[type] = []
    attend = asbuilt.nn.masks.attend

    def watched(q: Tensor, k: Any, *rest: Any, **options: Any) -> Tensor:  # noqa: ANN401
        seen.append(type(k))
        return attend(q, k, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asbuilt.nn.masks, "attend", watched)
        read(model, random_tokens(7, 1, 5, seed=0), [3, 1, 1], "int8:head")
    layers = len(seen) // 3
    assert seen == [Tensor] * layers + [Coded] * 2 * layers
    cache = Cache(model.spec, batch=1, capacity=4, dtype=torch.float32, kv="int4:head")
    assert all(isinstance(layer, CodedCache) and layer.code is not None for layer in cache.layers.values())


@pytest.mark.parametrize("kv", ["int8", "q8_0", "nothing"])
def test_unknown_formats_are_refused_before_anything_runs(kv: str) -> None:
    model = randomised(stack(), 0)
    with pytest.raises(InputError, match="kv-dtype: not a format of our caches"):
        generate(model, [[1]], max_new_tokens=1, kv_dtype=kv)
