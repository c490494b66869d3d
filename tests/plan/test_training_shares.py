"""What tensor parallelism divides: what parts declare of it is what dividing them does, and small models by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.families import llama
from asbuilt.kernels.memory import memory
from asbuilt.plan import Options, Subject
from asbuilt.plan.train.shares import Piece
from asbuilt.spec import Attention, Mamba, Mamba2, Model, Pass, RMSNorm, Rotary, VisionLanguageModel
from asbuilt.spec.part import runs

# rows 2 x 32; d_model 64, 4 heads of 16, feed-forward 96
OPTIONS = Options(batch=2, seq=32, gpus=2, tp=2)


def model(n_kv_heads: int) -> Model:
    return llama.build(
        n_vocab=1000,
        d_model=64,
        n_layers=1,
        n_heads=4,
        n_kv_heads=n_kv_heads,
        d_ff=96,
        max_positions=32,
        rotary=Rotary(d_rotary=16),
        name="small",
    )


def block(spec: Model, options: Options = OPTIONS) -> Piece:
    (piece,) = Subject(spec).shares(options).kinds
    return piece


def few_heads(spec: Model, degree: int) -> bool:
    """Whether devices hold the same key heads, or what all channels of a state space read."""
    return any(
        (isinstance(part, Attention) and part.n_kv_heads < degree)
        or (isinstance(part, Mamba2) and part.n_groups < degree)
        or isinstance(part, Mamba)
        for _, part, _ in runs(spec, Pass(tokens=2))
    )


@given(
    strategies.specs(max_blocks=2) | strategies.translators() | strategies.encoders() | strategies.adapted(),
    st.integers(2, 4),
    st.sampled_from(("fused", "reference")),
    st.integers(2, 12),
)
def test_what_is_declared_is_what_dividing_does(spec: Model, degree: int, kernel: str, tokens: int) -> None:
    """Rows of tokens stay whole and grow with the batch, width is divided by the degree, the rest is as it was."""
    try:
        own = spec.shard(degree)
    except InputError:
        return
    run = Pass(tokens=tokens, batch=2, kernel="fused" if kernel == "fused" else "reference")
    whole, part = cost.saved_tensors(spec, run), cost.saved_tensors(own, run)
    twice = cost.saved_tensors(own, replace(run, batch=4))
    for key, tensor in part.items():
        if tensor.shared or not tensor.size:
            continue
        ways, grows = whole[key].size / tensor.size, twice[key].size == 2 * tensor.size
        if tensor.divided == "tokens":
            assert (ways, grows) == (1, True), key
        elif tensor.divided == "none":
            assert (ways, grows) == (1, False), key
        else:
            statistics = ("norm:rstd" in key or "norm:mean" in key) and ways == 1  # of a norm over all heads
            padded = "capped" in key or ".clusters." in key  # a vocabulary
            small = padded or few_heads(spec, degree)  # key heads held several times
            assert ways == degree or statistics or (small and 1 <= ways <= degree), key


@given(strategies.specs(max_blocks=2) | strategies.adapted(), st.integers(2, 4))
def test_a_divided_weight_divides_its_product(spec: Model, degree: int) -> None:
    try:
        own = spec.shard(degree)
    except InputError:
        return
    run = Pass(tokens=6, batch=2)
    for (path, part, seen), (_, whole, _) in zip(runs(own, run), runs(spec, run), strict=True):
        held = part.local_weights()
        for product, before in zip(part.multiplies(seen), whole.multiplies(seen), strict=True):
            if product.weight is None or product.weight.startswith("/") or few_heads(spec, degree):
                continue
            weight = held[product.weight]
            if weight.split is None:
                assert product.flops == before.flops, (path, product.name)
            elif part.kind not in ("embedding", "head"):  # whose vocabulary may be padded, or too small to divide
                assert product.flops * degree == before.flops, (path, product.name)


def test_one_key_head_is_computed_for_all_tokens() -> None:
    """Of one key head each of two devices has that one, of two one each: the same work, and the same is kept.

    Queries, keys and values are of all 64 rows (Korthikanti et al. 2022, section 4.2.2: the stream is gathered before
    the maps). Kept: half of the inputs of both norms, both branches and their rstd, 4 x 4,096 + 2 x 128; queries and
    mixed values of two heads, 2 x 4,096; a key and a value head, 2 x 2,048; log-sum-exps of two heads, 512; four
    hidden tensors of 48 numbers a row, 4 x 6,144.
    """
    one, two = block(model(1)), block(model(2))
    assert one.kept["none"] == 4 * 4096 + 2 * 128 + 2 * 4096 + 2 * 2048 + 512 + 4 * 6144
    assert one.work.forward(causal=False) == 2 * 64 * 64 * (32 + 16 + 16 + 32 + 3 * 48) + 2 * 2 * 2 * 32 * 32 * 16 * 2
    assert (one.kept, one.work, one.dense) == (two.kept, two.work, two.dense)
    unshared = replace(OPTIONS, sequence_parallel=False)
    assert block(model(1), unshared).kept["none"] == one.kept["none"] + 4 * 4096 + 2 * 128


def test_a_norm_over_all_heads_has_its_statistics_for_all_tokens() -> None:
    """Queries are divided by heads and not by tokens, and so is what a norm of them keeps: 4 bytes for each row."""
    spec = model(2)
    normed = spec.edit("blocks.0.attention.body", q_norm=RMSNorm(d=64))
    assert block(normed).kept["none"] - block(spec).kept["none"] == 64 * 32 * 2 + 4 * 64


@pytest.mark.parametrize("targets", [None, ("gate",), ("down",)])
def test_adapters_need_room(targets: tuple[str, ...] | None) -> None:
    """x A^T, and what B makes of it twice, before and after it is scaled, of the widest map: 64 rows in two bytes.

    They stand beside the bound of a block without them; what its parts declare to need is of plain maps alone.
    """
    options = Options(batch=2, seq=32, lora=4, targets=targets)
    wide = 64 if targets == ("down",) else 96
    plain, adapted = memory(model(2).blocks[0]).peak_bytes(Pass(tokens=32, batch=2, width=2)), block(model(2), options)
    assert set(adapted.working.values()) == {plain + 64 * (4 + 2 * wide) * 2}
    assert adapted.bounded
    assert not block(model(2), replace(options, lora=None, targets=None)).bounded


def test_adapters_hold_and_multiply_what_their_maps_sizes_say() -> None:
    """A (4, 64) and B (96, 4) beside gate, of which each of two devices has A whole and half of B."""
    piece = block(model(2), replace(OPTIONS, lora=4, targets=("gate",)))
    assert piece.dense.gradients == 2 * (4 * 64 + 48 * 4)
    assert piece.work.trained == 2 * 64 * (64 * 4 + 4 * 48)  # of all rows: they stand beside a map divided by its rows


def test_images_are_not_adapted() -> None:
    """A tower is held as it is, and not trained: adapters of every map are those of the text alone."""
    spec = find("llava-1.5-7b").spec()
    assert isinstance(spec, VisionLanguageModel)
    seeing, text = (Subject(s).shares(Options(seq=8, lora=4)) for s in (spec, spec.text))
    assert seeing.kinds == text.kinds
    tower = cost.weight_bytes(spec.vision, "bf16")
    assert (
        seeing.before.dense.total + seeing.after.dense.total == text.before.dense.total + text.after.dense.total + tower
    )
