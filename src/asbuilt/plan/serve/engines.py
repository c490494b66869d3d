"""Serving engines, as versioned data: what each takes of a device before its cache, and how it lays the cache out.

Each constant has its meaning or its source in `Engine.sources`; none is fitted to the start-up logs with which the
tests compare plans. The `ideal` engine is no engine: the planner's conventions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError, near, one_of
from asbuilt.plan.placement import Placement
from asbuilt.plan.serve.conventions import BLOCK_SIZE, CHUNK, GIB, UTILISATION, Conventions

MIB = 2**20
# What the utilisation is a fraction of: the device's memory; that which is free before weights are loaded; or that
# which is left when weights, activations and everything else are loaded.
Base = Literal["total", "free", "left"]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The logits and what samples from them, in bytes, while as many sequences as the engine runs are sampled at once.

    Per number of the vocabulary `bytes_each` for every sequence, beside the logits in the activations' dtype if
    `from_activations`; and float32 for `rows` more, whatever the sequences.
    """

    bytes_each: int
    rows: int = 0
    from_activations: bool = True

    def nbytes(self, sequences: int, vocabulary: int, width: int) -> int:
        """Returns the bytes for `sequences`, with logits of `width` bytes."""
        each = self.bytes_each + (width if self.from_activations else 0)
        return vocabulary * (sequences * each + 4 * self.rows)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The tokens that an engine computes at once, and the most sequences that it runs at once (None: no limit)."""

    chunk: int
    sequences: int | None


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Bytes of one device outside the framework's allocator, and those of the libraries that it calls.

    `joined` is more where devices that divide a layer talk over fast links, `bus` over a bus; `library` are the
    workspaces of matrix products.
    """

    each: int = 0
    joined: int = 0
    bus: int = 0
    library: int = 0


OUTSIDE = Outside()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine of one version.

    `profiled` engines measure or reserve activations before they allocate the cache. `tables` tells that RoPE tables
    stay allocated, `keeps` that the workspaces of mixtures of experts do. `grouped` engines lay layers out in groups of
    equal size, with states in pages as large as those of tokens. `multiples` are those to which the hidden and the
    stream's width of experts in mxfp4 are padded on a card.
    `graphs` are bytes per layer, captured after the cache is allocated, from what the utilisation leaves. `vendors` are
    those of the devices that the constants describe, none for any.
    """

    name: str
    title: str
    source: str
    base: Base = "total"
    utilisation: Callable[[Machine, Placement], float] = field(default=lambda machine, layout: UTILISATION)
    sizes: Callable[[Machine], Sizes] = field(default=lambda _: Sizes(chunk=CHUNK, sequences=None))
    conventions: Mapping[str, Any] = field(default_factory=dict)
    profiled: bool = True
    counts_activations: bool = True
    sampler: Sampler | None = None
    samples: Literal["sequences", "chunk"] = "sequences"
    float32: bool = False
    outside: Outside = OUTSIDE
    tables: bool = False
    keeps: bool = False
    multiples: Callable[[Machine], tuple[int, int]] = field(default=lambda _: (1, 1))
    grouped: bool = False
    vocabulary: int = 1
    graphs: int = 0
    vendors: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def describes(self, machine: Machine) -> bool:
        """Returns whether the constants are those of such devices; one given in numbers may be any."""
        return not self.vendors or not machine.vendor or machine.vendor in self.vendors

    def rules(self, machine: Machine, layout: Placement, given: Mapping[str, Any]) -> Conventions:
        """Returns the conventions: those `given`, else the engine's; raises InputError for an unknown one."""
        known = [one.name for one in fields(Conventions)]
        for name in given:
            if name not in known:
                raise InputError("unknown convention", field=str(name), allowed=one_of(known))
        return Conventions(**{"utilisation": self.utilisation(machine, layout), **self.conventions, **given})

    def outside_bytes(self, machine: Machine, layout: Placement) -> int:
        """Returns the bytes that one device takes outside the framework's allocator."""
        if machine.kind == "cpu":
            return 0
        fast = machine.link is not None and not machine.link.kind.startswith("PCIe")
        more = 0 if layout.wide == 1 else self.outside.joined if fast else self.outside.bus
        return self.outside.each + more


def _vllm_sizes(machine: Machine) -> Sizes:
    seen = not machine.shared_memory  # NVML reports no memory of its own there
    large = seen and machine.memory_bytes("reported") >= 70 * GIB and not machine.name.startswith("a100")
    return Sizes(chunk=8192, sequences=1024) if large else Sizes(chunk=2048, sequences=256)


HOPPER = ("h100", "h200", "h800", "h20", "gh200")
BLACKWELL = ("b200", "b300", "gb200", "gb300")


def _mxfp4_multiples(machine: Machine) -> tuple[int, int]:
    """Of Triton's kernel on Hopper, FlashInfer's on Blackwell, Marlin on all others."""
    if machine.name.startswith(HOPPER):
        return 64, 1
    return (256, 256) if machine.name.startswith(BLACKWELL) else (128, 256)


# Of SGLang: the least memory in MiB, tokens of a prefill chunk, and the largest batch of a graph below tp 4 and above.
_SGLANG = (
    (160 * 1024, 16384, 512, 512),
    (60 * 1024, 8192, 256, 512),
    (35 * 1024, 4096, 32, 160),
    (20 * 1024, 2048, 24, 80),
    (0, 2048, 8, 8),
)


def _sglang(machine: Machine) -> tuple[int, int, int, int]:
    mib = machine.memory_bytes("reported") / MIB
    return next(row for row in _SGLANG if mib >= row[0])


def _sglang_fraction(machine: Machine, layout: Placement) -> float:
    """0.5 GiB, 1.5 MiB for each token of a chunk, 2 MiB for each sequence of the largest graph, 1/8 GiB a device.

    At least 10 GiB of a card of more than 60.
    """
    mib, (_, chunk, few, many) = machine.memory_bytes("reported") / MIB, _sglang(machine)
    kept = 512 + 1.5 * chunk + 2 * (few if layout.tp < 4 else many) + layout.tp * layout.pp / 8 * 1024
    kept = max(kept, 10 * 1024) if mib > 60 * 1024 else kept
    return max(0.1, round((mib - kept) / mib, 3))


def _sglang_sizes(machine: Machine) -> Sizes:
    return Sizes(chunk=_sglang(machine)[1], sequences=None)


CUDA_OUTSIDE = Outside(each=GIB // 4, joined=round(1.79 * GIB), bus=round(0.1 * GIB), library=32 * MIB)
VLLM_011_OUTSIDE = Outside(each=round(0.06 * GIB), joined=round(1.31 * GIB), bus=round(0.1 * GIB), library=32 * MIB)
FUSED = {"kernel": "engine", "block_size": BLOCK_SIZE}
ACTIVATIONS = "the larger of a pass over a whole chunk, declared by the parts, and of its hidden states and the sampler"
CUDA = {
    "outside": "CUDA modules and handles: 0.25 GiB, an assumption (published start-ups: 0.04 to 0.5)",
    "joined": "NCCL's and custom all-reduce's buffers of devices that divide a layer: over NVLink 1.79 GiB, the "
    "difference between one H100 and two in vllm-project/vllm pull request 10511; over PCIe 0.1 GiB, from 0.20 GiB in "
    "all on 16 RTX 3090s in pull request 14447",
    "tables": "none beside weights and cache",
    "keeps": "none beside weights and cache",
    "multiples": "none",
    "library": "PyTorch's workspace for cuBLAS on Hopper and later, 32 MiB (before: 8)",
    "vocabulary": "tables are padded to a multiple of 64 rows",
    "graphs": "captured after the cache is allocated: 24 MiB per layer, an assumption (published start-ups: 13 to 40)",
}
VLLM = CUDA | {
    "utilisation": "the default of --gpu-memory-utilization",
    "chunk": "8,192 tokens and 1,024 sequences on cards of 70 GiB and more other than the A100, else 2,048 and 256, as "
    "where memory is the host's, of which NVML reports none: engine/arg_utils.py",
    "activations": ACTIVATIONS,
    "windows": "a window, a chunk and one more page: v1/kv_cache_interface.py, SlidingWindowSpec",
    "grouped": "layers of one kind in groups as large as the rarest kind, the last one padded: v1/core. Beside states "
    "a page has the fewest blocks of 16 tokens that take as much as a state, and a state takes a page: "
    "model_executor/models/config.py, HybridAttentionMambaModelConfig",
    "tables": "RoPE tables of the model's whole context, as many times longer as positions are interpolated: "
    "layers/rotary_embedding",
    "multiples": "hidden and stream's width of experts in mxfp4, to multiples of 64 and 1 on Hopper (Triton), 256 and "
    "256 on Blackwell (FlashInfer), 128 and 256 elsewhere (Marlin): layers/quantization/mxfp4.py",
}
VLLM_019 = VLLM | {
    "sampler": "logits, their float32 copy, float32 probabilities and exponential noise, and a float32 row for each of "
    "an H100's 132 multiprocessors (top-k and top-p in Triton)",
    "keeps": "both workspaces of fused experts",
}
VLLM_011 = VLLM | {
    "outside": "what grows outside PyTorch while the engine profiles, 0.06 GiB, an assumption (start-ups of 0.10 to "
    "0.16 on one card: 0.02 to 0.07)",
    "joined": "NCCL's and custom all-reduce's buffers of devices that divide a layer: over NVLink 1.31 GiB, logged by "
    "0.10.2 on two H200 (1.38 in all); over PCIe 0.1, as 0.21 in all on eight L40S",
    "sampler": "logits, their float32 copy, and a sort: values (4 bytes), indices (8), those before it (8), second "
    "buffers of keys and indices (4 + 8), all at once in PyTorch's Sort.cu",
}

IDEAL = Engine(
    name="ideal", title="no engine: the conventions alone", source="docs/plan.md, assumptions", profiled=False
)
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        IDEAL,
        Engine(
            name="vllm-0.19",
            title="vLLM 0.17 to 0.20 (V1 engine, April 2026)",
            source="vllm-project/vllm: v1/worker/gpu_worker.py, v1/worker/gpu_model_runner.py, v1/kv_cache_interface",
            sizes=_vllm_sizes,
            conventions=FUSED | {"windows": "reserved"},
            sampler=Sampler(bytes_each=12, rows=132),
            tables=True,
            keeps=True,
            multiples=_mxfp4_multiples,
            grouped=True,
            vocabulary=64,
            graphs=24 * MIB,
            sources=VLLM_019,
            outside=CUDA_OUTSIDE,
            vendors=("NVIDIA",),
        ),
        Engine(
            name="vllm-0.11",
            title="vLLM 0.10 to 0.16 (V1 engine, October 2025)",
            source="vllm-project/vllm: v1/worker/gpu_worker.py, v1/sample/ops/topk_topp_sampler.py; PyTorch: Sort.cu",
            sizes=_vllm_sizes,
            conventions=FUSED | {"windows": "reserved"},
            sampler=Sampler(bytes_each=36),
            tables=True,
            multiples=_mxfp4_multiples,
            grouped=True,
            vocabulary=64,
            graphs=24 * MIB,
            sources=VLLM_011,
            outside=VLLM_011_OUTSIDE,
            vendors=("NVIDIA",),
        ),
        Engine(
            name="sglang",
            title="SGLang 0.5",
            source="sgl-project/sglang: python/sglang/srt/server_args.py, the default of --mem-fraction-static",
            base="free",
            utilisation=_sglang_fraction,
            sizes=_sglang_sizes,
            conventions={"kernel": "engine", "block_size": 1, "windows": "full"},
            counts_activations=False,
            vocabulary=64,
            graphs=24 * MIB,
            sources=CUDA
            | {
                "utilisation": "the default of --mem-fraction-static: less 0.5 GiB, 1.5 MiB for each token of a chunk, "
                "2 MiB for each sequence of the largest graph, 1/8 GiB for each device; at least 10 of more than 60",
                "chunk": "2,048 to 16,384 tokens by the card's memory, as recalled",
                "activations": "in what the fraction leaves",
                "windows": "every token of every layer, without its hybrid pool",
                "block_size": "pages of one token, the default of --page-size",
            },
            outside=CUDA_OUTSIDE,
            vendors=("NVIDIA",),
        ),
        Engine(
            name="tensorrt-llm",
            title="TensorRT-LLM 1.0 (PyTorch backend)",
            source="NVIDIA/TensorRT-LLM: llmapi/llm_args.py; docs: Memory Usage of TensorRT-LLM",
            base="left",
            sizes=lambda _: Sizes(chunk=8192, sequences=2048),
            conventions={"kernel": "engine", "block_size": 32, "windows": "reserved"},
            sampler=Sampler(bytes_each=4),
            sources=CUDA
            | {
                "utilisation": "the default of free_gpu_memory_fraction, of what weights and activations leave",
                "chunk": "the defaults of max_num_tokens and max_batch_size, as recalled",
                "activations": ACTIVATIONS,
                "sampler": "logits and their float32 copy, an assumption",
                "windows": "a window and a chunk, an assumption",
            },
            outside=CUDA_OUTSIDE,
            vendors=("NVIDIA",),
        ),
        Engine(
            name="llama.cpp",
            title="llama.cpp (llama-server, 2026)",
            source="ggml-org/llama.cpp: common/arg.cpp, src/llama-kv-cache-iswa.cpp",
            utilisation=lambda machine, layout: 1.0,
            sizes=lambda _: Sizes(chunk=512, sequences=None),
            conventions={"kernel": "engine", "block_size": 256, "windows": "reserved", "reserve": GIB},
            sampler=Sampler(bytes_each=4, from_activations=False),
            samples="chunk",
            float32=True,
            outside=Outside(each=GIB // 2),
            sources={
                "utilisation": "1 GiB is kept free, the default of --fit-target",
                "chunk": "a physical batch, the default of --ubatch-size, as recalled",
                "activations": ACTIVATIONS + ", in float32",
                "sampler": "float32 logits of every token of a physical batch",
                "outside": "the CUDA context and modules: 0.5 GiB, an assumption",
                "windows": "a window and a physical batch, rounded up to 256",
                "joined": "layers are divided, not their products",
                "tables": "none beside weights and cache",
                "keeps": "none beside weights and cache",
                "multiples": "none",
            },
        ),
        Engine(
            name="asbuilt",
            title="asbuilt, with its own kernels and caches",
            source="kernels/memory: proved on the allocator by the tests",
            profiled=False,
            conventions={"kernel": "library", "page": False},
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What was asked of the engine; None and missing conventions are the engine's own."""

    chunk: int | None = None
    sequences: int | None = None
    conventions: Mapping[str, Any] = field(default_factory=dict)


NOTHING = Given()


def find(name: str) -> Engine:
    """Returns the engine of that name; raises InputError for an unknown one."""
    if name not in ENGINES:
        raise InputError(
            "unknown engine", field="engine", value=name, allowed=one_of(ENGINES), fix=near(str(name)[:80], ENGINES)
        )
    return ENGINES[name]
