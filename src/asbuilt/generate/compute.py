"""The compute dtype: as stored, or float32 where this CPU is much faster with it and it fits in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asbuilt import cost
from asbuilt import memory as machine
from asbuilt.kernels import rows, speed
from asbuilt.kernels.memory import memory
from asbuilt.shown import size
from asbuilt.spec import Model, Pass

# float32 replaces a narrow dtype only if it takes less than this fraction of the time: it takes twice the memory.
MUCH = 0.8


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The dtype, the reason for it, the bytes that the request needs in it, and a warning for the user.

    `choice` says, in one line, what was chosen among several; empty where there was nothing to choose.
    """

    dtype: torch.dtype
    why: str
    needed: int
    warning: str = ""
    choice: str = ""


def request_bytes(
    model: Model,
    prompt_tokens: int,
    new_tokens: int,
    dtype: torch.dtype,
    chunk: int | None,
    source: int | None,
    kv: str | None = None,
) -> int:
    """Returns the bytes of one request besides the weights: its cache, and the peak of its prefill passes.

    `source` is the number of tokens that an encoder reads, if there is one; `kv` the format of the cache, None for
    `dtype`, in which states are in any case.
    """
    last = min(chunk or prompt_tokens, prompt_tokens)
    run = Pass(tokens=last, past=prompt_tokens - last, source=source, logits="last", width=dtype.itemsize)
    own = str(dtype).removeprefix("torch.")
    held = cost.cache(model, prompt_tokens + new_tokens, kv or own, source, state=own)
    return held.at_seq + memory(model).peak_bytes(run)


def choose(
    stored: torch.dtype,
    asked: torch.dtype | None,
    prompt_tokens: int,
    new_tokens: int,
    needs: Callable[[torch.dtype], int],
    speeds: Callable[[tuple[torch.dtype, ...]], tuple[speed.Speed, ...]] | None = None,
) -> Compute:
    """Returns the compute dtype of a request on the CPU; `needs(dtype)` is the number of bytes that it needs.

    A requested dtype is used. If a narrow dtype is stored, float32 is chosen if the memory is free and the request
    would run in less than 0.8 of the time, or less time at all on a processor that has no instructions for that dtype.
    `speeds` says how fast each is, by default timed.
    """
    dtype = stored if asked is None else asked
    why = "as stored" if asked is None else "as requested"
    if dtype not in rows.NARROW:
        return Compute(dtype=dtype, why=why, needed=needs(dtype))
    name = str(dtype).removeprefix("torch.")
    tried = (speeds or speed.speeds)((dtype, torch.float32))
    narrow, wide = (found.seconds(prompt_tokens, new_tokens) for found in tried)
    if wide > (1 if speed.has_instructions(dtype) is False else MUCH) * narrow:
        faster = f"{wide / narrow:.1f} times as fast as float32 on this CPU" if wide > narrow else "in half the memory"
        choice = "" if asked is not None else f"computing in {name} as stored, {faster}"
        return Compute(dtype=dtype, why=why, needed=needs(dtype), choice=choice)
    faster = f"{narrow / wide:.1f} times as fast as {name} on this CPU"
    if asked is not None:
        return Compute(
            dtype=dtype, why=why, needed=needs(dtype), warning=f"{name} as requested, although float32 is {faster}"
        )
    needed, have = needs(torch.float32), machine.free()
    if have is not None and needed > have:
        lacking = f"float32 is {faster}, but needs {size(needed)} and {size(have)} are free"
        return Compute(dtype=dtype, why=why, needed=needs(dtype), warning=f"computing in {name}: {lacking}")
    warning = f"stored in {name}, computing in float32, which is {faster}"
    return Compute(dtype=torch.float32, why=f"float32 is {faster}", needed=needed, warning=warning)
