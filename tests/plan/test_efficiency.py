"""Shares of the roofs that a measured run reached, of the model of test_serving_by_hand.py on 1 GB/s and 4 GFLOP/s."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_serving_by_hand import DENSE

from asbuilt import InputError
from asbuilt.catalog.machine import parse_numbers
from asbuilt.plan import serve
from asbuilt.plan.serve.efficiency import Timed, from_measured
from asbuilt.plan.serve.expected import LEVELS

MACHINE = parse_numbers("memory=1GiB,bandwidth=1GB/s,bf16=4G,fp32=4G")


def measured(*rows: object, **more: object) -> dict[str, Any]:
    machine = {"processor": "a processor", "threads": 2, "memory_bytes": 2**30}
    rates = {dtype: {"product_rate": 4e9} for dtype in ("fp32", "bf16")}
    return {
        "model": "toy",
        "dtype": "bf16",
        "rows": list(rows),
        "machine": {"machine": machine, "read_bandwidth": 1e9, "rates": rates},
    } | more


DECODE, PREFILL = (
    {"figure": "decode after 128 tokens", "measured": 800},
    {"figure": "prefill, 32 tokens", "measured": 5e3},
)
# The 129th token: 0.128 + (147.456 + 129 x 0.768) + 245.76 + 1.152 + 128 us. A prompt of 32: 4.096, attention's FLOPs
# (32 x 147,456 + 528 x 1,536) / 4e9, ffn's 1,966.08, 1.152, 128.
STEP, PROMPT = 621.568e-6, 3_481.728e-6


def test_shares() -> None:
    other = {"figure": "weights, bf16", "measured": 3.0}
    found = from_measured(measured(other, 5, {}, DECODE, PREFILL, DECODE | {"measured": 1.0}), DENSE, "toy")
    assert found == pytest.approx((800 * STEP, 5e3 * PROMPT / 32))
    slow = from_measured(measured(DECODE | {"measured": 0.5}, PREFILL | {"measured": 0.25}), DENSE, "toy")
    assert slow == pytest.approx((0.5 * STEP, 0.25 * PROMPT / 32))
    fast = measured(DECODE | {"measured": 0.9e12}, PREFILL | {"measured": 0.9e12})
    assert from_measured(fast, DENSE, "toy") == (1, 1)  # no run is faster than a floor
    first = measured(
        {"figure": "decode after 1 tokens", "measured": 800}, {"figure": "prefill, 1 tokens", "measured": 1}
    )
    assert from_measured(first, DENSE, "toy")[0] == pytest.approx(800 * (STEP - 127 * 0.768e-6))


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (measured(DECODE, PREFILL, model="another"), "efficiency"),
        ([], "efficiency"),
        (measured(DECODE), "efficiency: rows"),
        (measured(PREFILL), "efficiency: rows"),
        (measured(rows="decode after 128 tokens"), "efficiency: rows"),
        (measured(DECODE | {"measured": 0}, PREFILL), "efficiency: rows"),
        (measured(DECODE | {"measured": 1e12}, PREFILL), "efficiency: rows"),
        (measured(DECODE | {"measured": "800"}, PREFILL), "efficiency: rows"),
        (measured(DECODE | {"figure": "decode after 0 tokens"}, PREFILL), "efficiency: rows"),
        (measured(DECODE, PREFILL | {"figure": "prefill, many tokens"}), "efficiency: rows"),
        (measured(DECODE, PREFILL, dtype="bf17"), "dtype"),
        (measured(DECODE, PREFILL, machine={"machine": {}, "stacks": {"layers": {}}}), "efficiency"),
        (measured(DECODE, PREFILL, {"figure": "weights, q4_1, q8_0, bf16", "measured": 9}), "efficiency"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_is_no_such_run(document: Any, field: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError) as refused:
        from_measured(document, DENSE, "toy")
    assert refused.value.field == field


def test_times_that_were_taken_are_expected() -> None:
    """Of every level, faster or slower than the minimum; efficiencies that are given go before them."""
    for _ in range(5):
        prefill, step = (seconds * random.uniform(0.5, 2) for seconds in (PROMPT, STEP))
        timed = Timed(prompt=32, prefill=prefill, past=128, decode=step)
        plan = serve(DENSE, MACHINE, dtype="bf16", timed=timed)
        for level in LEVELS:
            at = plan.roofline.at(level)
            assert at.prefill(32).seconds == pytest.approx(prefill, rel=1e-3)
            assert at.decode(1, 129).seconds == pytest.approx(step, rel=1e-3)
        assert plan.roofline.prefill(32).seconds == pytest.approx(PROMPT)
        given = serve(DENSE, MACHINE, dtype="bf16", timed=timed, bandwidth_efficiency=0.5).roofline
        assert given.at("middle") is given
