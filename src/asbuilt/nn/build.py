"""Building the model that a spec describes, and initialising its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from asbuilt.dtypes import torch_name
from asbuilt.kernels import native
from asbuilt.nn.embedding import TokenEmbedding
from asbuilt.nn.experts import MixtureOfExperts
from asbuilt.nn.head import Head
from asbuilt.nn.language_model import LanguageModel
from asbuilt.nn.linear import Linear
from asbuilt.nn.model import Model
from asbuilt.nn.native_layers import native_layers
from asbuilt.nn.registry import module
from asbuilt.spec import model
from asbuilt.spec.part import Weight, buffers, stored_weights

HOLDERS = (Linear, TokenEmbedding, Head)  # of a matrix that can be packed


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


def initialise(built: Model, seed: int, std: float = 0.02, scales: Mapping[str, float] | None = None) -> None:
    """Initialises each weight as declared (`Weight.start`): N(0, std), N(0, std / sqrt(2 n_layers)) or a constant.

    Buffers are filled as declared. Radford et al. 2019 (GPT-2), section 2.3: two branches per layer write to the
    stream, so its variance stays constant. `scales` multiply the standard deviations of weights, by path.
    """
    generator = torch.Generator(device=built.device).manual_seed(seed)
    parameters = dict(built.named_parameters())
    for path, weight, _ in stored_weights(built.spec):
        if path in parameters:
            _fill(parameters[path], weight, std * (scales or {}).get(path, 1.0), built.spec.n_layers, generator)
        else:
            built.get_buffer(path).fill_(weight.fill)


def stored_tensors(built: Model) -> dict[str, Tensor]:
    """Returns all tensors that a checkpoint stores, by path: learned parameters and buffers.

    Of interleaved matrices they are copies, as files hold them.
    """
    tensors: dict[str, Tensor] = dict(built.named_parameters())
    tensors |= {path: built.get_buffer(path) for path, _, _ in buffers(built.spec)}
    for path, _, format, _ in blocks_of(built):
        if format.endswith(native.INTERLEAVED):
            held = tensors[path]
            tensors[path] = native.as_stored(held.flatten(0, -2), format).view(held.shape)
    return {path: tensors[path] for path, _, _ in stored_weights(built.spec)}


def interleave(built: Model) -> int:
    """Interleaves packed matrices in place, as the native kernels read them, and returns how many.

    None without the kernels (`asbuilt[native]`), or on another device than the CPU. A stack of experts is one, if its
    matrices have a multiple of 8 rows. Layers that one native call can compute are given to it, packed or not: modules
    replaced later need another call.
    """
    found, usable = [], native.library() is not None and built.device.type == "cpu"
    for _, blocks, format, keep in list(blocks_of(built)) if usable else ():
        divides = blocks.dim() == 2 or blocks.shape[1] % native.GROUP == 0
        if divides and not format.endswith(native.INTERLEAVED) and native.number(format) >= 0:
            found.append((blocks.flatten(0, -2), format))
            keep(format + native.INTERLEAVED)
    if found:  # the library lets go of Python meanwhile
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(lambda each: native.interleave(*each), found))
    extras = (built.streams, built.per_layer, built.relative)
    plain = usable and type(built) is LanguageModel and all(one is None for one in extras)
    built.native = native_layers(built.blocks, built.spec.d_model) if plain else None
    return len(found)


def blocks_of(built: Model) -> Iterator[tuple[str, nn.Parameter, str, Callable[[str], None]]]:
    """Yields the packed matrices and stacks: path, blocks, format as held, and what is called when that changes."""
    for path, one in built.named_modules():
        if isinstance(one, MixtureOfExperts):
            for name, format in one.formats.items():
                if format is not None:
                    yield f"{path}.{name}", one.get_parameter(name), format, partial(one.formats.__setitem__, name)
        elif isinstance(one, HOLDERS) and one.format is not None and isinstance(one.weight, nn.Parameter):
            yield f"{path}.weight", one.weight, one.format, partial(setattr, one, "format")


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
