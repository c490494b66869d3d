"""Plans with an engine's preset beside what that engine logged as it started, and the presets' rules by hand."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asbuilt import InputError
from asbuilt.catalog import machines
from asbuilt.checkpoint.source import open_model
from asbuilt.plan import ServePlan, serve
from asbuilt.plan.quantised import quantised
from asbuilt.plan.serve.engines import ENGINES
from asbuilt.plan.serve.pages import Layout, held_tokens
from asbuilt.spec.part import Remembered

SHARED = Path(__file__).parents[3] / "shared"
LOGS = SHARED / "engine-logs"
GIB = 2**30


def rows() -> list[dict[str, str]]:
    file = LOGS / "vllm-0.19-h100.csv"
    return list(csv.DictReader(file.open())) if file.exists() else []


@cache
def planned(*items: tuple[str, str]) -> ServePlan:
    """As the engine was started: 0.95 of the memory, chunks of 8,192 tokens, 1,024 sequences at once."""
    row = dict(items)
    config, tp, pp = row["config"], int(row["tp"]), int(row["pp"])
    source = open_model(str(LOGS / config) if config.startswith("configs/") else config)
    reading = source.reading
    packed = reading.quantization is not None
    return serve(
        source.spec,
        "h100-sxm",
        engine="vllm-0.19",
        gpus=tp * pp,
        tp=tp,
        pp=pp,
        context=int(row["max_model_len"]),
        chunk=8192,
        max_num_seqs=1024,
        dtype=quantised(source.spec, reading.quantization, reading.dtype, reading.family) if packed else "bf16",
        kv_dtype="fp8" if row["kv_cache_dtype"] == "fp8" else "bf16",
        conventions={"utilisation": float(row["gpu_memory_utilization"])},
    )


def lines(plan: ServePlan) -> dict[str, float]:
    return {line.name: line.value for line in (*plan.ladder, *plan.counted)}


def name(row: dict[str, str]) -> str:
    return f"{row['model'].split('/')[-1]} tp {row['tp']} pp {row['pp']} {row['kv_cache_dtype']} {row['max_model_len']}"


EVERY_ROW = pytest.mark.parametrize(
    "row",
    rows() or [pytest.param({}, marks=pytest.mark.skip("no ../shared/engine-logs here"))],
    ids=lambda row: name(row) if row else "absent",
)


@EVERY_ROW
def test_what_an_engine_logged(row: dict[str, str]) -> None:
    plan = planned(*row.items())
    found = lines(plan)
    assert found["device memory"] / GIB == pytest.approx(float(row["init_total_memory_gib"]), abs=0.005)
    seen = "gemma-3" in row["model"]  # those were loaded with the tower that reads images, and profiled with an image
    if not seen:
        assert plan.weight_bytes / GIB == pytest.approx(float(row["weight_memory_gib"]), rel=0.01)
    if row["pp"] == "1":  # with stages the log has the profile of one without the sampler
        assert found["activations"] / GIB == pytest.approx(
            float(row["activation_memory_gib"]), rel=0.07 if seen else 0.03
        )
    assert plan.kv_budget_bytes / GIB == pytest.approx(float(row["kv_cache_memory_gib"]), rel=0.10)
    at_once = plan.kv_budget_bytes / found["cache per user"]
    assert at_once == pytest.approx(float(row["max_concurrency"]), rel=0.05)
    assert plan.users == math.floor(at_once)


def test_the_cache_of_all_logs_together() -> None:
    if not rows():
        pytest.skip("no ../shared/engine-logs here")
    errors = [planned(*row.items()).kv_budget_bytes / GIB / float(row["kv_cache_memory_gib"]) - 1 for row in rows()]
    assert sum(map(abs, errors)) / len(errors) <= 0.03
    assert max(map(abs, errors)) <= 0.10


@EVERY_ROW
def test_concurrency_follows_from_the_logged_cache(row: dict[str, str]) -> None:
    """Pages, windows and groups: the log's own cache, over the plan's bytes of a user, is the log's concurrency."""
    if row["pp"] != "1":
        pytest.skip("the log has the cache of another stage than the one that limits it")
    logged = float(row["kv_cache_memory_gib"]) * GIB / lines(planned(*row.items()))["cache per user"]
    assert logged == pytest.approx(float(row["max_concurrency"]), rel=0.001)


# Published by others (the README beside the logs): GiB of cache, and what was asked.
ELSEWHERE: dict[str, tuple[float, float, dict[str, Any]]] = {
    "V0, unchunked": (3.81, 0.05, {"model": "llama-3.1-8b", "gpu": "rtx-3090", "context": 20000, "chunk": 20000}),
    "qwen3-32b": (4.45, 0.05, {"model": "Qwen--Qwen3-32B", "gpu": "h100-sxm"}),
    "qwen3-32b tp 2": (34.49, 0.05, {"model": "Qwen--Qwen3-32B", "gpu": "h100-sxm", "tp": 2}),
    "llama": (51.38, 0.05, {"model": "llama-3.1-8b", "gpu": "h100-sxm"}),
    # the version is not in the log: without a sorting sampler, as with FlashInfer's, 8.1 would be planned
    "awq": (8.0, 0.12, {"model": "qwen2.5-7b", "gpu": "rtx-4080", "dtype": "int4:128", "context": 32768}),
    # 0.44 GiB of 79 apart: what little is left magnifies them
    "gpt-oss": (3.33, 0.14, {"model": "gpt-oss-120b", "gpu": "h100-sxm", "dtype": None}),
    # of July 2025: until 0.9 what a process took before the engine was counted too, 0.53 of an H100's 79.19 GiB (logged
    # by 0.10.2 as "Free memory on device (78.66/79.19 GiB)")
    "fp8 tp 4": (
        8.11,
        0.07,
        {
            "model": "nvidia--Qwen3-235B-A22B-NVFP4",
            "gpu": "h100-sxm",
            "tp": 4,
            "dtype": "fp8:128",
            "conventions": {"reserve": 0.53 * GIB},
        },
    ),
    "the same in sglang": (
        16.46,
        0.05,
        {
            "model": "nvidia--Qwen3-235B-A22B-NVFP4",
            "gpu": "h100-sxm",
            "tp": 4,
            "dtype": "fp8:128",
            "engine": "sglang",
            "conventions": {"utilisation": 0.93},
        },
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_others_published(case: str) -> None:
    gib, within, asked = ELSEWHERE[case]
    asked: dict[str, Any] = {"engine": "vllm-0.11", "dtype": "bf16"} | asked
    if case == "V0, unchunked":
        asked["max_num_seqs"] = 256
    model = asked.pop("model")
    config = SHARED / "frontier" / model / "config.json"
    if "--" in model and not config.exists():
        pytest.skip("no ../shared/frontier here")
    spec = open_model(str(config)).spec if "--" in model else model
    plan = serve(spec, asked.pop("gpu"), **asked)
    assert plan.kv_budget_bytes / GIB == pytest.approx(gib, rel=within)


def test_the_sampler_by_hand() -> None:
    """vLLM 0.19: 2 + 4 + 4 + 4 bytes a number, and 132 rows of float32; 0.11: 2 + 4 + (4 + 8) + 8 + (4 + 8)."""
    for engine, each, more in (("vllm-0.19", 14, 132 * 4), ("vllm-0.11", 38, 0)):
        plan = serve("llama-3.1-8b", "h200", engine=engine, max_num_seqs=500, chunk=1024)
        profile = plan.capacity.profiled(plan.capacity.device.stages[0], plan.context)
        assert profile.sampler == 128256 * (500 * each + more)
        assert profile.hidden == (1024 + 500) * 4096 * 2
    few = serve("llama-3.1-8b", "h200", engine="vllm-0.11", max_num_seqs=500, chunk=100)  # no more than there are rows
    assert few.capacity.profiled(few.capacity.device.stages[0], 8192).sampler == 128256 * 100 * 38


def test_only_the_last_stage_samples() -> None:
    plan = serve("llama-3.1-8b", "h100-sxm", engine="vllm-0.19", pp=4, tp=1)
    first, *_, last = (plan.capacity.profiled(stage, 8192) for stage in plan.capacity.device.stages)
    assert first.sampler == first.incoming == 0
    assert last.sampler > 0
    assert last.incoming == 2 * 8192 * 4096 * 2


def test_workspaces_of_experts_stay() -> None:
    """Two of tokens x top_k rows: the wider of 768 and 2,048, and of 1,536 and 2,048, of two bytes each."""
    plan = serve("qwen3-30b-a3b", "h200", engine="vllm-0.19")
    profile = plan.capacity.profiled(plan.capacity.device.stages[0], plan.context)
    assert profile.workspace == 2 * 8192 * 8 * 2048 * 2
    older = serve("qwen3-30b-a3b", "h200", engine="vllm-0.11")
    assert older.capacity.profiled(older.capacity.device.stages[0], 8192).workspace == 0


def test_windows_are_reserved_with_a_chunk() -> None:
    """Of a window of 1,024 and chunks of 512 tokens: ceil((1023 + 512) / 16) + 1 pages, and no more than the text."""
    kept = Remembered(name="k", shape=(3,), window=1024)
    layout = Layout(block=16, chunk=512)
    assert held_tokens(kept, 100_000, layout) == (96 + 1) * 16
    assert held_tokens(kept, 800, layout) == (50 + 1) * 16
    assert held_tokens(kept, 100_000, replace(layout, block=1)) == 1535
    assert held_tokens(Remembered(name="k", shape=(3,)), 800, layout) == 800


def test_layers_in_groups() -> None:
    """gemma-3-4b: 5 layers keep everything and 29 a window, in six groups of five; gemma-2-2b: 13 and 13."""
    plans = [
        serve(name, "h200", engine="vllm-0.19", context=8192, dtype="bf16") for name in ("gemma-3-4b", "gemma-2-2b")
    ]
    page = 16 * 4 * 256 * 2 * 2
    assert [lines(plan)["cache per user"] for plan in plans] == [
        (5 * 512 + 30 * 513) * page,
        (13 * 512 + 13 * 513) * page,
    ]


def test_what_utilisation_is_a_fraction_of() -> None:
    """SGLang: of what is free before weights; TensorRT-LLM: of what all else leaves; llama.cpp: 1 GiB is kept."""
    plans = {name: serve("llama-3.1-8b", "h100-sxm", engine=name) for name in ("sglang", "tensorrt-llm", "llama.cpp")}
    memory, weights = int(79.19 * GIB), 16_060_522_496
    # (81,559 - 512 - 1.5 x 8,192 - 2 x 256 - 128) / 81,559 MiB
    sglang = lines(plans["sglang"])
    assert plans["sglang"].conventions.utilisation == 0.835
    assert sglang["cache budget"] == pytest.approx((memory - GIB // 4) * 0.835 - weights, abs=2)
    trt = lines(plans["tensorrt-llm"])
    left = memory - weights - trt["activations"] - trt["outside PyTorch"] - trt["buffers"]
    assert trt["cache budget"] == pytest.approx(0.9 * left, abs=2)
    llama = lines(plans["llama.cpp"])
    assert llama["reserve"] == GIB
    # float32 logits of 512 tokens and the hidden states they come from: 250.5 MiB and 16
    assert llama["activations"] == 512 * 128256 * 4 + 2 * 512 * 4096 * 4


def test_no_more_run_at_once_than_the_engine_starts() -> None:
    plan = serve("llama-3.1-8b", "h100-sxm", engine="vllm-0.19", max_num_seqs=20)
    assert plan.users == 20
    assert plan.users_that_fit is not None
    assert plan.users_that_fit > 50
    assert not serve("llama-3.1-8b", "h100-sxm", engine="vllm-0.19", max_num_seqs=20, users=21).fits


def test_other_cards_have_the_engine_s_sizes_for_them() -> None:
    """What is tried instead of this card runs with its own chunk and sequences, unless they were given."""
    plan = serve("llama-3.1-8b", "h100-sxm", engine="vllm-0.19")
    card = machines.find("l4")
    moved = plan.capacity.moved(card, plan.layout)
    assert (moved.chunk, moved.sequences) == (2048, 256)
    assert (plan.capacity.chunk, plan.capacity.sequences) == (8192, 1024)
    given = serve("llama-3.1-8b", "h100-sxm", engine="vllm-0.19", chunk=4096, conventions={"utilisation": 0.8})
    kept = given.capacity.moved(card, plan.layout)
    assert (kept.chunk, kept.sequences, kept.conventions.utilisation) == (4096, 256, 0.8)
    assert serve("llama-3.1-8b", "a100-80gb", engine="vllm-0.19").capacity.chunk == 2048


def test_commands() -> None:
    plan = serve("llama-3.1-8b", "h100-sxm", engine="vllm-0.19", tp=2, context=4096, kv_dtype="fp8")
    assert plan.command == (
        "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --dtype bfloat16 --kv-cache-dtype fp8 "
        "--max-model-len 4096 --max-num-batched-tokens 8192 --max-num-seqs 1024 --gpu-memory-utilization 0.9"
    )
    assert "--mem-fraction-static 0.835" in serve("llama-3.1-8b", "h100-sxm", engine="sglang").command
    assert "--kv_cache_free_gpu_memory_fraction 0.9" in serve("gpt2", "l4", engine="tensorrt-llm").command
    slots = serve("llama-3.1-8b", "rtx-4090", engine="llama.cpp", users=3, context=4096).command
    assert "--ctx-size 12288 --parallel 3 --ubatch-size 512" in slots
    assert serve("gpt2", "l4", engine="asbuilt").command == serve("gpt2", "l4").command == ""


def test_a_command_says_what_it_leaves_out() -> None:
    plan = serve("llama-3.1-8b", "h100-sxm", engine="tensorrt-llm", gpus=2, tp=1, pp=1, dtype="int4", kv_dtype="int8")
    wanted = ["replicas 2", "weights in int4, which the checkpoint must have", "a cache in int8, for which no option"]
    left = plan.document()["engine"]["command_leaves_out"]
    assert len(left) == len(wanted)
    assert all(one.startswith(start) for one, start in zip(left, wanted, strict=True))
    assert "--kv_cache_dtype" not in plan.command
    told = serve("mixtral-8x7b", "h100-sxm", engine="vllm-0.19", gpus=4, ep=4, kv_dtype="fp8")
    assert "--tensor-parallel-size 4 --enable-expert-parallel --dtype" in told.command
    assert told.document()["engine"]["command_leaves_out"] == []
    assert "llama-server --model MODEL.gguf " in serve("gpt2", "l4", engine="llama.cpp").command


def test_an_engine_is_planned_on_its_own_kind_of_cards() -> None:
    """One of Apple's has the least memory that holds llama-3.1-8b, and no preset of vLLM describes it."""
    smallest = serve("llama-3.1-8b", "h100-sxm", any_vendor=True).smallest_card
    assert smallest is not None
    assert machines.find(smallest).vendor == "Apple"
    card = serve("llama-3.1-8b", "h100-sxm", any_vendor=True, engine="vllm-0.19").smallest_card
    assert card is not None
    assert machines.find(card).vendor == "NVIDIA"
    assert any("may differ" in said for said in serve("llama-3.1-8b", "mi300x", engine="vllm-0.19").warnings)


def test_own_kernels_are_told_apart() -> None:
    """gpt-oss has sinks: asbuilt's own attention stores their scores, and an engine's does not."""
    own = serve("gpt-oss-20b", "h200", engine="asbuilt", context=16384)
    engine = serve("gpt-oss-20b", "h200", engine="vllm-0.19", context=16384)
    assert own.capacity.activations(16384) > 3 * engine.capacity.activations(16384)
    assert own.conventions.kernel == "library"
    assert not own.conventions.page


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_plans_every_kind(engine: str) -> None:
    """Dense, windows, latents, experts, states, and an encoder; each constant that is used has a source."""
    for model in ("llama-3-8b", "gemma-3-4b", "deepseek-v2", "mixtral-8x7b", "mamba-130m", "bert-base-uncased"):
        plan = serve(model, "h100-sxm", engine=engine)
        assert plan.tables()
        found = plan.document()["engine"]
        assert found["name"] == engine
        assert set(found["constants"]) >= ({"utilisation", "outside"} if plan.capacity.engine.profiled else set())
    for line in serve("gpt2", "h100-sxm", engine=engine, tp=2).ladder:
        assert line.source or line.name == "cache budget", line.name


def test_unknown_engines_and_conventions() -> None:
    with pytest.raises(InputError, match=r"^engine: unknown engine \(got 'vllm-0\.20'; must be .*vllm-0\.19"):
        serve("gpt2", "l4", engine="vllm-0.20")
    with pytest.raises(InputError, match=r"^utilization: unknown convention"):
        serve("gpt2", "l4", engine="vllm-0.19", conventions={"utilization": 0.9})
    with pytest.raises(InputError, match=r"^max-num-seqs: must be a whole number from 1"):
        serve("gpt2", "l4", engine="vllm-0.19", max_num_seqs=0)
