"""Checkpoints of a run: weights, optimizer state and random state in safetensors, everything else in JSON.

A checkpoint is a folder, written under another name and renamed when it is complete: whenever the process dies, those
under their own name are whole. Older ones are removed only after that.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asbuilt.checkpoint.save import aside
from asbuilt.errors import InputError
from asbuilt.files import read_object
from asbuilt.nn.build import stored_tensors
from asbuilt.nn.model import Model
from asbuilt.train.optimizer import Optimizers

VERSION = 1
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
LARGEST_STATE = 1 << 24
NAME = re.compile(r"step-(\d{8,})\Z")
RANDOM = "random state of "
ROOM = 1 << 22  # free bytes required beyond the tensors


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: steps done, targets seen, seconds spent, and the loss of its last validation."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    validation: float | None = None


def save_state(folder: Path, model: Model, optimizer: Optimizers, at: Position, recipe: dict[str, Any]) -> Path:
    """Writes the checkpoint of a step and returns its folder; raises InputError if the disk is full."""
    weights = {path: tensor.detach().contiguous() for path, tensor in changing(model).items()}
    state, numbers = _optimizer_state(model, optimizer)
    made = folder / f"step-{at.step:08d}"
    size = sum(t.numel() * t.element_size() for t in (*weights.values(), *state.values()))
    with aside(made, size + ROOM) as partial:
        try:
            save_file(_apart(weights), partial / WEIGHTS)
            save_file(_apart(state), partial / OPTIMIZER)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        describe_state(partial / STATE, at, numbers, recipe)
        for name in (WEIGHTS, OPTIMIZER, STATE):
            sync(partial / name)
    sync(folder)
    return made


def describe_state(file: Path, at: Position, numbers: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Writes what a checkpoint holds beside tensors; `numbers` are those of the optimizer, by path."""
    document = {"version": VERSION, "position": vars(at), "optimizer": numbers, "recipe": recipe}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def changing(model: Model) -> dict[str, Tensor]:
    """Returns the tensors that training changes, by path: frozen weights are those of the model that is tuned."""
    return {
        path: tensor
        for path, tensor in stored_tensors(model).items()
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


def checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run in order of their steps."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := NAME.match(path.name))]
    return [path for _, path in sorted(found)]


def remove_old(folder: Path, keep: int) -> None:
    """Removes all checkpoints but the last `keep`; each loses its name first, so that none is ever half there."""
    for left in folder.glob(".step-*.removed"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    for path in checkpoints(folder)[:-keep]:
        gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def read_recipe(checkpoint: Path) -> dict[str, Any]:
    """Returns the recipe of the run that a checkpoint is of."""
    return read_document(checkpoint)["recipe"]


def load_state(checkpoint: Path, model: Model, optimizer: Optimizers) -> Position:
    """Restores the model, the optimizer and the random state from a checkpoint, and returns where the run stood.

    Raises InputError, before anything has changed, for a checkpoint that is broken or of another model.
    """
    document = read_document(checkpoint)
    weights, state = tensors_of(checkpoint)
    require_alike(changing(model), weights, checkpoint)
    parameters = {path: p for path, p in model.named_parameters() if p.requires_grad}
    restored = _restored(parameters, state, document["optimizer"], checkpoint)
    with torch.no_grad():
        for path, tensor in changing(model).items():
            tensor.copy_(weights[path])
    optimizer.restore(restored)
    _restore_random(state, model.device)
    return Position(**document["position"])


def _optimizer_state(model: Model, optimizer: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the state of every parameter, as tensors under `path/name`, and its numbers by path."""
    paths: dict[Tensor, str] = {parameter: path for path, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = dict(_random_state(model.device))
    numbers: dict[str, Any] = {}
    for parameter, held in optimizer.states():
        for name, value in held.items():
            if isinstance(value, Tensor):
                tensors[f"{paths[parameter]}/{name}"] = value.detach().contiguous()
            else:
                numbers.setdefault(paths[parameter], {})[name] = value
    return tensors, numbers


def _restored(
    parameters: dict[str, nn.Parameter], state: dict[str, Tensor], numbers: dict[str, Any], where: Path
) -> dict[Tensor, dict[str, Any]]:
    restored: dict[Tensor, dict[str, Any]] = {}
    for key, value in state.items():
        path, _, name = key.rpartition("/")
        if key.startswith(RANDOM):
            continue
        if path not in parameters:
            raise InputError(f"has optimizer state of {path}, which is not trained", field=str(where))
        restored.setdefault(parameters[path], {})[name] = value
    for path, values in numbers.items():
        if path in parameters:
            restored.setdefault(parameters[path], {}).update(values)
    return restored


def _random_state(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield f"{RANDOM}cpu", torch.get_rng_state()
    if device.type == "cuda":
        yield f"{RANDOM}cuda", torch.cuda.get_rng_state(device)


def _restore_random(state: dict[str, Tensor], device: torch.device) -> None:
    if f"{RANDOM}cpu" in state:  # a run of many processes draws nothing, and has none
        torch.set_rng_state(state[f"{RANDOM}cpu"])
    if device.type == "cuda" and f"{RANDOM}cuda" in state:
        torch.cuda.set_rng_state(state[f"{RANDOM}cuda"], device)


def require_alike(own: dict[str, Tensor], found: dict[str, Tensor], where: Path) -> None:
    """Raises InputError naming the first tensor that is missing, unknown or of another shape."""
    for path in [*own, *found]:
        mine, theirs = own.get(path), found.get(path)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            shapes = ["none" if one is None else str(tuple(one.shape)) for one in (theirs, mine)]
            raise InputError(
                f"a checkpoint of another model: {path} is {shapes[0]}, the model's is {shapes[1]}", field=str(where)
            )


def read_document(checkpoint: Path) -> dict[str, Any]:
    """Returns what a checkpoint holds beside tensors."""
    document = read_object(checkpoint / STATE, LARGEST_STATE)
    if document.get("version") != VERSION:
        raise InputError(
            "unknown version", field=str(checkpoint / STATE), value=document.get("version"), allowed=f"{VERSION}"
        )
    missing = {"position", "optimizer", "recipe"} - document.keys()
    if missing:
        raise InputError(f"{', '.join(sorted(missing))} missing", field=str(checkpoint / STATE))
    return document


def tensors_of(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns weights and optimizer state; those of a checkpoint of many processes are joined."""
    if (checkpoint / WEIGHTS).exists():
        return _tensors(checkpoint / WEIGHTS), _tensors(checkpoint / OPTIMIZER)
    from asbuilt.train.many.state import whole

    held = whole(checkpoint)
    weights = {key: tensor for key, tensor in held.items() if "/" not in key}
    return weights, {key: tensor for key, tensor in held.items() if "/" in key}


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        fix = "remove this checkpoint to resume from the one before it"
        raise InputError(f"cannot be read: {error}", field=str(path), fix=fix) from error


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors on the CPU, each with a storage of its own, as the format's writer wants them."""
    return {
        name: t.clone() if t.untyped_storage().nbytes() != t.numel() * t.element_size() else t.cpu()
        for name, t in tensors.items()
    }


def sync(path: Path) -> None:
    """Has the system write a file or folder to its disk."""
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:  # a folder on Windows
        return
    try:
        os.fsync(held)
    finally:
        os.close(held)
