"""In which precision a run's products are computed: as asked, or the faster one as measured at the run's own shape."""

from __future__ import annotations

import time

import torch

from asbuilt.nn.model import Model
from asbuilt.train.batch import Batch
from asbuilt.train.recipe import Recipe
from asbuilt.train.settings import Precision
from asbuilt.train.step import batch_loss, casting

# What runs before auto has chosen is in float32.
AUTOCAST: dict[Precision, torch.dtype | None] = {"auto": None, "fp32": None, "bf16": torch.bfloat16}
ROUNDS = 3  # passes that are timed in each precision, after one that is not


def narrow_products(device: torch.device) -> bool:
    """Returns whether the device multiplies bfloat16 by instructions of its own."""
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def faster(model: Model, batch: Batch, recipe: Recipe) -> tuple[Precision, str]:
    """Returns the precision whose forward and backward pass of this batch is the faster one here, and why in words.

    No weight is changed and no random number drawn. Without instructions for bfloat16 nothing is timed.
    """
    if not narrow_products(model.device):
        return "fp32", "this processor has no instructions for bfloat16"
    took: dict[Precision, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(1 + ROUNDS):
        for precision, seconds in took.items():
            seconds.append(_seconds(model, batch, recipe, AUTOCAST[precision]))
    # the least of each: what other processes take is only ever added
    wide, narrow = (min(seconds[1:]) for seconds in took.values())
    said = f"a pass of the first batch takes {narrow * 1e3:.3g} ms in bf16, {wide * 1e3:.3g} ms in fp32"
    return ("bf16" if narrow < wide else "fp32"), said


def _seconds(model: Model, batch: Batch, recipe: Recipe, dtype: torch.dtype | None) -> float:
    # the processor's own time: where others work, the clock says which pass was disturbed
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    begun = clock()
    with casting(model, dtype):
        loss = batch_loss(model, batch, z=recipe.step.z_loss, rows=recipe.step.loss_rows or None)
    loss.total.backward()
    float(loss.nats)  # waits for a GPU
    seconds = clock() - begun
    model.zero_grad(set_to_none=True)
    return seconds
