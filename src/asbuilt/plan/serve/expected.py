"""Expected times: the fractions of bandwidth, rate and link speed that kernels reach, low, middle and high.

Each is an assumption with a source, by kind of product and class of machine. A roofline with all of them 1 gives the
theoretical minimum; where a machine has been measured, or efficiencies are given, those apply instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from asbuilt.catalog.machine import Machine

Level = Literal["low", "middle", "high"]
LEVELS: tuple[Level, ...] = ("low", "middle", "high")
# Accelerators with their own fast memory, cards for workstations and games, chips that share memory with a processor.
MachineClass = Literal["datacentre", "card", "shared memory", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Fractions that are reached: of the rate in products with weights and in scores, and of the bandwidth.

    `bandwidth` is that of reading weights, `attention` that of reading the cache, `link` that of collectives.
    """

    compute: float = 1.0
    scores: float = 1.0
    bandwidth: float = 1.0
    attention: float = 1.0
    link: float = 1.0

    def plain(self) -> dict[str, float]:
        """Returns them by name."""
        return asdict(self)


MINIMUM = Efficiencies()
ASSUMED: dict[MachineClass, dict[Level, Efficiencies]] = {
    "datacentre": {
        "low": Efficiencies(compute=0.4, scores=0.3, bandwidth=0.45, attention=0.45, link=0.35),
        "middle": Efficiencies(compute=0.6, scores=0.5, bandwidth=0.7, attention=0.7, link=0.55),
        "high": Efficiencies(compute=0.8, scores=0.75, bandwidth=0.92, attention=0.9, link=0.82),
    },
    "card": {
        "low": Efficiencies(compute=0.4, scores=0.3, bandwidth=0.5, attention=0.45, link=0.35),
        "middle": Efficiencies(compute=0.65, scores=0.5, bandwidth=0.75, attention=0.7, link=0.55),
        "high": Efficiencies(compute=0.9, scores=0.75, bandwidth=0.93, attention=0.9, link=0.82),
    },
    "shared memory": {
        "low": Efficiencies(compute=0.35, scores=0.3, bandwidth=0.45, attention=0.4, link=0.35),
        "middle": Efficiencies(compute=0.55, scores=0.5, bandwidth=0.7, attention=0.6, link=0.55),
        "high": Efficiencies(compute=0.85, scores=0.75, bandwidth=0.9, attention=0.85, link=0.82),
    },
    "cpu": {
        "low": Efficiencies(compute=0.4, scores=0.3, bandwidth=0.35, attention=0.35, link=0.35),
        "middle": Efficiencies(compute=0.65, scores=0.5, bandwidth=0.6, attention=0.6, link=0.55),
        "high": Efficiencies(compute=0.9, scores=0.7, bandwidth=0.85, attention=0.85, link=0.82),
    },
}
# Figures of papers and guides as recalled; none was looked up in its source again.
SOURCES: dict[str, str] = {
    "compute": "products of large matrices reach 60 to 80% of an H100's dense rate (cuBLAS, beside FlashAttention-3 in "
    "arXiv 2407.08608), a whole prefill 40 to 60%; GeForce cards reach more of their lower rate; on a CPU "
    "docs/plan.md measures 49 to 88% of a prefill's maximum",
    "scores": "FlashAttention-2 reaches 35% of an H100's rate, FlashAttention-3 up to 75% (arXiv 2407.08608)",
    "bandwidth": "a copy reaches 90 to 93% of the data sheet's bandwidth (BabelStream); decoding, with launches and "
    "scheduling, 50 to 60% on A100 and H100 in Databricks' LLM inference guide (2023), more with CUDA graphs",
    "attention": "decoding attention reads the cache at 70 to 90% of the bandwidth (FlashInfer, arXiv 2501.01005), "
    "less where sequences are short or of unequal lengths",
    "link": "NCCL reaches 370 of NVLink 4's 450 GB/s in large all-reduces (nccl-tests), half of that and less in the "
    "small ones of a decode step",
}


def machine_class(machine: Machine) -> MachineClass:
    """Returns the class of a machine."""
    if machine.kind == "cpu":
        return "cpu"
    if machine.shared_memory:
        return "shared memory"
    return "card" if machine.name.startswith(("rtx-", "rx-")) else "datacentre"


def assumed(machine: Machine, level: Level) -> Efficiencies:
    """Returns the assumption for a machine."""
    return ASSUMED[machine_class(machine)][level]
