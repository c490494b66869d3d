"""What is assumed where nothing is said, and which settings are allowed, at both ends of each range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asbuilt import InputError
from asbuilt.plan import Conventions


def test_what_is_assumed_where_nothing_is_said() -> None:
    said = Conventions().plain()
    assert str(said.pop("times")).startswith("theoretical minimum")
    assert said == {
        "memory": "process",
        "utilisation": 0.9,
        "reserve": 0,
        "overhead": None,
        "workspace": None,
        "page": True,
        "block_size": 16,
        "embedding": "lookup",
        "flops": "declared",
        "scores": "causal",
        "count": "floor",
        "windows": "held",
        "kernel": "engine",
        "targets": "expected",
        "node": 8,
        "network": 50e9,
        "host": 25e9,
    }


ALLOWED: list[tuple[str, Any]] = [
    ("utilisation", 1),
    ("utilisation", 0.01),
    ("block_size", 1),
    ("block_size", 1_048_576),
    ("node", 1),
    ("node", 1_048_576),
    ("network", 0.5),
    ("host", 0.5),
    ("reserve", 0),
    ("reserve", 0.5),
    ("overhead", 0),
    ("workspace", 0),
    ("workspace", 0.5),
]
REFUSED: list[tuple[str, Any]] = [
    ("utilisation", 0),
    ("utilisation", 1.01),
    ("block_size", 0),
    ("block_size", 1_048_577),
    ("node", 0),
    ("node", 1_048_577),
    ("network", 0),
    ("network", math.inf),
    ("network", math.nan),
    ("reserve", -1),
    ("reserve", math.nan),
    ("overhead", math.inf),
    ("overhead", -0.5),
    ("workspace", -1),
    ("workspace", math.inf),
    ("block_size", 16.0),
    ("block_size", True),
    ("node", "8"),
    ("node", 1.5),
    ("memory", "Vendor"),
    ("embedding", ""),
    ("flops", "3n"),
    ("scores", "half"),
    ("count", "ceiling"),
    ("windows", "none"),
    ("kernel", "fused"),
]


@pytest.mark.parametrize(("name", "value"), ALLOWED, ids=str)
def test_the_first_and_the_last_that_is_allowed(name: str, value: Any) -> None:  # noqa: ANN401
    assert Conventions(**{name: value}).plain()[name] == value


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_the_first_that_is_not(name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InputError) as refused:
        Conventions(**{name: value})
    assert (refused.value.field, refused.value.value) == (name.replace("_", "-"), value)
