"""How a request's model is run: on which device, in which dtype, packed or expanded; then loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asbuilt import memory
from asbuilt.checkpoint.load import Contents, headers, load_contents
from asbuilt.checkpoint.packed import PACKABLE
from asbuilt.checkpoint.room import built_bytes, require_room, too_large
from asbuilt.dtypes import CALIBRATED, TORCH_NAMES
from asbuilt.errors import InputError, one_of
from asbuilt.generate import compute as computing
from asbuilt.generate.compute import Compute
from asbuilt.generate.replay import Replay
from asbuilt.kernels import native, speed
from asbuilt.kernels.rows import SHAPE
from asbuilt.nn.build import interleave

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source
    from asbuilt.nn.model import Model
    from asbuilt.spec import Model as Spec

FIX = "use a narrower --dtype or --kv-dtype, fewer --max-new-tokens or a --prefill-chunk"
CALIBRATED_DTYPES = {getattr(torch, TORCH_NAMES[name]): name for name in CALIBRATED}
NARROWER = "use a narrower --dtype or a smaller --context"


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a request says of how its model is run; `packed` None stays packed where that is multiplied faster.

    With `replay` torch computes, whose steps can be recorded, and not the native kernels.
    """

    dtype: torch.dtype | None = None
    packed: bool | None = None
    adapter: str | Path | None = None
    device: str = "cpu"
    replay: Replay | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The tokens of a request, the bytes that it needs in a dtype, and what is held `beside`, and how to need less.

    The first are needed only once the weights are loaded, the second from the beginning.
    """

    prompt_tokens: int
    new_tokens: int
    needs: Callable[[Spec, torch.dtype], int]
    beside: Callable[[Spec, torch.dtype], int] = lambda spec, dtype: 0
    fix: str = FIX


def contents_of(source: Source, how: Running, tokens: tuple[int, int]) -> Contents:
    """Returns the stored tensors as they will be held, packed or expanded, for a prompt and new tokens."""
    headers(source)  # raises if there are no weights
    usable = how.dtype in (None, torch.float32) and how.device == "cpu" and native.library() is not None
    usable = usable and how.replay is None
    if how.packed is None and usable:
        found = Contents(source, packed=None, adapter=how.adapter)
        if not found.formats or _multiplied_packed(found, tokens):
            return found
    return Contents(source, packed=bool(how.packed), adapter=how.adapter)


def ready(source: Source, how: Running, contents: Contents, request: Request) -> tuple[Model, Compute]:
    """Chooses the dtype, checks the memory and loads the model; raises InputError before anything is allocated."""

    def needs(dtype: torch.dtype) -> int:
        return contents.needs(dtype, request.needs(contents.spec, dtype)) + request.beside(contents.spec, dtype)

    stored = contents.dtype(None)
    if how.device == "cpu":
        tokens = request.prompt_tokens, request.new_tokens
        compute = computing.choose(stored, how.dtype, *tokens, needs, speeds_here)
        require_room(compute.needed, source.name, what="to be run", fix=request.fix)
    else:
        dtype = stored if how.dtype is None else how.dtype
        why = "as stored" if how.dtype is None else "as requested"
        compute = Compute(dtype=dtype, why=why, needed=needs(dtype))
        _require_device_room(source, how.device, compute.needed, request.fix)
    model = load_contents(contents, compute.dtype, how.device)
    if how.replay is None and interleave(model):
        instructions = native.instructions()
        why = f"packed weights are multiplied by the native kernels ({instructions}), inputs rounded to 16 bits"
        compute = replace(compute, why=why, choice=_packed_choice(contents, how, request))
    elif native.missing() and blocks(source) and how.device == "cpu":
        gain = "quantised weights are several times faster with the native kernels (in a clone: pip install ./native)"
        compute = replace(compute, warning="; ".join(filter(None, (compute.warning, gain))))
    return model, compute


def _packed_choice(contents: Contents, how: Running, request: Request) -> str:
    if how.packed is not None or how.dtype is not None:
        return ""
    format = _usual(contents)
    if native.fast_blocks():
        return f"computing with packed weights ({format})"
    packed, wide = (one.seconds(request.prompt_tokens, request.new_tokens) for one in speed.packed_speeds(format))
    faster = f", {wide / packed:.1f} times as fast as float32 on this CPU" if wide > packed else " to save memory"
    return f"computing with packed weights ({format}){faster}"


def _multiplied_packed(contents: Contents, tokens: tuple[int, int]) -> bool:
    """Returns whether matrices stay packed: where the native kernels multiply them.

    Not where expanded ones are much faster for this request, which only the portable kernels allow, and fit in the free
    memory.
    """
    format = _usual(contents)
    if not format or native.fast_blocks():
        return bool(format)
    packed, wide = (one.seconds(*tokens) for one in speed.packed_speeds(format))
    free = memory.free()
    fits = free is None or 2 * built_bytes(contents.source.spec, "float32") < free
    return not (wide < computing.MUCH * packed and fits)


def _usual(contents: Contents) -> str:
    """Returns the block format of most of the packed bytes that the native kernels multiply, empty without any."""
    found = {name: nbytes for name, nbytes in contents.formats.items() if native.number(name) >= 0}
    return max(found, key=lambda name: found[name]) if found else ""


def speeds_here(dtypes: tuple[torch.dtype, ...]) -> tuple[speed.Speed, ...]:
    """Returns the speed of products in each dtype: from this machine's stored calibration, without one timed now."""
    if any(dtype not in CALIBRATED_DTYPES for dtype in dtypes):
        return speed.speeds(dtypes)
    from asbuilt.measure.calibrate import stored

    kept = stored()
    if kept is None:
        return speed.speeds(dtypes)
    (outputs, inputs), rows = SHAPE, speed.ROWS
    rates = [kept.rates[CALIBRATED_DTYPES[dtype]] for dtype in dtypes]
    return tuple(
        speed.Speed(prefill=one.matrix.at(rows, inputs, outputs) / rows, decode=one.vector.at(outputs, inputs))
        for one in rates
    )


def blocks(source: Source) -> set[str]:
    """Returns the block formats of a GGUF file's matrices."""
    tensors = {} if source.gguf is None else source.gguf.tensors
    return {tensor.type.lower() for tensor in tensors.values() if len(tensor.shape) == 2}.intersection(PACKABLE)


def devices() -> list[str]:
    """Returns the devices that are here."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    more = [f"cuda:{i}" for i in range(cards)] if cards > 1 else []
    apple = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(["cuda"] if cards else []), *more, *apple]


def require_device(name: str, field: str = "device") -> str:
    """Returns the name; raises InputError, naming the devices that are here, for any other one."""
    here = devices()
    if name not in here and not (name == "cuda:0" and "cuda" in here):
        raise InputError("not on this machine", field=field, value=name, allowed=one_of(here))
    return name


def use_threads(count: int | None, field: str = "threads") -> int:
    """Has torch and the native kernels use so many threads, None as torch would; returns how many."""
    most = os.cpu_count() or 1
    if count is not None:
        if type(count) is not int or not 1 <= count <= most:
            raise InputError(field=field, value=count, allowed=f"from 1 to {most}, the processors of this machine")
        torch.set_num_threads(count)
    return torch.get_num_threads()


def _require_device_room(source: Source, device: str, needed: int, fix: str) -> None:
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        if needed > free:
            raise too_large(needed, free, source.name, "to be run", fix)
