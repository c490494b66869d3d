"""How fast this machine multiplies matrices, and what a batch takes: the two sides of MFU.

MFU is the share of the rate of a large product that a run reaches: FLOPs of the model forward and backward per second,
scores in full, without what activation checkpointing repeats, over that rate (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B).
"""

from __future__ import annotations

import time
from functools import cache

import torch

from asbuilt.cost.bill import flops
from asbuilt.spec import Model
from asbuilt.spec.part import Pass
from asbuilt.train.batch import Batch, ImageTexts

SIZE = {"cpu": 768, "cuda": 8192}  # rows and columns of the product that is timed
TIMES = 7


@cache
def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Returns the FLOPs per second of a large product in this dtype, the fastest of a few."""
    n = SIZE.get(device, SIZE["cpu"])
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    with torch.no_grad():
        for _ in range(TIMES):
            begun = time.perf_counter()
            made = a @ b
            made[0, 0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - begun)
    return 2.0 * n**3 / min(seconds)


@cache
def _flops(spec: Model, batch: int, tokens: int, source: int | None, images: int) -> int:
    return flops(spec, Pass(batch=batch, tokens=tokens, source=source, images=images)).training


def training_flops(spec: Model, batch: Batch) -> int:
    """Returns the FLOPs of a batch forward and backward, scores in full, padding included."""
    B, T = batch.ids.shape
    source = None if batch.source is None else batch.source.shape[1]
    return _flops(spec, B, T, source, int(isinstance(batch, ImageTexts)))
