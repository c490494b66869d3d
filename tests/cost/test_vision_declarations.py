"""What the parts of vision and hearing declare is what the built model has, does, keeps and needs, on drawn specs."""

from __future__ import annotations

import itertools

import pytest
import strategies
import torch
from attending import attends
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.spec import (
    Attention,
    GridConvolution,
    ImageEncoder,
    Model,
    Pass,
    VisionLanguageModel,
    runs,
    walk,
    weights,
)

BATCH, TOKENS, IMAGES = st.integers(1, 3), st.integers(1, 12), st.integers(0, 2)
SEERS = strategies.seers() | strategies.grid_seers() | strategies.tiled_seers() | strategies.sensers()
IN_TEXTS = SEERS | strategies.listeners()
SPECS = strategies.towers() | strategies.grid_towers() | strategies.tiled_towers() | IN_TEXTS | strategies.pairs()
KERNELS = st.sampled_from(("reference", "fused"))
some = settings(max_examples=10)


def a_pass(spec: Model, tokens: int, images: int, **more: object) -> Pass:
    """A pass whose text has room for its images, a multiple of what one image takes for a model of images alone."""
    if isinstance(spec, ImageEncoder):
        return Pass(tokens=spec.embedding.n_tokens, **more)  # type: ignore[arg-type]
    assume(images <= 1 or not spec.crosses)
    room, sounds = images * spec.image_tokens, 0
    if isinstance(spec, VisionLanguageModel) and spec.hearing is not None:  # as many of either
        room, sounds = room + images * spec.hearing.n_tokens, images
    assume(room + tokens <= strategies.CONTEXT)
    return Pass(tokens=room + tokens, images=images, sounds=sounds, **more)  # type: ignore[arg-type]


def ran(spec: Model, run: Pass, backward: bool = False) -> int:
    """FLOPs that PyTorch counts on the meta device."""
    model = build(spec, device="meta")
    none = torch.zeros(run.batch, run.tokens, dtype=torch.long, device="meta")
    ids, beside = measured.given(model, none, run.images, run.sounds)
    with FlopCounterMode(display=False) as counter:
        last = {} if isinstance(spec, ImageEncoder) else {"last": run.logits == "last"}
        result = model(ids, **beside, **last, kernel="reference")
        if backward:
            result.sum().backward()
    return counter.get_total_flops()


@given(SPECS)
@some
def test_holds_is_named_parameters(spec: Model) -> None:
    model = build(spec, device="meta")
    assert {path: w.shape for path, w, _ in weights(spec)} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert sum(cost.parameters(spec).values()) == sum(p.numel() for p in model.parameters())


@given(SPECS, BATCH, TOKENS, IMAGES, st.sampled_from(("all", "last")))
@some
def test_multiplies_is_the_flop_counter(spec: Model, batch: int, tokens: int, images: int, logits: str) -> None:
    bill = cost.flops(spec, run := a_pass(spec, tokens, images, batch=batch, logits=logits))
    assert bill.forward - bill.caching == ran(spec, run)  # without a cache


@given(SPECS, TOKENS, IMAGES)
@some
def test_training_needs_no_gradient_of_pixels(spec: Model, tokens: int, images: int) -> None:
    run = a_pass(spec, tokens, images)
    # of channels apart PyTorch counts the gradient of the weights as if all channels were mixed
    assume(not any(isinstance(part, GridConvolution) and part.apart for _, part in walk(spec)))
    assert cost.flops(spec, run).training == ran(spec, run, backward=True)


@given(SEERS, TOKENS, st.integers(1, 2))
@some
def test_causal_count_with_images_is_pairs_one_by_one(spec: VisionLanguageModel, tokens: int, images: int) -> None:
    run = a_pass(spec, tokens, images)
    n = spec.vision.n_tokens if spec.vision.both_ways else 1
    blocks = [t // n if t < images * n else -t for t in range(run.tokens)]
    blocks = [0] * run.tokens if spec.vision.prefix else blocks
    for path, part, seen in runs(spec, run):
        plain = isinstance(part, Attention) and part.chunk is None and part.indexer is None
        if plain and not path.startswith(("vision", "hearing")):
            assert isinstance(part, Attention)
            alone = spec.vision.in_windows and part.window is None
            own = range(run.tokens) if alone else blocks
            each = [*itertools.product(range(run.tokens), repeat=2)]
            together = [own[q] == own[k] and (k > q or spec.vision.prefix) for q, k in each]
            pairs = sum(one or (k <= q and attends(part, q, k)) for one, (q, k) in zip(together, each, strict=True))
            assert part.pairs(seen) == pairs


@given(SPECS, BATCH, TOKENS, IMAGES, KERNELS, st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
@settings(max_examples=20)
def test_saves_is_what_autograd_keeps(
    spec: Model, batch: int, tokens: int, images: int, kernel: str, dtype: torch.dtype
) -> None:
    run = a_pass(spec, tokens, images, batch=batch, kernel=kernel, width=dtype.itemsize)
    model = strategies.randomised(spec, 0, dtype)
    kept, loss = measured.saved_bytes(model, run.tokens, batch, kernel, images, sounds=run.sounds)  # type: ignore[arg-type]
    assert cost.saved(spec, run).all == kept
    if dtype == torch.bfloat16:
        assert cost.saved(spec, run).loss == loss


@given(SPECS, TOKENS, IMAGES)
@some
def test_rows_add_up(spec: Model, tokens: int, images: int) -> None:
    """Held parts are there whether they run or not."""
    run = a_pass(spec, tokens, images)
    lines = cost.rows(spec, run, "bf16")
    assert sum(r.parameters * r.count for r in lines) == cost.total_parameters(spec)
    whole = sum(r.flops_per_token * r.count for r in lines) * run.rows
    assert whole == pytest.approx(cost.flops(spec, run).forward, rel=1e-12)


@given(SPECS, BATCH, TOKENS, IMAGES, KERNELS)
@some
def test_works_is_never_less_than_half_nor_twice_the_peak(
    spec: Model, batch: int, tokens: int, images: int, kernel: str
) -> None:
    run = a_pass(spec, tokens, images, batch=batch, width=4, logits="last", kernel=kernel)
    model = strategies.randomised(spec, 0, torch.float32)
    ids, beside = measured.given(model, torch.zeros(batch, run.tokens, dtype=torch.long), images, run.sounds)

    def forward() -> None:
        last = {} if isinstance(spec, ImageEncoder) else {"last": True}
        model(ids, **beside, **last, kernel=kernel)  # type: ignore[arg-type]

    with torch.inference_mode():
        forward()
        peak = measured.peak_bytes(forward)
    assert 0.5 * peak <= memory(spec).peak_bytes(run) <= 2 * peak


@given(SPECS)
@some
def test_remembers_is_the_allocated_cache(spec: Model) -> None:
    allocated = Cache(spec, batch=2, capacity=9, dtype=torch.float32).nbytes
    assert 2 * cost.cache(spec, 9, "fp32").at_seq == allocated
    assert not any(part.remembers() for path, part in walk(spec) if path.startswith(("vision", "hearing")))


@given(IN_TEXTS, BATCH, TOKENS, KERNELS)
@some
def test_cached_decoding_after_images_is_a_whole_pass(spec: Model, batch: int, tokens: int, kernel: str) -> None:
    run = a_pass(spec, tokens, 1, batch=batch)
    model = strategies.randomised(spec, 1)
    generator = torch.Generator().manual_seed(tokens)
    drawn = torch.randint(spec.n_vocab, (batch, run.tokens), generator=generator)
    ids, beside = measured.given(model, drawn, 1, run.sounds)
    with torch.inference_mode():
        first = run.tokens - tokens + 1
        known = {}
        if isinstance(spec, VisionLanguageModel) and spec.vision.prefix:
            known = {"prefix": (first,) * batch}
        whole = strategies.whole(model, ids, [first] + [1] * (tokens - 1), **beside, **known, kernel=kernel)
        cache = Cache(spec, batch=batch, capacity=run.tokens, dtype=torch.float64)
        parts = [model(ids[:, :first], **beside, cache=cache, kernel=kernel)]  # type: ignore[arg-type]
        parts += [model(ids[:, t : t + 1], cache=cache, kernel=kernel) for t in range(first, run.tokens)]  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@given(SEERS, IMAGES, st.integers(1, 3))
@some
def test_each_texts_images_are_its_own(spec: Model, images: int, padding: int) -> None:
    """A row alone, padded on the left, gives what it gives among others."""
    run = a_pass(spec, 4 + padding, images, batch=2)
    model = strategies.randomised(spec, 2)
    drawn = torch.arange(2 * run.tokens).remainder(spec.n_vocab).view(2, -1)
    ids, beside = measured.given(model, drawn, images, run.sounds)
    with torch.inference_mode():
        whole = model(ids, **beside)
        each = {"images": 1, "audio": images}  # in a row of texts, or all one after the other
        one = {name: tensor[each[name] :] for name, tensor in beside.items()}
        heard = spec.heard
        taken = {spec.vision.placeholder, None if heard is None else heard.placeholder}  # type: ignore[union-attr]
        other = next(token for token in range(spec.n_vocab) if token not in taken)
        padded = torch.cat((torch.full((1, padding), other), ids[1:]), 1)
        valid = torch.arange(padded.shape[1])[None] >= padding
        alone = model(padded, **one, valid_BT=valid)
    torch.testing.assert_close(alone[:, padding:], whole[1:])


@given(strategies.seers())
@some
def test_wrong_images_are_refused_by_name(spec: VisionLanguageModel) -> None:
    model = strategies.randomised(spec, 3)
    run = a_pass(spec, 3, 1)
    ids, beside = measured.given(model, torch.zeros(1, run.tokens, dtype=torch.long), 1)
    pixels = beside["images"]
    for wrong in (pixels[..., :-1], pixels[0, 0], torch.cat((pixels, pixels), -3), pixels.transpose(2, 4)[..., :-1, :]):
        with pytest.raises(InputError, match="images"):
            model(ids, images=wrong)
    with pytest.raises(InputError, match="placeholders"):
        model(ids, images=torch.cat((pixels, pixels), 1))
    with pytest.raises(InputError, match="images: not an input of LanguageModel"):
        strategies.randomised(spec.text, 3)(ids, images=pixels)
