"""A cache in host memory, worked out by hand: the model of test_serving_by_hand, 192 bytes a token and layer."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from test_serving_by_hand import CONVENTIONS, DENSE, MACHINE

from asbuilt import InputError
from asbuilt.catalog.machine import Machine
from asbuilt.plan import ServePlan, serve
from asbuilt.plan.serve.host_cache import HostCache
from asbuilt.plan.serve.simulate import Group, Outcome, Request
from asbuilt.plan.serve.workload import Workload, host_room, outcome, prepared, simulate

CPU = Machine(name="slow", kind="cpu", memory_gb=0.01, bandwidth=2.5e8, rates={"bf16": 1e9})


def ask(**asked: Any) -> ServePlan:  # noqa: ANN401
    settings: dict[str, Any] = {"context": 96, "prompt": 32, "chunk": 32, "conventions": CONVENTIONS, "users": 1}
    return serve(DENSE, MACHINE, **settings | asked)


def held(**asked: Any) -> HostCache:  # noqa: ANN401
    found = ask(**asked).host_cache
    assert found is not None
    return found


def test_what_it_holds_and_how_long_it_takes() -> None:
    nbytes, bus = random.randint(80_000, 10**7), random.choice((1e6, 2.5e7))
    found = held(kv_host=nbytes, conventions=replace(CONVENTIONS, host=bus))
    sequence = 96 * 4 * 192
    assert (found.sequence, found.sequences, found.tokens) == (sequence, nbytes // sequence, nbytes * 96 // sequence)
    assert found.seconds == pytest.approx(sequence / bus, rel=1e-12)
    assert found.expected["middle"] == pytest.approx(sequence / (0.55 * bus), rel=1e-12)
    assert found.computing == pytest.approx(ask(prompt=96).prefill.seconds, rel=1e-12)
    assert found.expected_computing["low"] == pytest.approx(ask(prompt=96).expected["low"][0], rel=1e-12)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"gpus": 4, "tp": 2}])
def test_devices_send_their_shares_at_once(degrees: dict[str, int]) -> None:
    """A copy's sequence is as large on all its devices together; each sends one part in tp x pp of it."""
    found, sequence = held(kv_host=10**6, **{"pp": 1} | degrees), 96 * 4 * 192
    devices = degrees.get("tp", 1) * degrees.get("pp", 1)
    assert (found.sequence, found.on_device) == (sequence, sequence // devices)
    assert found.seconds == pytest.approx(sequence / devices / 25e9, rel=1e-12)


def test_the_stage_with_the_most_layers_takes_longest() -> None:
    """Three layers on two stages: two of them on one."""
    odd = replace(DENSE, blocks=DENSE.blocks[:3])
    found = serve(odd, MACHINE, context=96, conventions=CONVENTIONS, kv_host=1e6, pp=2).host_cache
    assert found is not None
    assert (found.sequence, found.on_device) == (96 * 3 * 192, 96 * 2 * 192)
    assert found.seconds == pytest.approx(96 * 2 * 192 / 25e9, rel=1e-12)


def test_key_value_heads_that_are_repeated_are_stored_again() -> None:
    assert held(kv_host=10**6, tp=8).sequence == 2 * 96 * 4 * 192  # 4 heads on 8 devices


def test_it_is_in_the_document_and_the_tables() -> None:
    plan = ask(kv_host=1e6)
    assert plan.document()["kv_host"]["sequences"] == 10**6 // (96 * 4 * 192)
    assert "Cache in host memory, sequences of 96 tokens" in plan.markdown()
    assert ask().document()["kv_host"] is None


def test_refusals() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="kv-host"):
            ask(kv_host=wrong)
    with pytest.raises(InputError, match="beside the host's"):
        serve(DENSE, CPU, kv_host=1e6)
    with pytest.raises(InputError, match="layers in host memory"):
        ask(kv_host=1e6, gpu_layers=2, cpu=CPU)


SEED = random.SystemRandom().randrange(2**31)


def two(host: float | None, prompt: int, answer: int, fits: float = 1.5) -> tuple[ServePlan, Outcome]:
    """Two alike sequences at once and no more, where `fits` of one fit."""
    workload = Workload(lengths=((prompt, answer),), rate=1.0)
    options: dict[str, Any] = {"context": prompt + answer, "chunk": 4096, "kv_host": host}
    options["conventions"] = {"utilisation": 1.0, "page": False, "host": 1e9}
    plan = serve("smollm2-135m", "memory=80GB,bandwidth=1TB/s,bf16=30T", **options)
    stage = plan.capacity.device.stages[0]
    each = plan.capacity.per_user(stage, workload.longest) + plan.capacity.logits
    room = int(plan.capacity.fixed(stage, workload.longest) + fits * each)
    plan = serve("smollm2-135m", f"memory={room},bandwidth=1TB/s,bf16=30T", **options)
    at = plan.roofline.judged
    ready = prepared(at, workload, workload.longest, 1)
    assert ready is not None
    source = (Request(number=i, arrived=0.0 if i < 2 else 1e9, prompt=prompt, output=answer) for i in count())
    group = Group(ready.times, ready.room, source, host=host_room(at, workload.longest))
    return plan, group.run(ready.curve, 2, 0)


def test_a_preempted_sequence_is_brought_back_in_the_time_of_its_bytes() -> None:
    """When the first ends, the second's cache crosses the bus; then it decodes alone from where it stopped."""
    drawn = random.Random(SEED)
    prompt, answer = drawn.randint(200, 800), drawn.randint(1200, 2000)
    plan, found = two(1e12, prompt, answer)
    first, second = found.requests
    assert found.host is not None
    assert (found.preempted, found.host.returned) == (1, 1)
    given = math.floor(1.5 * (prompt + answer) / 2) - prompt  # tokens of both when they fill the room, about
    at, token = plan.roofline.judged, 30 * 2 * 3 * 64 * 2
    crossing = (prompt + given) * token / (0.55 * 1e9)
    alone = sum(at.decode(1, context).seconds for context in range(prompt + given + 1, prompt + answer))
    assert second.finished - first.finished == pytest.approx(crossing + alone, rel=0.02), SEED
    assert found.host.most == pytest.approx((prompt + given) * token, rel=0.02)
    assert found.host.used == pytest.approx(0, abs=1)


def test_without_room_in_host_memory_it_is_computed_again() -> None:
    drawn = random.Random(SEED)
    prompt, answer = drawn.randint(200, 800), drawn.randint(1200, 2000)
    _, without = two(None, prompt, answer)
    _, small = two(1000.0, prompt, answer)
    assert small.host is not None
    assert (without.preempted, small.preempted, small.host.returned) == (1, 1, 0)
    for one, other in zip(without.requests, small.requests, strict=True):
        assert (one.first, one.finished) == (other.first, other.finished)
    fits, both = two(1e12, prompt, answer, 3.0), two(None, prompt, answer, 3.0)
    assert [r.finished for r in fits[1].requests] == [r.finished for r in both[1].requests]


def test_every_token_is_given_once_however_often_sequences_come_back() -> None:
    drawn = random.Random(SEED)
    lengths = tuple((drawn.randint(5, 300), drawn.randint(100, 900)) for _ in range(9))
    workload = Workload(lengths=lengths, rate=50.0, requests=60, prefix_share=0.3, seed=SEED)
    options: dict[str, Any] = {"workload": workload, "kv_host": 1e9, "conventions": {"utilisation": 1.0, "host": 1e9}}
    plan = serve("smollm2-135m", "memory=80GB,bandwidth=1TB/s,bf16=30T", **options)
    stage = plan.capacity.device.stages[0]
    each = plan.capacity.per_user(stage, workload.longest) + plan.capacity.logits
    room = int(plan.capacity.fixed(stage, workload.longest) + 3.3 * each)
    plan = serve("smollm2-135m", f"memory={room},bandwidth=1TB/s,bf16=30T", **options)
    found = outcome(plan.roofline.judged, workload)
    assert found is not None
    assert found.host is not None
    assert found.host.returned > 0
    assert all(r.arrived < r.first <= r.finished < math.inf for r in found.requests), SEED
    assert found.end.outputs >= sum(r.output for r in found.requests)
    assert found.most_cache <= 1.02 * found.room  # the next step's tokens are booked before they stop
    assert found.host.used <= found.host.most <= found.host.nbytes
    served = simulate(plan.roofline.judged, workload)
    assert served is not None
    assert served.returned == found.host.returned
    assert "brought back from the host" in plan.markdown()
