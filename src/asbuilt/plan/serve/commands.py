"""The command line that starts an engine with a plan's values, and what of the plan that command does not say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asbuilt.catalog.models import ROWS

if TYPE_CHECKING:
    from asbuilt.plan.serve.plan import ServePlan

PUBLISHED = re.compile(r"config of ([\w.-]+/[\w.-]+)")
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
FLAGS = ("--enable-expert-parallel", "--enable-eplb")
DEGREES = ("tp", "pp", "replicas", "ep")


@dataclass(frozen=True, kw_only=True)
class Server:
    """How an engine is started: the first words, and its option for each value of a plan.

    `options` are by what they say: a degree, or one of `_values`. `caches` are the engine's words for dtypes of the
    cache other than the activations'; `dtypes` those for dtypes of weights. An engine divides `unasked` degrees by
    itself.
    """

    start: str
    options: Mapping[str, str]
    caches: Mapping[str, str]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()


VLLM = Server(
    start="vllm serve {model}",
    options={
        "tp": "--tensor-parallel-size",
        "pp": "--pipeline-parallel-size",
        "replicas": "--data-parallel-size",
        "ep": "--enable-expert-parallel",
        "replicas of experts": "--enable-eplb",
        "configuration of replicas": "--eplb-config",
        "dtype": "--dtype",
        "quantization": "--quantization",
        "cache": "--kv-cache-dtype",
        "context": "--max-model-len",
        "chunk": "--max-num-batched-tokens",
        "sequences": "--max-num-seqs",
        "utilisation": "--gpu-memory-utilization",
    },
    caches={"fp8": "fp8", "fp8_e5m2": "fp8_e5m2"},
    dtypes=TORCH_DTYPES,
)
SERVERS: dict[str, Server] = {
    "vllm-0.19": VLLM,
    "vllm-0.11": VLLM,
    "sglang": Server(
        start="python -m sglang.launch_server --model-path {model}",
        options={
            "tp": "--tp-size",
            "pp": "--pp-size",
            "replicas": "--dp-size",
            "ep": "--ep-size",
            "replicas of experts": "--enable-eplb",
            "redundant": "--ep-num-redundant-experts",
            "dtype": "--dtype",
            "quantization": "--quantization",
            "cache": "--kv-cache-dtype",
            "context": "--context-length",
            "chunk": "--chunked-prefill-size",
            "sequences": "--max-running-requests",
            "utilisation": "--mem-fraction-static",
        },
        caches={"fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"},
        dtypes=TORCH_DTYPES,
    ),
    "tensorrt-llm": Server(
        start="trtllm-serve {model}",
        options={
            "tp": "--tp_size",
            "pp": "--pp_size",
            "ep": "--ep_size",
            "cache": "--kv_cache_dtype",
            "context": "--max_seq_len",
            "chunk": "--max_num_tokens",
            "sequences": "--max_batch_size",
            "utilisation": "--kv_cache_free_gpu_memory_fraction",
        },
        caches={"fp8": "fp8"},
    ),
    "llama.cpp": Server(
        start="llama-server --model {model}.gguf",
        options={
            "context of all slots": "--ctx-size",
            "slots": "--parallel",
            "chunk": "--ubatch-size",
            "cache": "--cache-type-k",
            "cache of values": "--cache-type-v",
        },
        caches={"q8_0": "q8_0", "q4_0": "q4_0", "bf16": "bf16", "fp32": "f32"},
        fixed=("--n-gpu-layers", "999", "--flash-attn", "on"),
        unasked=("pp",),
    ),
}


def command(plan: ServePlan) -> str:
    """Returns the command, "" for an engine that has none: no engine, and asbuilt's own, which does not serve yet.

    MODEL stands for a model that is not in the catalogue, and for a GGUF file.
    """
    server = SERVERS.get(plan.capacity.engine.name)
    if server is None or plan.disaggregated is not None:  # which takes a server for each pool, and a router
        return ""
    values, words = _values(plan, server), []
    for says, option in server.options.items():
        value = values[says]
        if value is not None:
            words += [option] if option in FLAGS else [option, str(value)]
    words += _fixed(plan, server)
    if plan.capacity.adapters is not None and server is VLLM:
        held = plan.capacity.adapters
        words += ["--enable-lora", "--max-loras", str(held.count), "--max-lora-rank", str(held.rank)]
    return " ".join([server.start.format(model=_model(plan, server)), *map(shlex.quote, words)])


def _fixed(plan: ServePlan, server: Server) -> tuple[str, ...]:
    """Returns the options that are always given, of layers on the GPU those of the plan."""
    offload = plan.capacity.offload
    return server.fixed if offload is None else (*offload.flags, *server.fixed[2:])


def unsaid(plan: ServePlan) -> list[str]:
    """Returns what of the plan its command does not say, in words."""
    server = SERVERS.get(plan.capacity.engine.name)
    if server is None or plan.disaggregated is not None:
        return []
    found = [
        f"{name} {getattr(plan.layout, name)}"
        for name in DEGREES
        if getattr(plan.layout, name) > 1 and name not in server.options and name not in server.unasked
    ]
    if plan.layout.redundant and "replicas of experts" not in server.options:
        found.append(f"{plan.layout.redundant} replicas of experts")
    values = _values(plan, server)
    if values["dtype"] is None and values["quantization"] is None and not plan.precision.name.startswith("as "):
        found.append(f"weights in {plan.precision.name}, which the checkpoint must have")
    if plan.capacity.adapters is not None and server is not VLLM:
        found.append(f"{plan.capacity.adapters.count} LoRA adapters")
    kv = plan.capacity.kv_dtype
    if values["cache"] is None and kv != plan.precision.activation:
        found.append(f"a cache in {kv}, for which no option is known")
    return found


def _model(plan: ServePlan, server: Server) -> str:
    """Returns the hub id of a catalogue model, else MODEL."""
    row = ROWS.get(plan.asked.name)
    found = None if row is None or "gguf" in server.start else PUBLISHED.search(row.source)
    return "MODEL" if found is None else shlex.quote(found[1].rstrip("."))


def _values(plan: ServePlan, server: Server) -> dict[str, object]:
    """Returns by name what an option may say, None for what the engine does by itself."""
    layout, precision = plan.layout, plan.precision.name
    cache = server.caches.get(plan.capacity.kv_dtype)
    # A server of slots divides its context among them: each has the plan's.
    slots = max(1, min(plan.users or 1, plan.asked.users or plan.users or 1))
    fp8 = precision == "fp8" and "quantization" in server.options
    redundant = layout.redundant or None
    return {
        "replicas of experts": redundant,
        "redundant": redundant,
        "configuration of replicas": redundant and f'{{"num_redundant_experts": {redundant}}}',
        **{name: getattr(layout, name) if getattr(layout, name) > 1 else None for name in DEGREES},
        "dtype": server.dtypes.get(precision),
        "quantization": "fp8" if fp8 else None,
        "cache": cache,
        "cache of values": cache,
        "context": plan.context,
        "context of all slots": plan.context * slots,
        "slots": slots,
        "chunk": plan.capacity.chunk,
        "sequences": plan.capacity.sequences,
        "utilisation": f"{plan.conventions.utilisation:g}",
    }
