"""What the parts declare is what the built model has, does, allocates, keeps and needs, on drawn specs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strategies
import torch
from attending import attends
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import InputError, cost
from asbuilt.kernels.memory import memory
from asbuilt.kernels.memory.attention import AttentionMemory
from asbuilt.measure import run as measured
from asbuilt.nn import build, built_parameters
from asbuilt.nn.cache import Cache
from asbuilt.nn.image_encoder import ImageEncoder
from asbuilt.nn.masks import AttentionPattern, mask
from asbuilt.nn.step import Step
from asbuilt.nn.text_encoder import TextEncoder
from asbuilt.spec import (
    KINDS,
    Attention,
    LatentAttention,
    MixtureOfExperts,
    Model,
    Pass,
    RelativeBuckets,
    buffers,
    runs,
    stored_weights,
    walk,
    weights,
)
from asbuilt.spec.documents import require_separable

BATCH, TOKENS = st.integers(1, 3), st.integers(1, 20)
ANY = strategies.specs() | strategies.translators() | strategies.encoders()
ANY |= strategies.adapted() | strategies.clipped()
KERNELS = st.sampled_from(("reference", "fused"))


def separable(spec: Model) -> bool:
    """Whether documents of one row can be kept apart."""
    try:
        require_separable(spec)
    except InputError:
        return False
    return True


def counted(spec: Model, run: Pass) -> int:
    """FLOPs that PyTorch counts on the meta device for one pass, after `run.past` cached tokens."""
    model = build(spec, device="meta")
    cache = Cache(spec, batch=run.batch, capacity=run.past + run.tokens, dtype=torch.float32, device="meta")
    cache.lengths = (run.past,) * run.batch
    cache.rotaries = ()  # a pass that reads nothing again; see tests/generate/test_read_again.py for one that does
    ids = torch.zeros(run.batch, run.tokens, dtype=torch.long, device="meta")
    source = {} if run.past else measured.source_of(model, ids)
    cache.source_tokens = run.source_tokens
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if run.logits == "pooled":
            assert isinstance(model, TextEncoder | ImageEncoder)
            model.pooled(measured.given(model, ids)[0], kernel="reference")
        else:
            model(ids, **source, cache=cache, kernel="reference", last=run.logits == "last")
    return counter.get_total_flops()


@given(ANY)
def test_holds_is_named_parameters(spec: Model) -> None:
    model = build(spec, device="meta")
    built = built_parameters(model)
    assert {path: w.shape for path, w, _ in weights(spec)} == {n: tuple(p.shape) for n, p in built.items()}
    assert {path: b.shape for path, b, _ in buffers(spec)} == {n: tuple(b.shape) for n, b in model.named_buffers()}
    computed = {path for path, weight, _ in weights(spec) if not weight.learned}
    frozen = {path for path, weight, _ in weights(spec) if weight.frozen}
    assert computed | frozen == {path for path, parameter in built.items() if not parameter.requires_grad}
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in computed}
    assert {path: w.shape for path, w, _ in stored_weights(spec)} == {n: t.shape for n, t in stored.items()}
    assert cost.total_parameters(spec) == sum(p.numel() for p in built.values())
    in_file = sum(t.numel() for t in stored.values())
    assert cost.total_parameters(spec) + sum(cost.stored_extra(spec).values()) == in_file
    assert sum(cost.parameters(spec).values()) == cost.total_parameters(spec)


@given(ANY, BATCH, TOKENS, st.integers(0, 20), st.sampled_from(("all", "last")))
def test_multiplies_is_the_flop_counter(spec: Model, batch: int, tokens: int, past: int, logits: str) -> None:
    run = Pass(tokens=tokens, batch=batch, past=past if spec.decodes else 0, logits=logits)  # type: ignore[arg-type]
    assert cost.flops(spec, run).forward == counted(spec, run)


POOLED = (strategies.encoders() | strategies.towers()).filter(lambda spec: spec.pooler is not None)


@given(POOLED, BATCH, TOKENS, KERNELS)
def test_a_pooled_pass_is_what_is_declared(spec: Model, batch: int, tokens: int, kernel: str) -> None:
    """FLOPs, saved bytes (float64, so that none is cast) and room to work, of a pass that ends in the pooler."""
    tokens = tokens if spec.n_vocab else spec.max_positions  # all of an image
    run = Pass(tokens=tokens, batch=batch, logits="pooled", kernel=kernel, width=8)  # type: ignore[arg-type]
    assert cost.flops(spec, run).forward == counted(spec, run)
    model = strategies.randomised(spec, 0, torch.float64)
    kept, loss = measured.saved_bytes(model, tokens, batch, kernel, pooled=True)  # type: ignore[arg-type]
    assert (cost.saved(spec, run).all, 0) == (kept, loss)
    ids, _ = measured.given(model, torch.zeros(batch, tokens, dtype=torch.long))
    ids = ids.double() if ids.is_floating_point() else ids
    assert isinstance(model, TextEncoder | ImageEncoder)
    with torch.inference_mode():
        model.pooled(ids, kernel=kernel)  # type: ignore[arg-type]
        peak = measured.peak_bytes(lambda: model.pooled(ids, kernel=kernel))  # type: ignore[arg-type]
    assert 0.5 * peak <= memory(spec).peak_bytes(run) <= 2 * peak or tokens == 1


@given(ANY, TOKENS)
def test_training_is_three_times_forward(spec: Model, tokens: int) -> None:
    model = build(spec, device="meta")
    with FlopCounterMode(display=False) as counter:
        ids, beside = measured.given(model, torch.zeros(1, tokens, dtype=torch.long, device="meta"))
        model(ids, **beside, kernel="reference").sum().backward()
    assert counter.get_total_flops() == cost.flops(spec, Pass(tokens=tokens)).training


@given(ANY, TOKENS, st.integers(0, 20))
def test_causal_count_is_pairs_one_by_one(spec: Model, tokens: int, past: int) -> None:
    seen = Pass(tokens=tokens, past=past if spec.decodes else 0)
    attentions = [(part, run) for _, part, run in runs(spec, seen) if isinstance(part, Attention)]
    for part, run in attentions:
        positions = range(run.past, run.past + run.tokens)
        keys = [(q, k) for q in positions for k in range(q + 1 if part.causal else run.past + run.tokens)]
        seen = sum(1 for q, k in keys if attends(part, q, k))
        if part.indexer is not None:  # all of as many blocks but one, and the past of the token's own
            block, most = part.indexer.block, part.indexer.top_k
            seen = sum(min(q // block, most - 1) * block + q % block + 1 for q in positions)
        scores = [p for p in part.multiplies(run) if p.name in ("scores", "mix")]
        widths = (part.d_head, part.mixed_width)
        assert [p.causal_flops for p in scores] == [2 * part.n_heads * width * seen for width in widths]
        assert all(p.causal_flops <= p.flops for p in scores)


@given(strategies.latents(5), TOKENS, st.integers(0, 20), BATCH)
def test_causal_count_of_latents_is_pairs_one_by_one(part: LatentAttention, tokens: int, past: int, batch: int) -> None:
    run = Pass(tokens=tokens, past=past, batch=batch)
    scores, mix = (p for p in part.multiplies(run) if p.weight is None)
    most = past + tokens if part.indexer is None else part.indexer.top_k
    seen = sum(min(q + 1, most) for q in range(past, past + tokens)) * batch * part.n_heads
    widths = (part.d_latent, part.kv_rank) if tokens == 1 and past else (part.d_head, part.d_value)
    assert (scores.causal_flops, mix.causal_flops) == (2 * widths[0] * seen, 2 * widths[1] * seen)
    assert scores.causal_flops <= scores.flops
    assert mix.causal_flops <= mix.flops


@given(ANY, BATCH, st.integers(1, 40), st.sampled_from((torch.float32, torch.bfloat16)))
def test_remembers_is_the_allocated_cache(spec: Model, batch: int, capacity: int, dtype: torch.dtype) -> None:
    allocated = Cache(spec, batch=batch, capacity=capacity, dtype=dtype).nbytes
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    bill = cost.cache(spec, capacity, name)
    assert batch * bill.at_seq == allocated
    shared = any(r.every > 1 for _, part in walk(spec) for r in part.remembers())  # by tokens: bytes are rounded up
    upfront = bill.per_token + bill.per_source_token + bill.fixed
    assert cost.cache(spec, 1, name).at_seq == upfront or (shared and cost.cache(spec, 1, name).at_seq < upfront)
    assert cost.cache(spec, capacity, name, source=0).at_seq == bill.at_seq - bill.per_source_token * capacity
    forever = 12 * 10**5
    every = bill.unbounded + bill.per_source_token
    rounded = every * forever + bill.window + bill.fixed - cost.cache(spec, forever, name).at_seq
    assert 0 <= rounded <= (forever if shared else 0)


@given(ANY, BATCH, TOKENS, KERNELS, st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
@settings(max_examples=100)
def test_saves_is_what_autograd_keeps(spec: Model, batch: int, tokens: int, kernel: str, dtype: torch.dtype) -> None:
    model = strategies.randomised(spec, 0, dtype)
    run = Pass(tokens=tokens, batch=batch, kernel=kernel, width=dtype.itemsize)  # type: ignore[arg-type]
    kept, _ = measured.saved_bytes(model, tokens, batch, kernel)  # type: ignore[arg-type]
    assert cost.saved(spec, run).all == kept


@given(strategies.specs(max_blocks=2), BATCH, TOKENS, KERNELS, st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=100)
def test_documents_kept_apart_save_what_is_billed(
    spec: Model, batch: int, tokens: int, kernel: str, dtype: torch.dtype
) -> None:
    """A mask for each sequence that layers share, and positions of each, where one was enough, or none."""
    if not separable(spec):
        return
    model = strategies.randomised(spec, 0, dtype)
    run = Pass(tokens=tokens, batch=batch, kernel=kernel, width=dtype.itemsize, documents=True)  # type: ignore[arg-type]
    numbers = torch.arange(batch * tokens).view(batch, tokens) // 3
    kept, _ = measured.saved_bytes(model, tokens, batch, kernel, documents=numbers)  # type: ignore[arg-type]
    assert cost.saved(spec, run).all == kept


@given(ANY, BATCH, TOKENS)
def test_the_loss_keeps_what_is_billed(spec: Model, batch: int, tokens: int) -> None:
    model = strategies.randomised(spec, 0, torch.bfloat16)
    _, kept = measured.saved_bytes(model, tokens, batch)
    assert kept == cost.saved(spec, Pass(tokens=tokens, batch=batch, width=2)).loss


@given(ANY)
def test_rows_add_up(spec: Model) -> None:
    run = Pass(tokens=8)
    lines = cost.rows(spec, run, "bf16")
    assert sum(r.parameters * r.count for r in lines) == cost.total_parameters(spec)
    rounded = sum(r.cache_bytes_per_token * r.count for r in lines) - cost.cache(spec, 8, "bf16").per_token
    assert 0 <= rounded <= sum(r.count for r in lines if r.part == "Compressor")
    assert sum(r.flops_per_token * r.count for r in lines) * 8 == pytest.approx(
        cost.flops(spec, run).forward, rel=1e-12
    )
    assert {r.kind for r in lines} <= set(KINDS)


@given(ANY)
def test_every_weight_that_multiplies_is_one_that_is_held(spec: Model) -> None:
    held = {path for path, _, _ in weights(spec)}
    n = strategies.CONTEXT  # more than an indexer chooses: it may have to choose
    passes = (Pass(tokens=n), Pass(tokens=n, logits="pooled"))
    multiplied = {p.weight_path for run in passes for p in cost.products(spec, run)} - {None}
    matrices = {path for path, w, _ in weights(spec) if w.role == "matrix"}
    assert matrices <= multiplied <= held


@given(ANY, st.integers(1, 30))
def test_moved_reads_every_multiplied_weight_once(spec: Model, past: int) -> None:
    one = cost.moved(spec, Pass(tokens=1, past=past), "bf16", "bf16")
    many = cost.moved(spec, Pass(tokens=1, past=past, batch=7), "bf16", "bf16")
    sparse = any(isinstance(part, MixtureOfExperts) for _, part in walk(spec))
    assert many.weights == one.weights or (sparse and many.weights["ffn"] > one.weights["ffn"])
    assert many.weights | {"ffn": 0} == one.weights | {"ffn": 0}
    assert many.cache == 7 * one.cache
    kept = cost.cache(spec, past + 1, "bf16").at_seq
    choosing = [part for part in spec.mixers if part.choice is not None and part.choice[1] <= past]
    assert one.cache < kept if choosing else one.cache == kept
    assert many.lookups == 7 * one.lookups


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_block_formats_against_the_library(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    held = cost.dtype(name)
    assert (held.block, held.block_bytes) == (block, nbytes)


@given(ANY, BATCH, st.integers(2, 20), KERNELS)
@settings(max_examples=20)
def test_works_is_never_less_than_half_nor_twice_the_peak(spec: Model, batch: int, tokens: int, kernel: str) -> None:
    """Tiny models are all small change (positions, statistics); real sizes are held to 3% in tests/measure."""
    model = strategies.randomised(spec, 0, torch.float32)
    ids = torch.zeros(batch, tokens, dtype=torch.long)

    def forward() -> None:
        model(ids, **measured.source_of(model, ids), kernel=kernel, last=True)  # type: ignore[arg-type]

    with torch.inference_mode():
        forward()
        peak = measured.peak_bytes(forward)
    run = Pass(tokens=tokens, batch=batch, width=4, logits="last", kernel=kernel)  # type: ignore[arg-type]
    assert 0.5 * peak <= memory(spec).peak_bytes(run) <= 2 * peak


def test_longer_runs_work_more() -> None:
    from asbuilt.catalog import find

    spec = find("gpt2").spec()
    run = Pass(tokens=64, logits="last")
    assert memory(spec).peak_bytes(replace(run, tokens=128)) > memory(spec).peak_bytes(run)


@given(strategies.specs(), BATCH, st.integers(1, 20), KERNELS)
def test_what_is_made_again_is_among_what_is_saved(spec: Model, batch: int, tokens: int, kernel: str) -> None:
    run = Pass(tokens=tokens, batch=batch, kernel=kernel)  # type: ignore[arg-type]
    bill, kept = cost.saved(spec, run), cost.saved_tensors(spec, run)
    dropped = cost.recomputed_tensors(spec) & kept.keys()
    assert bill.all - bill.selective + bill.lent == sum(kept[key].nbytes(2) for key in dropped)
    # names that no kernel keeps would be slips of the pen: scores are kept by the reference kernel alone
    scores = {"mask", "capped", "probabilities", "probabilities cast"}
    missed = cost.recomputed_tensors(spec) - cost.saved_tensors(spec, run).keys()
    assert {key.rpartition(":")[2] for key in missed} <= scores, missed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 5, 32])
@pytest.mark.parametrize(("both_ways", "causal"), [(True, False), (False, False), (False, True), (True, True)])
def test_room_to_make_relative_scores_is_the_allocators_peak(
    both_ways: bool, causal: bool, heads: int, dtype: torch.dtype
) -> None:
    """Beside the positions (int64), to the byte: with few heads it is finding the buckets, with many their numbers."""
    tokens, part = 24, RelativeBuckets(n_buckets=8, max_distance=16, both_ways=both_ways)
    numbers = torch.zeros(8, heads, dtype=dtype)

    def make() -> None:
        step = Step((1, tokens), torch.device("cpu"))
        step.relative_BH = numbers
        mask(step, AttentionPattern(causal=causal, relative=part), dtype, lambda: step.key_positions_BT)

    with torch.inference_mode():
        make()
        peak = measured.peak_bytes(make)
    attention = Attention(d_model=4, n_heads=heads, n_kv_heads=heads, d_head=4, positions=part, causal=causal)
    _, kept, beside = AttentionMemory(attention).mask_peak(Pass(tokens=tokens, width=dtype.itemsize))
    projected = 3 * tokens * heads * 4 * dtype.itemsize  # q, k and v, which are there by then
    assert peak - 8 * tokens <= kept + beside - projected <= peak
    assert kept == heads * tokens**2 * dtype.itemsize
