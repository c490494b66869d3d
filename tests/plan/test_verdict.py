"""Whether a rate is kept up: queues worked out by hand, servers that are told, and plans of few requests."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from asbuilt.cli.main import cli
from asbuilt.plan.serve import serve
from asbuilt.plan.serve.plan import ServePlan
from asbuilt.plan.serve.report_workload import piled_up
from asbuilt.plan.serve.tandem import simulate
from asbuilt.plan.serve.verdict import LEAST, Delays, Verdict, growth, verdict
from asbuilt.plan.serve.workload import Served, Workload

SEED = random.SystemRandom().randrange(2**31)


def queue(servers: int, used: float, many: int, *, even: bool = False, seed: int = SEED) -> Delays:
    """The delays of requests that take one second on one of some servers, the first free one (Lindley 1952)."""
    drawn, rate = random.Random(seed), servers * used
    free, now = [0.0] * servers, 0.0
    arrived, waited = [], []
    for _ in range(many):
        now += 1 / rate if even else drawn.expovariate(rate)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + 1)
        arrived.append(now)
        waited.append(start - now)
    served = [wait + 1 for wait in waited]
    return Delays(rate=rate, arrived=arrived, waited=waited, whole=served, served=served)


def test_delays_grow_by_the_load_less_one() -> None:
    """Even arrivals at one server: the wait of request k is k (1 - 1 / load) seconds, k / load after the first."""
    load = random.Random(SEED).uniform(1.1, 9)
    found = queue(1, load, random.Random(SEED).randint(40, 400), even=True)
    slope, error = growth(found, found.waited)
    assert (slope, error) == (pytest.approx(load - 1, rel=1e-9), pytest.approx(0, abs=1e-6)), SEED
    assert verdict(found) == Verdict(kept=False)


@pytest.mark.parametrize("servers", [1, 8, 60])
def test_a_queue_is_told_from_what_only_varies(servers: int) -> None:
    drawn = random.Random(SEED)
    light, heavy = drawn.uniform(0.1, 0.6), drawn.uniform(1.5, 6)
    assert verdict(queue(servers, light, 4000)) == Verdict(kept=True), (SEED, light)
    assert verdict(queue(servers, heavy, 4000)) == Verdict(kept=False), (SEED, heavy)


@pytest.mark.parametrize("servers", [8, 60])
def test_few_requests_are_never_judged_wrong_where_the_load_is_clear(servers: int) -> None:
    drawn = random.Random(SEED)
    said: dict[str, set[bool | None]] = {"light": set(), "heavy": set()}
    for number in range(60):
        many, seed = drawn.randint(1, 20 * servers), SEED + number
        said["light"].add(verdict(queue(servers, drawn.uniform(0.1, 0.4), many, seed=seed)).kept)
        said["heavy"].add(verdict(queue(servers, drawn.uniform(2.5, 9), many, seed=seed)).kept)
    assert False not in said["light"], SEED
    assert True not in said["heavy"], SEED


def test_near_the_limit_few_requests_rarely_mislead() -> None:
    """Of 200 queues of 200 requests, loaded to 90 and to 120%, one or two are judged wrong; by sign alone, some 30."""
    drawn = random.Random(SEED)
    wrong = sum(verdict(queue(1, 0.9, 200, seed=drawn.randrange(2**31))).kept is False for _ in range(100))
    wrong += sum(verdict(queue(1, 1.2, 200, seed=drawn.randrange(2**31))).kept is True for _ in range(100))
    assert wrong <= 10, SEED


def test_while_servers_fill_nothing_is_known_and_the_number_said_is_enough() -> None:
    """Servers without end: none waits, and two thirds of the requests are there when the first leaves."""
    filling = random.Random(SEED).randint(60, 900)
    found = queue(filling, 0.5, filling // 2, even=True)
    few = verdict(found)
    assert few.kept is None
    assert few.enough is not None
    assert filling < few.enough < 1.5 * filling
    assert verdict(queue(filling, 0.5, few.enough, even=True)) == Verdict(kept=True)


def test_requests_that_cannot_be_held_at_once_pile_up() -> None:
    found = queue(500, 0.5, 50, even=True)
    assert verdict(found).kept is None
    assert verdict(replace(found, held=1.01)) == Verdict(kept=False)


def planned(workload: Workload, **options: object) -> ServePlan:
    return serve("smollm2-135m", "h100-sxm", workload=workload, **options)  # type: ignore[arg-type]


def middle(plan: ServePlan) -> Served:
    assert plan.served is not None
    found = plan.served["middle"]
    assert found is not None
    return found


@pytest.mark.parametrize(("load", "kept"), [(0.4, True), (3.0, False)])
@pytest.mark.parametrize("pools", [False, True])
def test_few_requests_of_a_plan_are_too_few_and_more_tell(*, load: float, kept: bool, pools: bool) -> None:
    drawn = random.Random(SEED)
    lengths = ((drawn.randint(500, 2000), drawn.randint(300, 600)),)
    devices = {"prefill_gpus": "1", "decode_gpus": "1"} if pools else {}
    full = middle(planned(Workload(lengths=lengths, users=300, requests=1500)))
    rate = load * full.requests_per_second
    workload = Workload(lengths=lengths, rate=rate, requests=LEAST - 1, seed=SEED)
    plan = planned(workload, **devices)
    found = middle(plan)
    assert found.sustained is None
    assert (plan.fits, plan.targets) == (False, {"the workload's rate": False})
    assert piled_up(plan) == (
        f"19 requests are too few to tell whether the rate is kept up: --requests {found.enough} would do"
    )
    for _ in range(6):
        if found.sustained is not None:
            break
        workload = replace(workload, requests=found.enough)
        found = middle(planned(workload, **devices))
    assert found.sustained is kept, (SEED, workload)


def test_as_many_are_simulated_as_it_takes_unless_they_are_counted() -> None:
    """Of 400 a second that take some 14 seconds each, a thousand only fill the machine."""
    workload = Workload(lengths=((10, 1000),), rate=400.0)
    plan = serve("smollm2-135m", "h100-sxm", context=1010)
    few, enough = (simulate(plan.roofline.judged, replace(workload, requests=n)) for n in (1000, None))
    assert few is not None
    assert enough is not None
    assert (few.sustained, few.simulated) == (None, 1000)
    assert (enough.sustained, enough.enough) == (False, None)
    assert enough.simulated >= (few.enough or 0) > 1000


def test_users_who_are_all_served_at_one_moment() -> None:
    """20 answers of 300 tokens begin and end together: 6,000 tokens in the time of one request."""
    found = middle(planned(Workload(lengths=((10, 300),), users=20, requests=20)))
    assert (found.sustained, found.enough, found.busy) == (True, None, 1)
    assert found.output_tokens_per_second == pytest.approx(6000 / found.request.median)


def test_the_command_line_says_how_many_would_do() -> None:
    words = ["plan", "serve", "smollm2-135m", "--gpu", "h100-sxm", "--input-tokens", "1000", "--output-tokens", "500"]
    few = CliRunner().invoke(cli, [*words, "--rate", "3/s", "--requests", "5"])
    assert few.exit_code == 1
    assert "5 requests are too few to tell" in few.stdout
