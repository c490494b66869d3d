"""A cache in host memory, worked out by hand: the model of test_serving_by_hand, 192 bytes a token and layer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from test_serving_by_hand import CONVENTIONS, DENSE, MACHINE

from asbuilt import InputError
from asbuilt.catalog.machine import Machine
from asbuilt.plan import ServePlan, serve
from asbuilt.plan.serve.host_cache import HostCache

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
