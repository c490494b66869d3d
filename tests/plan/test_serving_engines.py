"""Plans beside what a serving engine logged as it started: memory, weights, and how many tokens its cache holds.

An engine's own activations and graphs are not what is compared: it measures them, and a plan derives or assumes them.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from asbuilt.checkpoint.source import open_model
from asbuilt.plan import Conventions, ServePlan, serve
from asbuilt.plan.quantised import quantised

LOGS = Path(__file__).parents[3] / "shared" / "engine-logs"
GIB = 2**30


def rows() -> list[dict[str, str]]:
    file = LOGS / "vllm-0.19-h100.csv"
    return list(csv.DictReader(file.open())) if file.exists() else []


def planned(row: dict[str, str]) -> ServePlan:
    """As the engine was started: 0.95 of the memory, chunks of 8,192 tokens, layers with a window kept whole."""
    config, tp, pp = row["config"], int(row["tp"]), int(row["pp"])
    source = open_model(str(LOGS / config) if config.startswith("configs/") else config)
    reading = source.reading
    packed = reading.quantization is not None
    dtype = quantised(source.spec, reading.quantization, reading.dtype, reading.family) if packed else "bf16"
    return serve(
        source.spec,
        "h100-sxm",
        gpus=tp * pp,
        tp=tp,
        pp=pp,
        context=int(row["max_model_len"]),
        chunk=8192,
        dtype=dtype,
        kv_dtype="fp8" if row["kv_cache_dtype"] == "fp8" else "bf16",
        conventions=Conventions(utilisation=float(row["gpu_memory_utilization"]), windows="full"),
    )


def name(row: dict[str, str]) -> str:
    return f"{row['model'].split('/')[-1]} tp {row['tp']} pp {row['pp']} {row['kv_cache_dtype']} {row['max_model_len']}"


@pytest.mark.parametrize(
    "row",
    rows() or [pytest.param({}, marks=pytest.mark.skip("no ../shared/engine-logs here"))],
    ids=lambda row: name(row) if row else "absent",
)
def test_what_an_engine_logged(row: dict[str, str]) -> None:
    plan = planned(row)
    lines = {line.name: line.value for line in (*plan.ladder, *plan.counted)}
    assert lines["device memory"] / GIB == pytest.approx(float(row["init_total_memory_gib"]), abs=0.005)
    if "gemma-3" not in row["model"]:  # those were loaded with the tower that reads images
        assert plan.weight_bytes / GIB == pytest.approx(float(row["weight_memory_gib"]), rel=0.01)
    # tokens that the logged bytes of its cache hold, by the plan's bytes of a token
    each = lines["cache per user"] / plan.context
    tokens = float(row["kv_cache_memory_gib"]) * GIB / each
    if row["config"] == "gemma-3-4b":  # the engine lays layers out in groups of five, of which 34 make seven
        tokens *= 34 / 35
    stages = int(row["pp"])  # with stages the engine holds what the tightest of them does
    assert tokens == pytest.approx(int(row["kv_cache_tokens"]), rel=0.0005 if stages == 1 else 0.02)
    # what is planned for the cache, activations and graphs being ours
    assert plan.kv_budget_bytes / GIB == pytest.approx(float(row["kv_cache_memory_gib"]), rel=0.09)
