"""What kernels reach of a device's rates in training, by kind of product and of device, each with its source.

The time of products, of the passes over tensors between them, of pipeline and of links are computed with these. They
are not used where one efficiency of everything that a device computes is given, nor with that of a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.catalog.machine import Machine

# The fastest product of any shape, of the dense rate: "maximum achievable matmul FLOPS" of stas00/ml-engineering,
# compute/accelerator (bf16), and training/... for fp8, by the beginnings of machines' names, the longest first.
BEST = {
    "a100-80gb-pcie": 0.822,
    "a100": 0.859,
    "h": 0.803,
    "gh200": 0.83,
    "b": 0.776,
    "gb": 0.776,
    "mi250x": 0.767,
    "mi3": 0.601,
}
BEST_FP8 = {"h": 0.734, "gh200": 0.734, "b": 0.763, "gb": 0.763}
# Where none was measured: the median of those above, and the lower one of fp8.
USUAL, USUAL_FP8 = 0.803, 0.734
# A layer's products beside the fastest: Megatron-LM's layer of 22B on A100 takes 19.0 ms (arXiv 2205.05198, table 4):
# 2.3 of all-reduces, 2.4 of passes over its saved tensors and scores by the rules below, and 14.3 for what the rate
# allows in 9.4 ms: 66% of it, 77% of 85.9%.
SUSTAINED = 0.77
# Fused attention, forward and backward: FlashAttention-2 reaches 50 to 73% on A100 (arXiv 2307.08691) and 35% on H100,
# FlashAttention-3 up to 75% there (arXiv 2407.08608).
SCORES = 0.5
# A copy reaches 90 to 93% of the bandwidth (BabelStream), NCCL 370 of NVLink 4's 450 GB/s (nccl-tests).
MEMORY, LINK = 0.9, 0.82
# Times that a saved tensor's bytes are moved: written and read forward, read backward, its gradient written and read;
# and what is computed again, written and read once more.
PASSES, AGAIN = 5, 2
# Bytes moved per number that is cast to fp8: read for its largest, read and written in both orders (2 + 2 x 3).
CAST = 8
# Scores without a fused kernel: their softmax, what dropout leaves of it, in 16 bits, and its mask (arXiv 2205.05198,
# equation 2).
SCORE_BYTES = 5
# FLOPs of the backward pass of fused attention over those forward: four products for two, and the scores again.
FUSED_BACKWARD = 2.5
# Of a device that computes while it communicates, what communication takes: 20 of 132 multiprocessors (arXiv
# 2412.19437, section 3.2.2).
TAKEN = 20 / 132


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Fractions reached: of the dense rate by products (`fp8`: of that rate) and scores, of bandwidth and links."""

    products: float
    fp8: float
    scores: float = SCORES
    memory: float = MEMORY
    link: float = LINK


def reached(machine: Machine) -> Reached:
    """Returns what is assumed of a machine; rates that were measured, and those of CPUs, are taken as they are."""
    if machine.source.startswith("measured"):
        return Reached(products=1.0, fp8=1.0, memory=1.0)
    return Reached(
        products=SUSTAINED * _best(machine, BEST, USUAL), fp8=SUSTAINED * _best(machine, BEST_FP8, USUAL_FP8)
    )


def _best(machine: Machine, known: dict[str, float], usual: float) -> float:
    """Returns the share of its kind, else the usual one."""
    starts = [start for start in known if machine.name.startswith(start) and machine.vendor in ("NVIDIA", "AMD")]
    return known[max(starts, key=len)] if starts else usual
