"""Building the model that a spec describes, and initialising its weights."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from asbuilt.dtypes import torch_name
from asbuilt.nn.model import Model
from asbuilt.nn.registry import module
from asbuilt.spec import model
from asbuilt.spec.part import Weight, buffers, stored_weights


def build(
    spec: model.Model,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
) -> Model:
    """Returns the model of `spec`, initialised from `seed`; None leaves parameters uninitialised, to be loaded.

    On the meta device nothing is allocated.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, torch_name(dtype)))
    try:
        with torch.device(device):
            built = cast(Model, module(spec, ""))
    finally:
        torch.set_default_dtype(default)
    if seed is not None and torch.device(device).type != "meta":
        initialise(built, seed)
    return built


def initialise(built: Model, seed: int, std: float = 0.02) -> None:
    """Initialises each weight as declared (`Weight.start`): N(0, std), N(0, std / sqrt(2 n_layers)) or a constant.

    Buffers are filled as declared. Radford et al. 2019 (GPT-2), section 2.3: two branches per layer write to the
    stream, so its variance stays constant.
    """
    generator = torch.Generator(device=built.device).manual_seed(seed)
    parameters = dict(built.named_parameters())
    for path, weight, _ in stored_weights(built.spec):
        if path in parameters:
            _fill(parameters[path], weight, std, built.spec.n_layers, generator)
        else:
            built.get_buffer(path).fill_(weight.fill)


def stored_tensors(built: Model) -> dict[str, Tensor]:
    """Returns all tensors that a checkpoint stores, by path: learned parameters and buffers."""
    tensors = dict(built.named_parameters()) | {path: built.get_buffer(path) for path, _, _ in buffers(built.spec)}
    return {path: tensors[path] for path, _, _ in stored_weights(built.spec)}


def built_parameters(built: Model) -> dict[str, nn.Parameter]:
    """Returns the parameters by path, without those that no pass uses, as counted by `cost`."""
    extras = tuple(f"{name}." for name, _ in built.spec.extras())
    return {path: parameter for path, parameter in built.named_parameters() if not path.startswith(extras)}


@torch.no_grad()
def _fill(parameter: nn.Parameter, weight: Weight, std: float, n_layers: int, generator: torch.Generator) -> None:
    if weight.format is not None:
        parameter.zero_()  # packed weights are loaded, not trained
    elif weight.start in ("ones", "zeros"):
        parameter.fill_(float(weight.start == "ones"))
    else:
        scale = std / math.sqrt(2 * n_layers) if weight.start == "depth_scaled" else std
        parameter.normal_(0.0, scale, generator=generator)
