"""Workloads: what is refused, what more requests, shares, drafts and prices change, and the cheapest layout."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asbuilt.catalog import machines
from asbuilt.catalog.quantities import parse_per_time, parse_price, parse_tokens
from asbuilt.errors import InputError
from asbuilt.plan.serve import workload as module
from asbuilt.plan.serve.ask import serve
from asbuilt.plan.serve.curve import Curve
from asbuilt.plan.serve.limits import least
from asbuilt.plan.serve.money import Price
from asbuilt.plan.serve.plan import ServePlan
from asbuilt.plan.serve.search import search
from asbuilt.plan.serve.workload import Served, Workload, read_lengths

SEED = random.SystemRandom().randrange(2**31)
USUAL = Workload(lengths=((2000, 300),), rate=5.0, requests=400)


def served(workload: Workload, model: str = "llama-3-8b", gpu: str = "h100-sxm", **options: object) -> Served:
    plan = serve(model, gpu, workload=workload, **options)  # type: ignore[arg-type]
    assert plan.served is not None
    found = plan.served["middle"]
    assert found is not None
    return found


def test_one_seed_gives_one_answer_and_another_seed_another() -> None:
    workload = replace(USUAL, lengths=((2000, 300), (100, 20)), seed=SEED)
    assert served(workload) == served(workload)
    assert served(workload) != served(replace(workload, seed=SEED + 1))


@pytest.mark.parametrize("change", ["prefix", "drafts", "copies", "faster"])
def test_what_saves_work_saves_time(change: str) -> None:
    before = served(replace(USUAL, rate=9.0))
    workload, gpus = replace(USUAL, rate=9.0), 1
    if change == "prefix":
        workload = replace(workload, prefix_share=0.75)
    if change == "drafts":
        workload = replace(workload, drafts=3, acceptance=0.8)
    if change == "copies":
        gpus = 2
    after = served(workload, gpu="h200" if change == "faster" else "h100-sxm", gpus=gpus, tp=1, pp=1)
    assert after.request.median < before.request.median
    assert after.requests_per_second == pytest.approx(before.requests_per_second, rel=0.2)


def test_drafts_save_steps_by_the_expected_number_of_tokens() -> None:
    """Memory-bound, a step verifies four tokens in the time of one and gives 1 + p + p^2 + p^3 (arXiv 2211.17192)."""
    accepted = random.Random(SEED).uniform(0.3, 0.9)
    gpu = "memory=80GB,bandwidth=1TB/s,bf16=100000T"
    alone = Workload(lengths=((1, 2000),), users=1, requests=10)
    drafted = replace(alone, drafts=3, acceptance=accepted)
    slow, fast = served(alone, gpu=gpu), served(drafted, gpu=gpu)
    assert slow.per_token is not None
    assert fast.per_token is not None
    gives = (1 - accepted**4) / (1 - accepted)
    assert slow.per_token.median / fast.per_token.median == pytest.approx(gives, rel=0.01), SEED
    paid = served(replace(drafted, draft_cost=0.1), gpu=gpu)
    assert paid.per_token is not None
    assert paid.per_token.median == pytest.approx(1.3 * fast.per_token.median, rel=1e-6)


def test_a_shared_prefix_is_neither_computed_nor_stored_again() -> None:
    whole = Workload(lengths=((4000, 10),), users=1, requests=10)
    half = replace(whole, prefix_share=0.5)
    a, b = served(whole), served(half)
    after = serve("llama-3-8b", "h100-sxm", context=4010).roofline.judged
    rest = after.prefill(4000).seconds - after.prefill(2000).seconds
    assert b.first_token.median == pytest.approx(rest, rel=0.05)
    assert b.cache_most < 0.6 * a.cache_most


def test_an_overloaded_machine_does_not_keep_the_rate_up() -> None:
    plan = serve("llama-3-8b", "l4", workload=replace(USUAL, rate=20.0))
    assert not plan.fits
    assert plan.targets == {"the workload's rate": False}
    assert serve("llama-3-8b", "h100-sxm", workload=USUAL).fits


def test_tokens_per_second_are_requests_times_lengths() -> None:
    drawn = random.Random(SEED)
    lengths = tuple((drawn.randint(1, 3000), drawn.randint(1, 300)) for _ in range(5))
    workload = Workload(lengths=lengths, rate=3.0, requests=3000, seed=SEED)
    found = served(workload)
    assert found.requests_per_second == pytest.approx(3, rel=0.1), SEED
    got = (found.input_tokens_per_second, found.output_tokens_per_second)
    for tokens, mean, each in zip(got, workload.mean, zip(*lengths, strict=True), strict=True):
        chance = 1e-6 + 5 * statistics.pstdev(each) / mean / math.sqrt(3000)  # standard errors of so many drawn lengths
        assert tokens == pytest.approx(found.requests_per_second * mean, rel=chance), SEED


def test_the_cost_of_both_kinds_of_tokens_is_that_of_the_hours() -> None:
    plan = serve("llama-3-8b", "h100-sxm", gpus=2, tp=1, pp=1, workload=USUAL, price=2.5)
    assert plan.costs is not None
    assert plan.served is not None
    cost, found = plan.costs["middle"], plan.served["middle"]
    assert found is not None
    assert cost.million_input is not None
    assert cost.million_output is not None
    assert cost.hour == 5.0
    hour = cost.million_input * found.input_tokens_per_second + cost.million_output * found.output_tokens_per_second
    assert hour * 3600 / 1e6 == pytest.approx(5.0)
    idle = serve("llama-3-8b", "h100-sxm", users=8, price=Price(amount=3.0, currency="EUR")).costs
    assert idle is not None
    assert idle["middle"].million_output is not None
    step = serve("llama-3-8b", "h100-sxm", users=8).expected["middle"][1]
    assert step is not None
    assert idle["middle"].million_output == pytest.approx(3.0 / 3600 * step / 8 * 1e6)


def test_users_by_format_are_those_of_plans_in_these_formats() -> None:
    plan = serve("qwen3-8b", "h100-sxm", context=5000)
    assert len(plan.by_format) == 6
    for row in plan.by_format:
        for i, context in enumerate((4096, 5000, 8192, 32768)):
            other = serve("qwen3-8b", "h100-sxm", context=context, dtype=row.weights, kv_dtype=row.cache)
            assert (row.users[i], row.weight_bytes) == (other.users, other.weight_bytes)


def test_the_cheapest_layout_meets_the_targets_and_one_copy_less_does_not() -> None:
    workload = replace(USUAL, rate=30.0, requests=None)
    plan = serve("llama-3-8b", "h100-sxm", workload=workload, latency_target=0.03, first_token_target=0.5)
    found = search(plan.roofline, plan.asked.goal, plan.context)
    assert found
    assert [one.layout.gpus for one in found] == sorted(one.layout.gpus for one in found)

    def meets(plan: ServePlan) -> bool:
        return plan.fits

    for one in found:
        layout = one.layout
        options = {"tp": layout.tp, "pp": layout.pp, "workload": workload}
        options |= {"latency_target": 0.03, "first_token_target": 0.5}
        assert meets(serve("llama-3-8b", "h100-sxm", gpus=layout.gpus, **options)), one.options  # type: ignore[arg-type]
        if layout.copies > 1:
            fewer = layout.gpus - layout.per_copy
            assert not meets(serve("llama-3-8b", "h100-sxm", gpus=fewer, **options)), one.options  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", ["mi300x", "h100-sxm"])
def test_other_cards_are_of_one_vendor_unless_asked(gpu: str) -> None:
    plan, free = (serve("llama-3-8b", gpu, any_vendor=any_vendor) for any_vendor in (False, True))
    assert plan.smallest_card is not None
    assert free.smallest_card is not None
    one, other = machines.find(plan.smallest_card), machines.find(free.smallest_card)
    assert one.vendor == plan.machine.vendor
    assert other.memory_bytes() <= one.memory_bytes()


def test_least() -> None:
    for most in range(40):
        for first in range(1, 45):
            assert least(lambda n, first=first: n >= first, most) == (first if first <= most else None)


def test_a_curve_is_exact_where_it_is_straight_and_near_elsewhere() -> None:
    drawn = random.Random(SEED)
    kink, last = drawn.randint(50, 4000), drawn.randint(5000, 100_000)

    def function(x: int) -> tuple[float, float]:
        return 3.0 + 2 * x, 7.0 + min(x, kink)

    curve = Curve(function, last)
    assert len(curve.points) < 20
    for x in (drawn.randint(0, last) for _ in range(200)):
        assert curve.at(x) == pytest.approx(function(x), rel=2e-3), (SEED, x)
    straight = Curve(lambda x: (5.0 * x,), last)
    assert straight.points == [0, last]


def change(**fields: object) -> Callable[[], object]:
    return lambda: replace(USUAL, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "refused"),
    [
        ("rate, users", change(rate=None)),
        ("rate", change(rate=-1.0)),
        ("rate", change(rate=float("nan"))),
        ("users", change(users=0)),
        ("requests", change(requests=10**9)),
        ("prefix-share", change(prefix_share=1.0)),
        ("acceptance", change(drafts=2, acceptance=1.5)),
        ("acceptance, draft-cost", change(acceptance=0.5)),
        ("speculate", change(drafts=1000)),
        ("arrivals", change(arrivals="never")),
        ("lengths", change(lengths=())),
        ("input-tokens, output-tokens", change(lengths=((0, 5),))),
        ("input-tokens, output-tokens", change(lengths=((5, 10**12),))),
        ("price", lambda: Price(amount=0.0)),
        ("workload", lambda: serve("bert-base-uncased", "h100-sxm", workload=USUAL)),
        ("workload", lambda: serve("t5-small", "h100-sxm", workload=USUAL)),
        ("context", lambda: serve("llama-3-8b", "h100-sxm", context=2000, workload=USUAL)),
    ],
)
def test_refused(field: str, refused: Callable[[], object]) -> None:
    with pytest.raises(InputError) as error:
        refused()
    assert error.value.field == field


def test_lengths_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lengths"
    path.write_text("input_tokens,output_tokens\n2000,300\n\n7\t 9\n1 ; 2\n")
    assert read_lengths(path) == ((2000, 300), (7, 9), (1, 2))
    for text in (
        "",
        "\n\n",
        "input_tokens,output_tokens\n",
        "5 -3",
        "5 3 1",
        "5",
        "1.5 2",
        "0 3",
        "5 99999999999",
        "a b",
    ):
        path.write_text(text)
        with pytest.raises(InputError):
            read_lengths(path)
    path.write_bytes(bytes(range(256)))
    with pytest.raises(InputError):
        read_lengths(path)
    monkeypatch.setattr(module, "MOST_LENGTHS", 10)
    path.write_text("1 2\n" * 11)
    with pytest.raises(InputError):
        read_lengths(path)
    with pytest.raises(InputError):
        read_lengths(tmp_path / "missing")


def test_units() -> None:
    assert [parse_per_time(text, "rate") for text in ("5/s", "120/min", "7200 / h", "0.5/s")] == [5, 2, 2, 0.5]
    assert parse_price("$2.50/h", "price") == (2.5, "$")
    assert parse_price("2.5 EUR", "price") == (2.5, "EUR")
    assert parse_price("3", "price") == (3.0, "")
    assert [parse_tokens(text, "context") for text in ("8k", "128K", "1e3", "1.5e4")] == [8000, 131072, 1000, 15000]
    for parse, texts in (
        (parse_per_time, ("5", "-1/s", "0/s", "x", "5/parsec")),
        (parse_price, ("", "$", "$1$", "-2")),
    ):
        for text in texts:
            with pytest.raises(InputError):
                parse(text, "field")
