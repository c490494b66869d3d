"""Grouped products: rows sorted by expert, each group multiplied by its own expert's matrix.

Shapes: rows R, experts E, inputs I, outputs O.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.packed import linear
from asbuilt.spec.part import Kernel


def grouped_product(
    x_RI: Tensor,
    weight_EOI: Tensor,
    counts: list[int],
    kernel: Kernel,
    bias_EO: Tensor | None = None,
    format: str | None = None,
) -> Tensor:
    """Returns (R, O): the first counts[0] rows times expert 0's matrix transposed, the next with expert 1's, and so on.

    `bias_EO` is added per expert. With a `format` the matrices are packed, and dequantised one expert at a time. The
    reference multiplies every group and concatenates the results, as does training, whose gradient is then one tensor
    for all experts. Without gradients each used expert writes to its place in the output, and the others are not read.
    """
    biases = [None] * len(counts) if bias_EO is None else bias_EO.unbind()
    if kernel == "reference" or torch.is_grad_enabled():
        groups = zip(x_RI.split(counts), weight_EOI.unbind(), biases, strict=True)
        product = F.linear if format is None else partial(linear, format=format)
        return torch.cat([product(rows, weight, bias) for rows, weight, bias in groups])
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    start = 0
    for expert, (count, bias) in enumerate(zip(counts, biases, strict=True)):
        if count:
            rows, place = x_RI[start : start + count], out_RO[start : start + count]
            linear(rows, weight_EOI[expert], bias, format=format, out=place)
            start += count
    return out_RO


def group_counts(chosen: Tensor, n_experts: int) -> list[int]:
    """Returns the number of rows per expert.

    On the meta device the choices are unknown, and rows are spread evenly.
    """
    if chosen.device.type == "meta":
        each, more = divmod(chosen.numel(), n_experts)
        return [each + (expert < more) for expert in range(n_experts)]
    return torch.bincount(chosen.flatten(), minlength=n_experts).tolist()
