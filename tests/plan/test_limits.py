"""Backwards, of the model and machine of test_serving_by_hand.py: cards, counts and what to change, as literals.

9,000,000 bytes are there for weights of 650,368, activations of 49,920 and a workspace of 50,000: 8,249,712 are left
for users of 100 tokens, 86,016 + 10,000 each: 85. On two devices, tp 2, 8,590,704 for 53,008 each: 162.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from test_serving_by_hand import CONVENTIONS, DENSE, MACHINE, US, ask

from asbuilt import InputError
from asbuilt.catalog.machine import Machine
from asbuilt.plan import ServePlan, serve
from asbuilt.plan.serve import limits
from asbuilt.spec import Head, TokenEmbedding

TWICE = replace(MACHINE, name="twice", memory_gb=0.02)


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The cards that there are, the least memory first; none until a test puts some in."""
    cards: list[Machine] = []
    monkeypatch.setattr(limits, "_by_memory", lambda _: cards)
    return cards


def suggested(plan: ServePlan) -> list[tuple[str, str, bool, int]]:
    return [(s.change, s.option, s.fits, s.users) for s in plan.suggestions]


def options(plan: ServePlan) -> list[str]:
    return [s.option for s in plan.suggestions]


def test_every_suggestion(catalogue: list[Machine]) -> None:
    """One user too many, in this order.

    A cache in 8 bits: 8,249,712 / 53,008. Weights in 8 bits: 196,608 numbers of matrices with a scale of four bytes for
    16,384 of them, and 257,152 bytes in bf16: 453,808; so 8,446,272 / 96,016 and / 53,008. In 4 bits: 98,304, and 2.5
    bytes for 128 numbers, 3,840: 359,296; 8,540,784 / 96,016 and / 53,008. A card of 20 MB: 17,249,712 / 96,016. Each
    of 86 users has room for 6 pages: 73,728 + 10,000 bytes.
    """
    catalogue += [MACHINE, TWICE]
    plan = ask(users=86, prompt=None)
    assert not plan.fits
    assert suggested(plan) == [
        ("cache in 8 bits", "--kv-dtype fp8", True, 155),
        ("weights in 8 bits", "--dtype fp8:128", True, 87),
        ("weights in 8 bits, cache in 8", "--dtype fp8:128 --kv-dtype fp8", True, 159),
        ("weights in 4 bits", "--dtype int4:128", True, 88),
        ("weights in 4 bits, cache in 8", "--dtype int4:128 --kv-dtype fp8", True, 161),
        ("2 devices: tp 2, pp 1", "--gpus 2", True, 162),
        ("one twice", "--gpu twice", True, 179),
        ("at most 96 tokens", "--context 96", True, 98),
        ("at most 85 users", "--users 85", True, 85),
    ]
    assert plan.suggestions[0].effect == "weights 0.0 GB a device, 155 users of 100 tokens"
    assert plan.suggestions[7].effect == "weights 0.0 GB a device, 98 users of 96 tokens"
    assert (plan.smallest_card, plan.smallest_count) == ("twice", 2)
    catalogue.clear()
    assert suggested(ask(users=86, prompt=None)) == [row for row in suggested(plan) if row[1] != "--gpu twice"]


def test_what_suffices_comes_before_what_does_not(catalogue: list[Machine]) -> None:
    """Of 160 users weights in 8 bits hold 87, a cache in 8 bits 155, and both 159."""
    found = suggested(ask(users=160, prompt=None))
    assert [option for _, option, fits, _ in found if fits] == [
        "--dtype int4:128 --kv-dtype fp8",
        "--gpus 2",
        "--context 48",
        "--users 85",
    ]
    assert [option for _, option, fits, _ in found if not fits] == [
        "--kv-dtype fp8",
        "--dtype fp8:128",
        "--dtype fp8:128 --kv-dtype fp8",
        "--dtype int4:128",
    ]
    assert sorted((fits for *_, fits, _ in found), reverse=True) == [fits for *_, fits, _ in found]


def test_weights_that_just_fit_and_those_that_do_not(catalogue: list[Machine]) -> None:
    """All but 453,808 bytes are taken by the overhead: in 8 bits nothing is left; in 4, 94,512: a user of 86,016."""
    plan = ask(users=1, conventions=replace(CONVENTIONS, overhead=9_000_000 - 453_808))
    effects = {s.option: (s.fits, s.users, s.effect) for s in plan.suggestions}
    assert effects["--kv-dtype fp8"] == (False, 0, "weights 0.0 GB a device: still does not fit")
    assert effects["--dtype fp8:128"] == (False, 0, "weights 0.0 GB a device, 0 users of 100 tokens")
    assert effects["--dtype int4:128"] == (True, 1, "weights 0.0 GB a device, 1 users of 100 tokens")


def test_each_stage_has_to_hold_its_weights(catalogue: list[Machine]) -> None:
    """The first of two stages has 325,120 bytes, the second 325,248."""
    for overhead, told in ((8_674_752, "0 users of 100 tokens"), (8_674_753, "still does not fit")):
        plan = ask(pp=2, users=1, conventions=replace(CONVENTIONS, overhead=overhead))
        assert told in {s.option: s.effect for s in plan.suggestions}["--kv-dtype fp8"]


def test_weights_that_get_hardly_narrower_are_not_suggested(catalogue: list[Machine]) -> None:
    """Of tables of 5,120,000 bytes and 394,368 of all else 8 bits save 196,560, 3.6%, and 4 bits 291,072, 5.3%."""
    spec = replace(DENSE, embedding=TokenEmbedding(n_vocab=20_000, d_model=64), head=Head(d_model=64, n_vocab=20_000))
    found = options(ask(spec, users=1000))
    assert "--dtype int4:128" in found
    assert not any("fp8:128" in option for option in found)


def test_one_user_is_suggested_where_one_fits(catalogue: list[Machine]) -> None:
    """149,712 bytes are left for users of 96,016."""
    plan = serve(DENSE, replace(MACHINE, memory_gb=0.001), context=100, chunk=32, users=2, conventions=CONVENTIONS)
    assert ("at most 1 users", "--users 1", True, 1) in suggested(plan)


def test_one_token_is_suggested_where_one_fits(catalogue: list[Machine]) -> None:
    """740 users of one token take 768 + 10,000 bytes each, of two 11,536, of which there are less than 720."""
    plan = ask(users=740, context=100, prompt=None, conventions=replace(CONVENTIONS, page=False))
    assert "--context 1" in options(plan)


@pytest.mark.parametrize(("prompt", "told"), [(96, True), (97, False)])
def test_no_shorter_context_than_the_prompt(catalogue: list[Machine], prompt: int, told: bool) -> None:
    assert ("--context 96" in options(ask(users=86, prompt=prompt))) == told


def test_as_many_devices_are_no_change(catalogue: list[Machine]) -> None:
    """Two stages hold 161 users, and two devices that share each layer 162."""
    plan = ask(pp=2, users=162)
    assert (plan.fits, plan.smallest_count) == (False, 2)
    assert not any("--gpus" in option for option in options(plan))


def test_the_same_card_is_no_change(catalogue: list[Machine]) -> None:
    """Over a link of 1 MB/s eight devices take 9 ms a step, and one alone 1 ms."""
    catalogue += [MACHINE]
    plan = ask(tp=8, latency_target=0.002, conventions=replace(CONVENTIONS, network=1e6))
    assert (plan.fits, plan.smallest_card, plan.smallest_count) == (False, "small", 1)
    assert not any("--gpu" in option for option in options(plan))


COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_the_fewest_devices_of_each_number_tried() -> None:
    """Exactly as many users as so many devices hold need no more, and one user more the next number."""
    held = [serve(DENSE, MACHINE, context=100, chunk=32, gpus=count, conventions=CONVENTIONS).users for count in COUNTS]
    assert held[:2] == [85, 162]
    found: list[int | None] = []
    for many in held:
        assert many is not None
        found += [ask(users=users).smallest_count for users in (many, many + 1)]
    ends: Sequence[int | None] = (*COUNTS[1:], None)
    assert found == [count for pair in zip(COUNTS, ends, strict=True) for count in pair]


def test_what_just_meets_a_target_meets_it() -> None:
    """A step of five takes 1,000.448 us and a prompt of 100 tokens 12,299.008."""
    plan = ask()
    assert plan.decode is not None
    step, first = plan.decode.seconds_per_step, plan.prefill.seconds
    assert (step / US, first / US) == (pytest.approx(1_000.448), pytest.approx(12_299.008))
    met = ask(latency_target=step, first_token_target=first)
    assert (met.fits, met.users, met.smallest_count) == (True, 5, 1)
    assert met.targets == {"time per token": True, "time to first token": True}
    for one, other, targets in (
        (step * (1 - 1e-9), first, {"time per token": False, "time to first token": True}),
        (step, first * (1 - 1e-9), {"time per token": True, "time to first token": False}),
    ):
        missed = ask(latency_target=one, first_token_target=other)
        assert (missed.fits, missed.targets) == (False, targets)
    assert ask(first_token_target=first).users == 85
    assert ask(first_token_target=first * (1 - 1e-9)).users == 0


LAST: list[dict[str, Any]] = [
    {"context": 1_000_000_000, "prompt": 1},
    {"users": 1_000_000_000},
    {"chunk": 1_000_000_000},
    {"prompt": 100},
    {"prompt": 1},
    {"bandwidth_efficiency": 1},
    {"compute_efficiency": 1},
    {"latency_target": 1e-9},
    {"chunk": 1},
    {"first_token_target": 0.5},
    {"users": 1},
    {"bandwidth_efficiency": 0.5},
    {"compute_efficiency": 0.5},
]
BEYOND: list[dict[str, Any]] = [
    {"context": 1_000_000_001, "prompt": 1},
    {"users": 1_000_000_001},
    {"chunk": 1_000_000_001},
    {"prompt": 101},
    {"prompt": 0},
    {"context": True, "prompt": 1},
    {"users": 2.0},
    {"bandwidth_efficiency": 1.01},
    {"compute_efficiency": 1.01},
    {"bandwidth_efficiency": 0},
    {"latency_target": 0},
    {"latency_target": -1.0},
    {"first_token_target": 0.0},
    {"first_token_target": float("inf")},
    {"users": 0},
    {"chunk": 0},
]


@pytest.mark.parametrize("asked", LAST, ids=str)
def test_the_last_that_may_be_asked(asked: dict[str, Any]) -> None:
    assert ask(**asked).weight_bytes == 650_368


@pytest.mark.parametrize("asked", BEYOND, ids=str)
def test_the_first_that_may_not(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        ask(**asked)
    assert refused.value.field == next(iter(asked))
