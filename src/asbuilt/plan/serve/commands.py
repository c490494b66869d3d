"""The command line that starts an engine with a plan's values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from asbuilt.catalog.models import ROWS

if TYPE_CHECKING:
    from asbuilt.plan.serve.plan import ServePlan

PUBLISHED = re.compile(r"config of ([\w.-]+/[\w.-]+)")
# What the engines call the dtypes of weights and caches; None where that is what they do by themselves.
VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CACHES = {
    "vllm": {"fp8": "fp8", "fp8_e5m2": "fp8_e5m2"},
    "sglang": {"fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"},
    "tensorrt-llm": {"fp8": "fp8"},
    "llama.cpp": {"q8_0": "q8_0", "q4_0": "q4_0", "bf16": "bf16", "fp32": "f32"},
}
Options = Iterator[tuple[str, object]]


def command(plan: ServePlan) -> str:
    """Returns the command, "" for an engine that has none: no engine, and asbuilt's own, which does not serve yet."""
    made = MADE.get(plan.capacity.engine.name)
    if made is None:
        return ""
    start, options = made
    words = [*start.format(model=shlex.quote(_model(plan))).split(" ")]
    for name, value in options(plan):
        if value is not None:
            words += [name] if value is True else [name, shlex.quote(str(value))]
    return " ".join(words)


def _model(plan: ServePlan) -> str:
    """Returns the hub id of a catalogue model, else the name as given."""
    row = ROWS.get(plan.asked.name)
    found = None if row is None else PUBLISHED.search(row.source)
    return plan.asked.name if found is None else found[1].rstrip(".")


def _over_one(value: int) -> int | None:
    return value if value > 1 else None


def _cache(plan: ServePlan, engine: str) -> str | None:
    kv = plan.capacity.kv_dtype
    return CACHES[engine].get(kv)


def _vllm(plan: ServePlan) -> Options:
    c, layout = plan.capacity, plan.layout
    yield "--tensor-parallel-size", _over_one(layout.tp)
    yield "--pipeline-parallel-size", _over_one(layout.pp)
    yield "--data-parallel-size", _over_one(layout.replicas)
    yield "--enable-expert-parallel", True if layout.ep > 1 else None
    yield "--dtype", VLLM_DTYPES.get(plan.precision.name)
    yield "--quantization", "fp8" if plan.precision.name == "fp8" else None
    yield "--kv-cache-dtype", _cache(plan, "vllm")
    yield "--max-model-len", plan.context
    yield "--max-num-batched-tokens", c.chunk
    yield "--max-num-seqs", c.sequences
    yield "--gpu-memory-utilization", f"{plan.conventions.utilisation:g}"


def _sglang(plan: ServePlan) -> Options:
    c, layout = plan.capacity, plan.layout
    yield "--tp-size", _over_one(layout.tp)
    yield "--pp-size", _over_one(layout.pp)
    yield "--dp-size", _over_one(layout.replicas)
    yield "--ep-size", _over_one(layout.ep)
    yield "--dtype", VLLM_DTYPES.get(plan.precision.name)
    yield "--quantization", "fp8" if plan.precision.name == "fp8" else None
    yield "--kv-cache-dtype", _cache(plan, "sglang")
    yield "--context-length", plan.context
    yield "--chunked-prefill-size", c.chunk
    yield "--max-running-requests", c.sequences
    yield "--mem-fraction-static", f"{plan.conventions.utilisation:g}"


def _tensorrt_llm(plan: ServePlan) -> Options:
    c, layout = plan.capacity, plan.layout
    yield "--tp_size", _over_one(layout.tp)
    yield "--pp_size", _over_one(layout.pp)
    yield "--ep_size", _over_one(layout.ep)
    yield "--kv_cache_dtype", _cache(plan, "tensorrt-llm")
    yield "--max_seq_len", plan.context
    yield "--max_num_tokens", c.chunk
    yield "--max_batch_size", c.sequences
    yield "--kv_cache_free_gpu_memory_fraction", f"{plan.conventions.utilisation:g}"


def _llama_cpp(plan: ServePlan) -> Options:
    """A server divides its context among its slots: each has the plan's."""
    slots = max(1, min(plan.users or 1, plan.asked.users or plan.users or 1))
    kv = _cache(plan, "llama.cpp")
    yield "--ctx-size", plan.context * slots
    yield "--parallel", slots
    yield "--ubatch-size", plan.capacity.chunk
    yield "--n-gpu-layers", 999
    yield "--flash-attn", "on"
    yield "--cache-type-k", kv
    yield "--cache-type-v", kv


MADE: dict[str, tuple[str, Callable[[ServePlan], Options]]] = {
    "vllm-0.19": ("vllm serve {model}", _vllm),
    "vllm-0.11": ("vllm serve {model}", _vllm),
    "sglang": ("python -m sglang.launch_server --model-path {model}", _sglang),
    "tensorrt-llm": ("trtllm-serve {model}", _tensorrt_llm),
    "llama.cpp": ("llama-server --model {model}", _llama_cpp),
}
