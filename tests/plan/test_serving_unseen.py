"""Plans beside start-ups of vLLM that are published apart from the logs in ../shared/engine-logs.

Each row has what its log says of flags, and GiB of cache and concurrency as logged. Where a source has no address of
its own, a line of the log stands for it. Of a preset's constants two come from rows here, as `engines.py` says: what
vLLM 0.10 to 0.16 takes outside PyTorch on one card, and over NVLink.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from formulas import worked_out

from asbuilt.checkpoint.source import open_model
from asbuilt.families import read_config
from asbuilt.kernels.memory import memory
from asbuilt.plan import ServePlan, serve
from asbuilt.plan.serve.pages import with_states
from asbuilt.spec import LongRope, Model, Rotary

SHARED = Path(__file__).parents[3] / "shared"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One start-up: the model's config, the card, what was asked, and what was logged."""

    model: str
    gpu: str
    asked: dict[str, Any]
    gib: float
    concurrency: float | None
    source: str
    changed: dict[str, Any] = field(default_factory=dict)
    """Fields of the config that differ from the file's, by name; `text_config.` and the like before nested ones."""
    apart: str = ""
    """Why the plan may differ by more than 3%."""


QWEN35_9B = {
    "quantization_config": None,
    "vision_config.out_hidden_size": 4096,
    "text_config.hidden_size": 4096,
    "text_config.intermediate_size": 12288,
    "text_config.num_attention_heads": 16,
    "text_config.num_hidden_layers": 32,
    "text_config.linear_num_value_heads": 32,
    "text_config.layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
}
GRANITE_4_MICRO = {
    "hidden_size": 2560,
    "num_attention_heads": 40,
    "vocab_size": 100352,
}
ROWS = {
    "qwen3-next-80b, 2 x H200": Row(
        model="frontier/Qwen--Qwen3-Next-80B-A3B-Instruct",
        gpu="h200",
        asked={"engine": "vllm-0.11", "tp": 2, "context": 262144},
        gib=44.59,
        concurrency=14.77,
        source="vLLM 0.10.2: Current kv cache memory in use is 47878721024 bytes",
    ),
    "qwen3-235b-fp8, 8 x L40S, experts over 8": Row(
        model="frontier/nvidia--Qwen3-235B-A22B-NVFP4",
        gpu="l40s",
        asked={"engine": "vllm-0.11", "tp": 8, "ep": 8, "gpus": 8, "context": 32768, "dtype": "fp8:128"},
        gib=10.65,
        concurrency=7.27,
        source="vLLM 0.10.2: Current kv cache memory in use is 11423138508 bytes",
    ),
    "qwen3-8b-fp8, 24 GB": Row(
        model="qwen3-8b",
        gpu="rtx-4090",
        asked={"engine": "vllm-0.11", "context": 1024, "dtype": "fp8:128", "conventions": {"utilisation": 0.8}},
        gib=8.60,
        concurrency=61.14,
        source="vLLM 0.11: Current kv cache memory in use is 9232221491 bytes",
    ),
    "qwen3-8b, L20": Row(
        model="qwen3-8b",
        gpu="l20,process=47.37GiB",  # without error correction, as nvidia-smi reports in the same log
        asked={"engine": "vllm-0.11", "context": 16384, "dtype": "bf16"},
        gib=25.94,
        concurrency=11.53,
        source="vLLM of February 2026: Memory profiling takes 24.71 seconds, weights memory: 15.27GiB",
    ),
    "llava-v1.6-mistral-7b, H100, offline": Row(
        model="frontier/mistralai--Mistral-7B-Instruct-v0.3",
        gpu="h100-sxm",
        asked={"engine": "vllm-0.11", "context": 4096, "chunk": 16384, "dtype": "bf16"},
        changed={"vocab_size": 32064},
        gib=55.15,
        concurrency=110.29,
        source="vLLM 0.10.2: Current kv cache memory in use is 59212694937 bytes",
        apart="planned as a text model: the tower has 0.6 GiB, and five images were profiled",
    ),
    "granite-4.0-micro in fp8, L40S, offline": Row(
        model="engine-logs/configs/granite-3.1-2b",
        gpu="l40s",
        asked={"engine": "vllm-0.11", "context": 131072, "chunk": 8192, "dtype": "fp8:128"},
        changed=GRANITE_4_MICRO,
        gib=35.34,
        concurrency=3.53,
        source="https://github.com/IBM/CodeEngine (serverless fleets, inferencing): vLLM 0.11.0",
    ),
    "mistral-7b in GPTQ, DGX Spark": Row(
        model="frontier/mistralai--Mistral-7B-Instruct-v0.3",
        gpu="dgx-spark",
        asked={"engine": "vllm-0.11", "context": 32768, "dtype": "int4:128"},
        changed={"vocab_size": 32000},
        gib=102.56,
        concurrency=25.64,
        source="https://github.com/ArmDeveloperEcosystem/arm-learning-paths (voice chatbot on DGX Spark): vLLM 0.11.0",
        apart="drivers report 119.7 to 121.7 GiB of the memory that the CPU shares",
    ),
    "gemma-3-1b, RTX 5090, offline": Row(
        model="gemma-3-1b",
        gpu="rtx-5090",
        asked={"engine": "vllm-0.11", "context": 2048, "chunk": 8192, "conventions": {"utilisation": 0.95}},
        gib=25.39,
        concurrency=461.21,
        source="vLLM 0.13.0: Add 2 padding layers, GPU KV cache size: 950,864 tokens",
    ),
    "llama-3.1-8b, A100 of 40 GB, offline": Row(
        model="llama-3.1-8b",
        gpu="a100-40gb",
        asked={"engine": "vllm-0.11", "context": 131072, "chunk": 8192},
        gib=19.28,
        concurrency=1.20,
        source="https://github.com/ilseokoh/vllm-gce: vLLM 0.15.1",
    ),
    "llama-3-70b in AWQ, 2 x L40S": Row(
        model="llama-3-70b",
        gpu="l40s",
        asked={"engine": "vllm-0.11", "tp": 2, "context": 8192, "dtype": "int4:128"},
        gib=20.16,
        concurrency=16.13,
        source="vLLM 0.16.0: GPU KV cache size: 132,128 tokens, Model loading took 18.55 GiB memory",
    ),
    "qwen3.5-9b, L40S, offline": Row(
        model="frontier/nvidia--Qwen3.6-27B-NVFP4",
        gpu="l40s",
        asked={"engine": "vllm-0.19", "context": 262144, "chunk": 8192},
        changed=QWEN35_9B,
        gib=20.27,
        concurrency=2.52,
        source="vLLM 0.19.0: CUDA graph pool memory: 0.65 GiB (actual), 0.78 GiB (estimated); 165,792 tokens",
        apart="the encoder was profiled with an image of 16,384 tokens",
    ),
    "gpt-oss-20b, A100 of 80 GB": Row(
        model="gpt-oss-20b",
        gpu="a100-80gb",
        asked={"engine": "vllm-0.19", "context": 131072, "dtype": None, "conventions": {"utilisation": 0.65}},
        gib=36.56,
        concurrency=None,
        source="https://myoceane.fr/index.php/ai-vllm-a100-gemma-4/: vLLM 0.19.0",
    ),
    "gemma-4-26b-a4b, A100 of 80 GB": Row(
        model="frontier/google--gemma-4-26B-A4B",
        gpu="a100-80gb",
        asked={"engine": "vllm-0.19", "context": 131072},
        gib=21.5,
        concurrency=None,
        source="https://myoceane.fr/index.php/ai-vllm-a100-gemma-4/: vLLM 0.19.0",
    ),
}


@cache
def planned(name: str) -> ServePlan:
    row = ROWS[name]
    spec: str | Model = row.model
    if "/" in row.model:
        file = SHARED / f"{row.model}.json"
        file = file if file.exists() else SHARED / row.model / "config.json"
        if not file.exists():
            pytest.skip("no ../shared here")
        spec = open_model(str(file)).spec if not row.changed else _changed(file, row.changed)
    asked: dict[str, Any] = {"dtype": "bf16"} | row.asked
    return serve(spec, row.gpu, **asked)


def _changed(file: Path, changed: dict[str, Any]) -> Model:
    """Returns the spec of the config with fields replaced; those that become None are left out."""
    config = json.loads(file.read_text())
    for name, value in changed.items():
        at = config
        *above, last = name.split(".")
        for key in above:
            at = at[key]
        at[last] = value
        if value is None:
            del at[last]
    return read_config(config, "config").spec


def lines(plan: ServePlan) -> dict[str, float]:
    return {line.name: line.value for line in (*plan.ladder, *plan.counted)}


@pytest.mark.parametrize("name", ROWS)
def test_what_was_logged(name: str) -> None:
    row, plan = ROWS[name], planned(name)
    within = 0.05 if row.apart else 0.02
    assert plan.kv_budget_bytes / GIB == pytest.approx(row.gib, rel=within)
    if row.concurrency is not None:
        assert plan.kv_budget_bytes / lines(plan)["cache per user"] == pytest.approx(row.concurrency, rel=within)


def test_all_together() -> None:
    errors = [planned(name).kv_budget_bytes / GIB / row.gib - 1 for name, row in ROWS.items()]
    assert sum(map(abs, errors)) / len(errors) <= 0.015


# Tokens of a page, as "Setting attention block size to N tokens" has them, and requests of the whole context per GiB:
# logged concurrency over logged cache.
PAGES = {
    "nemotron-3-nano-30b": ({"kv_dtype": "fp8"}, 4176),  # vLLM 0.19.0, a 30B-A3B with the same layers
    "frontier/Qwen--Qwen3.5-122B-A10B": ({"kv_dtype": "fp8", "tp": 2}, 4176),  # vLLM 0.16.1rc1, two L40S
}


@pytest.mark.parametrize("model", PAGES)
def test_pages_of_states(model: str) -> None:
    """One more page of tokens is as many bytes more as the log's page has, in a group of layers that keep tokens."""
    asked, tokens = PAGES[model]
    spec: Any = model
    if "/" in model:
        if not (SHARED / model / "config.json").exists():
            pytest.skip("no ../shared here")
        spec = open_model(str(SHARED / model / "config.json")).spec
    capacity = serve(spec, "h200", engine="vllm-0.19", dtype="bf16", context=131072, **asked).capacity
    stage = capacity.device.stages[0]

    def held(context: int) -> int:
        found = with_states(stage, context, capacity.pages, capacity.kv_bytes, 2)
        assert found is not None
        assert found.tokens == tokens
        return int(found.nbytes)

    assert held(tokens) == held(1)
    assert held(tokens + 1) > held(tokens)
    assert held(10 * tokens) - held(9 * tokens) == held(tokens + 1) - held(tokens)


def test_a_state_takes_a_page() -> None:
    """qwen3-next-80b, one card: pages of 1,056 tokens hold a state of 2,097,152 + 49,152 bytes.

    A token of a layer has 2 x 2 x 256 numbers: 12 layers of them, and 36 states, in groups of 12.
    """
    state = 4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128)
    token = 2 * 2 * 256 * 2
    block = 16 * -(-state // (16 * token))
    plan = serve("qwen3-next-80b", "h200", engine="vllm-0.19", context=10_000, dtype="bf16")
    assert lines(plan)["cache per user"] == (-(-10_000 // block) + 3) * 12 * block * token
    assert block == 1056


def test_states_in_groups() -> None:
    """nemotron-3-nano-30b in fp8: 6 layers keep tokens, so 23 of states make four groups of 6, the last one padded."""
    plan = serve("nemotron-3-nano-30b", "h200", engine="vllm-0.19", context=2 * 4176, dtype="bf16", kv_dtype="fp8")
    assert lines(plan)["cache per user"] == (2 + 4) * 6 * 4176 * 2 * 2 * 128
    for line in plan.counted:
        assert worked_out(line) == line.value, line.name


@pytest.mark.parametrize(("card", "widths"), [("h200", (2880, 2880)), ("l40s", (2944, 3072)), ("b200", (3072, 3072))])
def test_experts_in_mxfp4_are_padded(card: str, widths: tuple[int, int]) -> None:
    """gpt-oss-20b: 32 experts of 24 layers, three matrices of 2,880 x 2,880 in 17/32 bytes a number."""
    capacity = serve("gpt-oss-20b", card, engine="vllm-0.19", dtype=None).capacity
    padding = capacity.buffers(capacity.device.stages[0]).get("padding of experts", 0)
    more = 32 * 24 * 3 * (widths[0] * widths[1] - 2880**2) * 17 / 32
    assert padding == pytest.approx(more, abs=1)


def test_tables_of_interpolated_positions() -> None:
    """gemma-3-4b: 131,072 positions of 256 numbers for windows, and eight times as many for the layers of factor 8.

    The weights with the tower that reads images, and these tables, are what vLLM 0.19 logged as weights: 8.58 GiB.
    """
    capacity = serve("gemma-3-4b", "h100-sxm", engine="vllm-0.19", dtype="bf16").capacity
    tables = capacity.buffers(capacity.device.stages[0])["RoPE tables"]
    assert tables == 9 * 131072 * 256 * 2
    weights = serve("gemma-3-4b-mm", "h100-sxm", dtype="bf16").weight_bytes
    assert (weights + tables) / GIB == pytest.approx(8.58, abs=0.015)


def test_two_lists_of_factors_have_a_table_each() -> None:
    """As phi-3 has them: 128 positions of the original context, and 640 of the longest text."""
    positions = Rotary(
        d_rotary=6,
        scaling=LongRope(short_factors=(1.0,) * 3, long_factors=(2.0,) * 3, original_context=128, attention_factor=1.0),
    )
    assert memory(positions).resident(640, 2) == (128 + 640) * 6 * 2
    assert memory(replace(positions, scaling=None)).resident(640, 2) == 640 * 6 * 2


def test_shared_memory_is_not_reported() -> None:
    """NVML has no memory of a DGX Spark, so vLLM starts with the small sizes."""
    capacity = serve("llama-3.1-8b", "dgx-spark", engine="vllm-0.19").capacity
    assert (capacity.chunk, capacity.sequences) == (2048, 256)
