"""From the card to the users, at the edges: rounding, what just fits, pages of windows, and models without a cache.

The model and the machine are those of test_serving_by_hand.py: weights of 650,368 bytes, 768 bytes of cache a token,
10,000 of logits a sequence; of 10 MB a tenth is left alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from formulas import worked_out
from test_serving_by_hand import CONVENTIONS, DENSE, MACHINE, SPARSE, ask, bytes_of

from asbuilt.catalog.machine import Machine
from asbuilt.plan import Conventions, ServePlan, serve
from asbuilt.plan.precision import cache_bytes, precision
from asbuilt.plan.serve.pages import Layout, held_tokens
from asbuilt.spec import Attention, Block, Branch, GatedMLP, LatentAttention, Model, RMSNorm
from asbuilt.spec.part import Remembered


def given(**switches: Any) -> ServePlan:  # noqa: ANN401
    return ask(conventions=replace(CONVENTIONS, **switches))


def test_part_of_a_byte_is_one() -> None:
    """9,000,000 - 650,368 - 178,112 bytes are those of 95 users of 86,016; half a byte less is one user less."""
    assert given(overhead=178_112).users == 95
    assert given(overhead=178_112.5).users == 94
    assert bytes_of(given(overhead=100_000.5))["overhead"] == 100_001
    assert bytes_of(given(workspace=50_000.5))["graphs and workspace"] == 50_001
    assert bytes_of(given(reserve=0.5))["reserve"] == 1_000_001


@pytest.mark.parametrize(("reserve", "users"), [(35_543, 86), (40_344, 86), (40_345, 85), (45_145, 85)])
def test_users_are_rounded_at_the_half(reserve: int, users: int) -> None:
    """8,249,712 bytes less what is kept free are 85.55, 85.500003, 85.49999 and 85.45 times 96,016."""
    assert given(reserve=reserve, count="nearest").users == users


def test_nothing_left_is_not_too_little() -> None:
    """10,000,000 - 1,000,000 - 650,368 = 8,349,632 bytes."""
    notes = []
    for overhead in (8_349_632, 8_349_633):
        plan = given(overhead=overhead)
        assert (plan.users, plan.kv_budget_bytes) == (0, 0)
        notes.append(plan.ladder[-1].note)
    assert notes == ["", "negative: it does not fit"]


def test_pages_are_whole() -> None:
    assert bytes_of(ask(context=101, prompt=101))["cache per user"] == 7 * 16 * 768
    assert bytes_of(ask(context=113, prompt=113))["cache per user"] == 8 * 16 * 768
    single = ask(context=101, prompt=101, conventions=replace(CONVENTIONS, page=False))
    assert bytes_of(single)["cache per user"] == 101 * 768
    assert next(line.note for line in single.counted) == "101 tokens, no pages"
    ones = ask(context=101, prompt=101, conventions=replace(CONVENTIONS, block_size=1))
    assert bytes_of(ones)["cache per user"] == 101 * 768
    assert bytes_of(ask(context=101, prompt=101, kv_dtype="int4"))["cache per user"] == 7 * 16 * 192


@pytest.mark.parametrize("block", [1, 2, 7, 16])
def test_pages_of_a_window(block: int) -> None:
    """The most pages that the last tokens lie on, wherever the sequence ends."""
    for window in range(2, 40):
        for tokens in (1, 5, 16, 17, 100, 300):
            ends = range(1, tokens + 1) if tokens < 100 else range(tokens - 2 * block, tokens + 1)
            lie = [{token // block for token in range(max(0, end - window), end)} for end in ends]
            kept = Remembered(name="k", shape=(3,), window=window)
            most = max(map(len, lie)) * block if block > 1 else min(window, tokens)
            assert held_tokens(kept, tokens, Layout(block=block)) == most, (window, tokens)
            pages = -(-tokens // block)
            assert held_tokens(kept, tokens, Layout(block=block, whole=True)) == pages * block
    state = Remembered(name="state", shape=(3,), window=1)
    always = Remembered(name="k", shape=(3,))
    for whole in (False, True):
        assert held_tokens(state, 100, Layout(block=block, whole=whole)) == 1  # which is no window
        assert held_tokens(always, 100, Layout(block=block, whole=whole)) == -(-100 // block) * block


NOTHING_CACHED = replace(
    DENSE,
    blocks=(
        Block(
            branches=(Branch(name="ffn", norm=RMSNorm(d=64), body=GatedMLP(d_model=64, d_ff=160, activation="silu")),)
        ),
    )
    * 4,
)


def test_without_a_cache() -> None:
    """Logits alone limit the users; with those in the overhead nothing does, and a thousand million are the most.

    Weights: tables of 256,000 bytes, 4 layers of 61,440 + 128, the last norm's 128: 502,400. Activations of 32 tokens:
    positions 256; the stream, and that normed, 2 x 4,096; in feed-forward 32 x 2 x (3 x 160 + 64) = 34,816.
    """
    plan = ask(NOTHING_CACHED)
    found = bytes_of(plan)
    assert (found["weights"], found["activations"]) == (502_400, 43_264)
    assert found["cache per user"] == 0
    assert plan.users == (9_000_000 - 502_400 - 43_264 - 50_000) // 10_000 == found["users that fit"]
    assert "cache tokens" not in found
    assert plan.cache_tokens == 0
    for overhead, users in ((8_497_600, 1_000_000_000), (8_497_601, 0)):
        endless = ask(NOTHING_CACHED, replace(CONVENTIONS, overhead=overhead))
        assert endless.users == users
        assert [line.name for line in endless.counted] == ["cache per user"]


def test_the_stage_with_the_least_left_is_shown() -> None:
    """Of two stages of 325,120 and 325,248 bytes neither has room for a user."""
    plan = ask(pp=2, conventions=replace(CONVENTIONS, reserve=8_650_000))
    assert plan.users == 0
    assert bytes_of(plan)["weights"] == 325_248


def test_notes_of_weights_and_activations() -> None:
    notes = {line.name: line.note for line in ask(tp=2, dtype="int4:128", context=32, prompt=32).ladder}
    assert notes["weights"].startswith("one device of tp 2, pp 1, ep 1; attention and feed-forward")
    assert notes["activations"] == "prefilling 32 tokens at once, in bf16"
    assert {line.name: line.note for line in ask().ladder}["activations"].startswith(
        "prefilling 32 tokens at once after 68,"
    )


def test_scores_are_kept_by_a_library_s_kernel_alone() -> None:
    """Capped scores of 32 x 100 pairs in 8 heads, ten bytes each; an engine's fused kernel has none of them.

    Beside them positions 256, the stream and that normed 2 x 4,096, q, k and v 12,288. Without them what is mixed, and
    the result, are the most: 6,144 + 4,096.
    """
    attention = Attention(d_model=64, n_heads=8, n_kv_heads=4, d_head=12, softcap=30.0)
    blocks = (Block(branches=(Branch(name="attention", norm=RMSNorm(d=64), body=attention),)),)
    engine, library = (
        bytes_of(ask(replace(DENSE, blocks=blocks), replace(CONVENTIONS, kernel=kernel)))["activations"]
        for kernel in ("engine", "library")
    )
    assert library == 256 + 8_192 + 12_288 + 32 * 100 * 8 * 10
    assert engine == 256 + 8_192 + 12_288 + 10_240


def test_half_a_byte_of_a_cache_is_one() -> None:
    """Of 3 layers 13 + 6 numbers a token, in 4 bits: 28.5 bytes."""
    attention = LatentAttention(d_model=64, n_heads=4, kv_rank=13, d_nope=10, d_rope=6, d_value=8)
    block = Block(branches=(Branch(name="attention", norm=RMSNorm(d=64), body=attention),))
    plan = ask(
        replace(DENSE, blocks=(block,) * 3), replace(CONVENTIONS, block_size=1), context=1, prompt=1, kv_dtype="int4"
    )
    assert plan.caches is not None
    assert (plan.caches.minimum, plan.caches.object, plan.caches.paged) == (29, 114, 29)
    assert bytes_of(plan)["cache per user"] == 29
    assert plan.decode is not None
    assert next(c.cache for c in plan.decode.run.components if c.kind == "attention") == 5 * 29 - 2  # 142.5


DERIVED: list[tuple[Model, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}, {"count": "nearest", "reserve": 35_543}),
    (DENSE, {"pp": 2}, {"count": "nearest"}),
    (DENSE, {"tp": 8, "gpus": 16}, {"page": False}),
    (DENSE, {}, {"overhead": 1e5}),
    (DENSE, {"kv_dtype": "int4"}, {"utilisation": 0.8, "flops": "2n"}),
    (SPARSE, {"tp": 1, "ep": 4}, {"windows": "full", "embedding": "read", "scores": "full"}),
    (NOTHING_CACHED, {}, {}),
]


@pytest.mark.parametrize(("spec", "asked", "switches"), DERIVED, ids=lambda x: "" if isinstance(x, Model) else str(x))
@pytest.mark.parametrize("memory", ["process", "reported", "vendor", "binary"])
def test_derivations_by_every_convention(
    spec: Model,
    asked: dict[str, Any],
    switches: dict[str, Any],
    memory: Any,  # noqa: ANN401
) -> None:
    """Each line's formula gives its value, on machines of which more and less is known."""
    for known in (
        {},
        {"reported_gib": 0.0095},
        {"reported_gib": 0.0095, "process_gib": 0.009, "process_source": "told"},
    ):
        machine = replace(MACHINE, source="sheet", **known)
        plan = serve(
            spec,
            machine,
            context=100,
            users=5,
            chunk=32,
            conventions=replace(CONVENTIONS, memory=memory, **switches),
            **asked,
        )
        for line in plan.lines:
            assert worked_out(line) == pytest.approx(line.value, rel=1e-9), line
        first = plan.ladder[0]
        assert first.source == ("told" if memory == "process" and "process_gib" in known else "sheet")
        assert ("reported by the driver" in first.note) == ("reported_gib" in known)


def test_memory_by_convention() -> None:
    """Of a card sold as 10 MB: what a process is told, else what is reported, else the vendor's number."""
    known = Machine(
        name="m", memory_gb=0.01, reported_gib=0.0095, process_gib=0.009, bandwidth=1e9, rates={"bf16": 4e9}
    )
    for machine, found in (
        (known, (9_663_676, 10_200_547, 10_000_000, 10_737_418)),
        (replace(known, process_gib=None), (10_200_547, 10_200_547, 10_000_000, 10_737_418)),
        (replace(known, process_gib=None, reported_gib=None), (10_000_000, 10_000_000, 10_000_000, 10_737_418)),
    ):
        made = [
            serve(DENSE, machine, context=100, conventions=Conventions(memory=memory)).ladder[0].value
            for memory in ("process", "reported", "vendor", "binary")
        ]
        assert tuple(made) == found


@pytest.mark.parametrize(
    ("name", "nbytes", "activation", "compute"),
    [
        ("fp64", 8, "fp64", "fp64"),
        ("fp32", 4, "fp32", "fp32"),
        ("bf16", 2, "bf16", "bf16"),
        ("fp16", 2, "fp16", "fp16"),
        ("fp8", 1, "bf16", "fp8"),
        ("int8", 1, "bf16", "bf16"),
        ("int4", 0.5, "bf16", "bf16"),
    ],
)
def test_what_is_multiplied_in_what(name: str, nbytes: float, activation: str, compute: str) -> None:
    held = precision(name)
    assert (held.name, held.activation, held.compute) == (name, activation, compute)
    assert cache_bytes(name) == nbytes
    assert isinstance(cache_bytes(name), int) == (nbytes >= 1)  # sums of whole numbers are fast
    grouped = precision("FP8:8")
    assert (grouped.name, grouped.activation, grouped.compute) == ("fp8:8", "bf16", "fp8")
    assert precision("int4:8").compute == precision("int8:8").compute == precision("q4_k").activation == "bf16"
