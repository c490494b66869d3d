"""Layers and experts in host memory, computed there by the processor, as llama.cpp's flags of the same names say.

`-ngl N` (`--n-gpu-layers`) puts the last N of a model's layers on the card, of which the output (norm and head) is one:
N blocks more than the model has, or above, are all of them. `--n-cpu-moe N` keeps the routed experts of the first N
blocks in host memory; router and shared experts stay with their block. The cache of a block is where the block is, the
embedding is always in host memory (ggml-org/llama.cpp: src/llama-model.cpp, common/arg.cpp).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError
from asbuilt.plan.devices import known
from asbuilt.plan.placement import Placement
from asbuilt.plan.serve.engines import Engine
from asbuilt.spec import Model, Part, walk

# The share of host memory that weights and caches may take; an assumption. The rest is the system's.
HOST_SHARE = 0.9
ENGINES = ("ideal", "llama.cpp")


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What the host holds and computes: the first `layers` blocks, and the routed experts of the first `experts`.

    `crossing_experts` of the card's blocks have their experts in host memory, so that a pass crosses the bus twice for
    each. `gpu_layers` and `cpu_moe` are the flags' values.
    """

    processor: Machine
    layers: int
    experts: int
    crossing_experts: int
    gpu_layers: int
    cpu_moe: int

    @property
    def room(self) -> int:
        """Bytes of host memory that weights and caches may take."""
        return math.floor(HOST_SHARE * self.processor.memory_bytes())

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags, as llama.cpp takes them."""
        return ("--n-gpu-layers", str(self.gpu_layers), *(("--n-cpu-moe", str(self.cpu_moe)) if self.cpu_moe else ()))


def offload(
    spec: Model,
    *,
    gpu_layers: int | None,
    cpu_moe: int | None,
    processor: Machine | None,
    machine: Machine,
    engine: Engine,
    layout: Placement,
    simulated: bool,
) -> Offload | None:
    """Returns what the flags keep in host memory, None without them; raises InputError where they contradict."""
    if gpu_layers is None and cpu_moe is None:
        if processor is not None:
            raise InputError("nothing is kept in host memory", field="cpu", value=processor.name, fix="give -ngl")
        return None
    first = "ngl" if gpu_layers is not None else "n-cpu-moe"
    if processor is None:
        fix = "name the processor, as in --cpu epyc-9654, or --cpu memory=64GB,bandwidth=80GB/s,fp32=1T"
        raise InputError("is missing", field="cpu", value=None, fix=fix)
    _require_supported(first, spec, machine, engine, layout, simulated)
    if processor.kind != "cpu":
        raise InputError("is not a processor", field="cpu", value=processor.name, fix="an accelerator is --gpu")
    order = known(spec).order
    layers, most = len(order), len(order) + 1
    _require_whole("ngl", gpu_layers, 1_000_000, "0 is a plan on a processor: --gpu NAME")
    _require_whole("n-cpu-moe", cpu_moe, layers, "")
    on_card = most if gpu_layers is None else min(gpu_layers, most)
    above, experts = most - on_card, cpu_moe or 0
    crossing = _with_experts(spec, order[above:experts])
    if cpu_moe is not None and not crossing:
        problem = "names no experts of the card"
        why = f"the first {above} blocks are in host memory" if experts <= above else "these blocks have no experts"
        raise InputError(problem, field="n-cpu-moe", value=cpu_moe, fix=why)
    return Offload(
        processor=processor,
        layers=above,
        experts=experts,
        crossing_experts=crossing,
        gpu_layers=on_card,
        cpu_moe=experts,
    )


def _require_supported(
    first: str, spec: Model, machine: Machine, engine: Engine, layout: Placement, simulated: bool
) -> None:
    refused: dict[str, Any] = {
        "a workload is not simulated with layers in host memory": simulated,
        f"{layout.gpus} devices are not planned with layers in host memory": layout.gpus > 1,
        f"{engine.title} has no such option": engine.name not in ENGINES,
        f"{machine.name} has no memory beside the host's": machine.kind == "cpu" or machine.shared_memory,
        "a model with an encoder is not planned so": "source" in spec.reads,
        "the model does not generate": any(figure == "decode" for _, _, figure, _ in known(spec).unplanned),
    }
    for problem, holds in refused.items():
        if holds:
            raise InputError(problem, field=first, fix="leave one of them out")


def _require_whole(field: str, value: int | None, most: int, fix: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
        raise InputError(field=field, value=value, allowed=f"a whole number from 1 to {most:,}", fix=fix)


def _with_experts(spec: Model, blocks: tuple[int, ...]) -> int:
    """Returns how many of the blocks, given by their kinds, have routed experts."""
    kinds: dict[int, Part] = dict(enumerate(getattr(known(spec).census.small, "blocks", ())))
    spread = {kind for kind, block in kinds.items() if any(part.spreads() for _, part in walk(block))}
    return sum(kind in spread for kind in blocks)


def processor(machine: Machine) -> Machine:
    """Returns a machine given by numbers as a processor."""
    return replace(machine, kind="cpu") if not machine.vendor and machine.name == "custom" else machine
