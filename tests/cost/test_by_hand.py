"""Small models worked out by hand: every figure of the bill as a literal, with what it is the sum of."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from asbuilt import InputError, cost
from asbuilt.cost.folded import Folded, tree
from asbuilt.families import llama, mixtral
from asbuilt.spec import Attention, Block, Branch, LatentAttention, Model, Part, Pass, Rotary, Router, decoder
from asbuilt.spec.edit import transform


def _one(d_ff: int, *, tied: bool = False) -> Model:
    return llama.build(
        n_vocab=11,
        d_model=8,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        d_ff=d_ff,
        max_positions=32,
        rotary=Rotary(d_rotary=2),
        tied=tied,
        name="tiny",
    )


def _two() -> Model:
    """Two layers: one with a feed-forward width of 12, one of 20 that sees the last three tokens."""
    first, second = _one(12), _one(20).blocks[0]
    attention, ffn = second.branches
    windowed = replace(attention, body=replace(attention.body, window=3))
    return replace(first, blocks=(first.blocks[0], replace(second, branches=(windowed, ffn))))


SPEC = _two()
RUN = Pass(tokens=5, batch=2, width=2)
# 4 heads of 2 numbers and 2 for keys and values: q and o 8 x 8, k and v 4 x 8; gate, up and down 8 x 12 and 8 x 20
ATTENTION, FFN, HEAD = 64 + 32 + 32 + 64, 3 * 8 * (12 + 20), 8 * 11


def test_parameters() -> None:
    held = {kind: n for kind, n in cost.parameters(SPEC).items() if n}
    assert held == {"embedding": 88, "attention": 2 * ATTENTION, "ffn": FFN, "norm": 5 * 8, "head": 88}
    assert cost.total_parameters(SPEC) == cost.active_parameters(SPEC) == 1368
    assert cost.active_parameters(SPEC, tables=False) == 1368 - 88
    tied = _one(12, tied=True)
    assert cost.active_parameters(tied, tables=False) == cost.active_parameters(tied) == 88 + ATTENTION + 288 + 24
    assert cost.stored_extra(SPEC) == {"computed": 0, "buffers": 0, "predictors": 0}


def test_flops() -> None:
    """Two for each number of a matrix and token; scores and mixing 4 x 8 for each pair of tokens."""
    found = cost.flops(SPEC, RUN)
    products = 2 * (2 * ATTENTION + FFN + HEAD) * 10
    full, causal = 2 * 2 * 32 * 25, 2 * 32 * (1 + 2 + 3 + 4 + 5) + 2 * 32 * (1 + 2 + 3 + 3 + 3)
    assert (found.products, found.scores, found.scores_causal) == (products, full, causal) == (24_800, 3200, 1728)
    assert (found.forward, found.forward_causal) == (28_000, 26_528)
    assert (found.training, found.training_causal) == (84_000, 79_584)


def test_cache() -> None:
    """Eight numbers a token and layer; the windowed layer keeps three tokens. Two bytes each, or one."""
    bill = cost.cache(SPEC, 5, "bf16")
    assert (bill.per_token, bill.unbounded, bill.window, bill.expanded) == (32, 16, 48, 32)
    assert bill.at_seq == 5 * 16 + 3 * 16
    assert (bill.fixed, bill.per_source_token) == (0, 0)
    assert cost.cache(SPEC, 2, "bf16").at_seq == 2 * 32
    assert cost.cache(SPEC, 5, "fp8").at_seq == 64
    assert cost.cache(SPEC, 5, "int4").at_seq == 32
    with pytest.raises(InputError, match="not a format for caches"):
        cost.cache(SPEC, 5, "q4_k")


# Bytes that a layer keeps of 10 tokens with 8 numbers (160 in 16 bits): inputs of norms, and a float32 of each token;
# of attention what it reads, queries, keys and values (half as wide), what it mixed, and a float32 for each head and
# token; of the feed-forward part what it reads, and four of its width.
NORM, MIXER = 160 + 40, 160 + 160 + 80 + 80 + 160 + 160
NARROW, WIDE = 2 * NORM + MIXER + 160 + 4 * 240, 2 * NORM + MIXER + 160 + 4 * 400
OUTSIDE = (
    10 * 8 + 40 + 50 + NORM + 160
)  # token numbers, rotary tables, a mask of 5 x 5, the last norm, the head's input


def test_saved() -> None:
    bill = cost.saved(SPEC, RUN)
    assert bill.all == NARROW + WIDE + OUTSIDE == 5810
    assert bill.block == WIDE == 2960
    assert bill.checkpointed == 2 * 160 + OUTSIDE
    # made again: what attention and the feed-forward part read, two of four of the width
    assert bill.selective == bill.all - (160 + 160 + 2 * 240) - (160 + 160 + 2 * 400)
    assert bill.loss == 110 * 4 + 10 * 8 + 4  # log-probabilities in float32, targets in int64, their weight
    assert cost.logits_bytes(SPEC, RUN) == 10 * 11 * 2
    assert cost.logits_bytes(SPEC, replace(RUN, logits="last")) == 2 * 11 * 2
    assert cost.logits_bytes(SPEC, replace(RUN, logits="pooled")) == 0
    assert cost.saved(replace(SPEC, blocks=SPEC.blocks[:1]), RUN).block == NARROW


def test_moved_and_folded() -> None:
    """One step of three sequences after four tokens: matrices once, three rows of the table, 5 and 3 tokens each."""
    run = Pass(tokens=1, batch=3, past=4)
    moved = cost.moved(SPEC, run, "bf16", "fp8")
    assert {kind: n for kind, n in moved.weights.items() if n} == {
        "attention": 768,
        "ffn": 2 * FFN,
        "norm": 80,
        "head": 176,
    }
    assert (moved.lookups, moved.cache, moved.total) == (3 * 8 * 2, 3 * (5 + 3) * 8, 768 + 1536 + 80 + 176 + 48 + 192)
    assert cost.moved(SPEC, run, "fp32", "bf16").total == 2 * (moved.total - moved.lookups) + 2 * moved.lookups
    assert cost.weight_bytes(SPEC, "bf16") == 2736
    assert cost.weight_bytes(SPEC, "int4") == 684
    steps = Folded(tree(SPEC, SPEC), lambda path, weight, owner: Fraction(2 * weight.size)).step(run, 1)
    assert sum(step.nbytes for step in steps.values()) == moved.total
    assert sum(step.products for step in steps.values()) == 2 * (2 * ATTENTION + FFN + HEAD) * 3
    assert sum(step.scores for step in steps.values()) == 3 * 32 * (5 + 3)  # the keys that are kept
    assert sum(step.scores_causal for step in steps.values()) == 3 * 32 * (5 + 3)


def test_a_cache_that_two_layers_read_is_held_once_and_read_twice() -> None:
    def lent(path: str, part: Part) -> Part:
        if not isinstance(part, Attention):
            return part
        return (
            replace(part, kv_from="lent") if ".2." in path else replace(part, kv_name="lent" if ".1." in path else None)
        )

    spec = transform(decoder(d_model=8, n_layers=3, n_heads=2, n_kv_heads=1, d_ff=8, n_vocab=11), lent)
    layer = 2 * 4 * 2  # k and v of one head of 4, in bf16
    assert cost.cache(spec, 5, "bf16").at_seq == 5 * 2 * layer
    run = Pass(tokens=1, batch=3, past=4)
    assert cost.moved(spec, run, "bf16", "bf16").cache == 3 * 5 * 3 * layer
    steps = Folded(tree(spec, spec), lambda path, weight, owner: Fraction(2 * weight.size)).step(run, 2)
    assert sum(step.cache for step in steps.values()) == 3 * 5 * 3 * layer


def test_a_tied_table_is_read_whole_and_looked_up() -> None:
    moved = cost.moved(_one(12, tied=True), Pass(tokens=1, batch=3, past=4), "bf16", "bf16")
    assert (moved.weights["head"], moved.weights["embedding"], moved.lookups) == (176, 0, 48)


def test_experts() -> None:
    """Four experts of which each token takes two: of one token half is read, of n tokens 1 - (1/2)^n are."""
    spec = mixtral.FAMILY.build(
        router=Router(d_model=8, n_experts=4, top_k=2),
        n_vocab=11,
        d_model=8,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        d_ff=12,
        max_positions=32,
        rotary=Rotary(d_rotary=2),
        tied=False,
        name="tiny",
    )
    experts = 4 * 3 * 8 * 12
    rest = 88 + ATTENTION + 24 + 88 + 4 * 8
    assert cost.total_parameters(spec) == experts + rest
    assert cost.active_parameters(spec) == experts // 2 + rest
    assert cost.active_parameters(spec, tables=False) == experts // 2 + rest - 88
    assert cost.moved(spec, Pass(tokens=1), "bf16", "bf16").weights["ffn"] == experts // 2 * 2
    assert cost.moved(spec, Pass(tokens=1, batch=3), "bf16", "bf16").weights["ffn"] == experts * 2 * 7 // 8
    assert cost.flops(spec, Pass(tokens=1)).products == 2 * (ATTENTION + experts // 2 + 32 + 88)


def test_rows() -> None:
    rows = {row.path: row for row in cost.rows(SPEC, RUN, "bf16")}
    assert len(rows) == 11
    body = rows["blocks.1.attention.body"]
    assert (body.part, body.kind, body.parameters, body.count) == ("Attention", "attention", 192, 1)
    assert body.flops_per_token == 2 * 192 + 32 * 5  # full scores
    assert body.cache_bytes_per_token == 16
    assert (rows["blocks.0.ffn.body"].flops_per_token, rows["blocks.1.ffn.body"].flops_per_token) == (576, 960)
    twice = cost.rows(replace(SPEC, blocks=(SPEC.blocks[0],) * 3), RUN, "fp8")
    assert [(row.path, row.count, row.cache_bytes_per_token) for row in twice if row.kind == "attention"] == [
        ("blocks.0-2.attention.body", 3, 8)
    ]
    width = SPEC.d_model
    latent = LatentAttention(
        d_model=width, n_heads=2, kv_rank=5, d_nope=3, d_rope=4, d_value=3, positions=Rotary(d_rotary=4)
    )
    block = Block(branches=(Branch(name="attention", body=latent),))
    halves = [row.cache_bytes_per_token for row in cost.rows(replace(SPEC, blocks=(block,)), RUN, "int4")]
    assert max(halves) == 5  # 5 + 4 numbers of half a byte, rounded up


ALIASES = {
    "float64": 8,
    "double": None,
    "float32": 4,
    "f32": 4,
    "bfloat16": 2,
    "float16": 2,
    "f16": 2,
    "half": 2,
    "float8": 1,
    "FP64": 8,
    "fp32": 4,
    "BF16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
}


@pytest.mark.parametrize(("name", "nbytes"), ALIASES.items())
def test_names_of_formats(name: str, nbytes: float | None) -> None:
    if nbytes is None:
        with pytest.raises(InputError, match="unknown dtype"):
            cost.dtype(name)
    else:
        assert cost.dtype(name).block_bytes == nbytes
        assert cost.weight_bytes(SPEC, name) == 1368 * nbytes


def test_whole_numbers_stay_whole() -> None:
    assert cost.exact(Fraction(6, 3)) == 2
    assert isinstance(cost.exact(Fraction(6, 3)), int)
    assert cost.exact(Fraction(1, 4)) == 0.25
