"""On which device a run computes, as `run.device` says: on this machine, for this process."""

from __future__ import annotations

import os

import torch

from asbuilt.errors import InputError, one_of

HOST = torch.device("cpu")


def device_of(name: str, *, alone: bool = True) -> torch.device:
    """Returns the device of this process, which becomes torch's current one where it is a GPU.

    One of many processes has the GPU of its number on its machine (LOCAL_RANK, as torchrun numbers them). Raises
    InputError for a GPU that is not here.
    """
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, colon, said = name.partition(":")
    if kind == "cpu" or (kind == "auto" and not cards):
        return HOST
    if colon and not alone:
        problem = "each process of many has the GPU of its own number"
        raise InputError(problem, field="run.device", value=name, allowed="auto, cpu or cuda under torchrun")
    number = int(said or 0) if alone else int(os.environ.get("LOCAL_RANK", "0"))
    if number >= cards:
        here = ["auto", "cpu", *(["cuda"] if cards else []), *(f"cuda:{i}" for i in range(cards))]
        if alone:
            raise InputError("not on this machine", field="run.device", value=name, allowed=one_of(here))
        problem = f"process {number} of this machine has no GPU of its own: there are {cards}"
        fix = "start no more processes than GPUs, or say run.device=cpu"
        raise InputError(problem, field="run.device", value=name, fix=fix)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
