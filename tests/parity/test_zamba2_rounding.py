"""zamba2 in float32: its models as drawn amplify rounding, ours as much as transformers' own, seen from float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.zamba2 import CASE
from harness import CAUSAL, TOLERANCE, Trace, asbuilt_loads, transformers_loads, transformers_saves

MARGIN = 3.0  # of distances whose ratio was 0.7 to 1.3 in a hundred models


def distance(trace: Trace, exact: Trace) -> float:
    """Root mean square over positions and numbers, as a part of the exact numbers', of the path where it is most."""
    return max(
        float((trace[path].double() - one).square().mean().sqrt() / one.square().mean().sqrt())
        for path, one in exact.items()
    )


@pytest.mark.parametrize("drawn", CASE.configs)
def test_float32_is_as_near_to_float64_as_transformers_is(drawn: str, tmp_path: Path) -> None:
    rng = CASE.random(drawn, "rounding")
    transformers_saves(CASE.config(drawn), rng.randrange(2**32), tmp_path)
    mine, other = asbuilt_loads(tmp_path), transformers_loads(tmp_path, kind=CAUSAL)
    inputs = CAUSAL.inputs(rng, mine.spec)
    want, have = CAUSAL.theirs(other, inputs), CAUSAL.ours(mine, inputs)
    exact = CAUSAL.ours(mine.double(), inputs)
    near, bound = distance(have, exact), distance(want, exact)
    assert near < min(TOLERANCE, MARGIN * bound), f"{near:.1e} beside {bound:.1e}"
