"""Expected times: published speeds lie in their range, targets are held against the middle, given efficiencies win."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from asbuilt import InputError
from asbuilt.catalog import machines
from asbuilt.checkpoint.source import open_model
from asbuilt.plan import Conventions, ServePlan, serve
from asbuilt.plan.serve.expected import ASSUMED, LEVELS, MINIMUM, SOURCES, machine_class
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.spec import Pass

SHARED = Path(__file__).parents[3] / "shared"
# The README beside the engine logs: sequences, tokens in and out, tokens/s.
LLAMA = [(64, 128, 128, 9193), (64, 128, 2048, 5367), (64, 2048, 128, 2058)]
QWEN = [(1, 200, 167.6), (1, 91_000, 70.7), (128, 200, 13_106)]


def in_batch(roofline: Roofline, users: int, prompt: int, output: int) -> float:
    """Output tokens/s of a batch that is prefilled at once and decoded together."""
    stage = roofline.capacity.device.stages[0]
    first = roofline.run(stage, Pass(tokens=prompt, batch=users, logits="last"), 1).seconds
    steps = sum(roofline.decode(users, prompt + i).seconds for i in range(1, output + 1))
    return users * output / (first + steps)


@pytest.mark.parametrize(("users", "prompt", "output", "published"), LLAMA)
def test_tensorrt_llm_of_llama(users: int, prompt: int, output: int, published: float) -> None:
    plan = serve("llama-1-7b", "h100-sxm", dtype="fp8", kv_dtype="fp8", context=2048, users=1)
    low, middle, high = (in_batch(plan.roofline.at(level), users, prompt, output) for level in LEVELS)
    assert low <= published <= high <= 2.5 * low
    assert low < middle < high < in_batch(plan.roofline, users, prompt, output)


@cache
def qwen() -> ServePlan | None:
    config = SHARED / "frontier" / "maxtext--qwen3_4b" / "config.json"
    return serve(open_model(str(config)).spec, "rtx-5090", context=200, users=1) if config.exists() else None


@pytest.mark.parametrize(("users", "context", "published"), QWEN)
def test_decoding_on_a_geforce(users: int, context: int, published: float) -> None:
    plan = qwen()
    if plan is None:
        pytest.skip("no ../shared/frontier here")
    low, _, high = (users / plan.roofline.at(level).decode(users, context).seconds for level in LEVELS)
    assert low <= published <= high <= 2.5 * low


@pytest.mark.parametrize("machine", ["h100-sxm", "rtx-4090", "m4-max", "epyc-9654", "mi300x", "tpu-v5p"])
@pytest.mark.parametrize("users", [1, 64])
def test_ranges_are_no_wider_than_two_and_a_half(machine: str, users: int) -> None:
    plan = serve("qwen3-8b", machine, dtype="bf16", users=users, context=4096, prompt=2048)
    (slow, slower), (first, step), (fast, faster) = (plan.expected[level] for level in LEVELS)
    assert None not in (slower, step, faster)
    assert plan.decode is not None
    assert plan.prefill.seconds < fast < first < slow <= 2.5 * fast
    assert plan.decode.seconds_per_step < (faster or 0) < (step or 0) < (slower or 0) <= 2.5 * (faster or 0)


def test_links_are_slower_too() -> None:
    plan = serve("llama-3-70b", "h100-sxm", tp=8, users=4)
    half = plan.roofline.at("middle").decode(4, plan.context).link_seconds
    assert plan.decode is not None
    assert half == pytest.approx(plan.decode.run.link_seconds / 0.55)


def test_weights_and_cache_are_read_at_their_own_shares() -> None:
    """By hand: bytes over 3.35 TB/s, of which 0.7 is reached in the middle; 0.45 and 0.45 at least, 0.92 and 0.9."""
    plan = serve("llama-3.1-8b", "h100-sxm", users=8, context=8192)
    assert plan.decode is not None
    weights = sum(c.weights + c.lookups for c in plan.decode.run.components)
    cached = sum(c.cache for c in plan.decode.run.components)
    for level, (read, kept) in zip(LEVELS, ((0.45, 0.45), (0.7, 0.7), (0.92, 0.9)), strict=True):
        expected = weights / (3.35e12 * read) + cached / (3.35e12 * kept)
        assert plan.expected[level][1] == pytest.approx(expected, rel=1e-9)


def test_targets_are_held_against_the_middle() -> None:
    floor, middle = 6e-3, 8e-3  # one step of one user takes 5.0 ms at least, and 7.1 expected
    plan = serve("llama-3.1-8b", "h100-sxm", users=1, context=8192, latency_target=floor)
    assert plan.targets == {"time per token": False}
    assert not plan.fits
    assert serve("llama-3.1-8b", "h100-sxm", users=1, context=8192, latency_target=middle).fits
    least = Conventions(targets="minimum")
    assert serve("llama-3.1-8b", "h100-sxm", users=1, context=8192, latency_target=floor, conventions=least).fits
    assert plan.document()["expected"]["judged_by"] == "expected"
    assert any("expected times" in str(cell) for table in plan.tables() for row in table.rows for cell in row)
    with pytest.raises(InputError, match=r"^targets: must be expected or minimum"):
        Conventions(targets="median")  # type: ignore[arg-type]


def test_given_efficiencies_are_what_is_expected() -> None:
    plan = serve("llama-3.1-8b", "h100-sxm", users=1, bandwidth_efficiency=0.8)
    assert plan.decode is not None
    assert {plan.expected[level][1] for level in LEVELS} == {plan.decode.seconds_per_step}
    assert plan.document()["expected"]["sources"] == {}


def test_every_class_is_assumed_and_sourced() -> None:
    assert {machine_class(machine) for machine in machines.MACHINES.values()} == {*ASSUMED}
    assert {*SOURCES} == {*MINIMUM.plain()}
    for levels in ASSUMED.values():
        for name in MINIMUM.plain():
            low, middle, high = (levels[level].plain()[name] for level in LEVELS)
            assert 0 < low < middle < high < 1
            assert high <= 2.5 * low
