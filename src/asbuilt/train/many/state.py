"""Distributed checkpoints: each rank writes its own part, and any number of ranks reads them.

They are PyTorch's distributed checkpoints in safetensors, without pickle; the file names, numbers and position are in
the same JSON as those of one process (train/state.py). Weights have the key `path`, state of the optimizer `path/name`,
in both kinds, so that each is read by one process and by many.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from asbuilt.checkpoint.save import aside
from asbuilt.errors import InputError
from asbuilt.nn.model import Model
from asbuilt.plan.train.shares import ADAPTER
from asbuilt.spec.part import stored_weights
from asbuilt.train.many.extent import Extent, whole_of
from asbuilt.train.many.group import Group
from asbuilt.train.many.piece import Piece
from asbuilt.train.optimizer import Optimizers
from asbuilt.train.state import RANDOM, ROOM, STATE, Position, describe_state, read_document, require_alike, sync


def save_state(
    folder: Path, model: Model, optimizer: Optimizers, at: Position, recipe: dict[str, Any], group: Group
) -> None:
    """Writes the checkpoint of a step, each rank its part; raises InputError on all ranks if one cannot."""
    made = folder / f"step-{at.step:08d}"
    places = group.held.extents
    tensors = {path: Piece.of(tensor, places[path]) for path, tensor in kept(model).items()}
    tensors |= _optimizer_pieces(model, optimizer, places)
    size = round(group.anywhere(sum(one.view_of.nbytes for one in tensors.values())))
    writing = aside(made, size + ROOM)
    partial = Path(group.agree(lambda: str(writing.__enter__())))
    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
    except CheckpointException as error:
        causes = {str(cause) for cause, _ in error.failures.values()}
        failed = InputError(f"cannot be written: {'; '.join(sorted(causes))}", field=str(made))
        if group.first:
            writing.__exit__(type(failed), failed, None)
        raise failed from error

    def finish() -> None:
        describe_state(partial / STATE, at, {}, recipe)
        for file in partial.iterdir():
            sync(file)
        writing.__exit__(None, None, None)
        sync(folder)

    group.agree(finish)


def load_state(checkpoint: Path, model: Model, optimizer: Optimizers, group: Group) -> Position:
    """Restores this rank's part of the model and the optimizer, and returns where the run stood."""
    document, held = read_document(checkpoint), group.held
    reader = HuggingFaceStorageReader(str(checkpoint))
    parameters = dict(model.named_parameters())
    stepped = {} if optimizer.offloaded is None else optimizer.offloaded.copies  # where state is made
    found = {key: one for key, one in sizes(reader, checkpoint).items() if not key.startswith(RANDOM)}
    whole = {path: torch.empty(weight.shape, device="meta") for path, weight, _ in stored_weights(held.spec)}
    if adapted(model):
        whole = {path: whole[path] for path in kept(model)}
    require_alike(whole, {key: one for key, one in found.items() if "/" not in key}, checkpoint)
    state: dict[str, Tensor] = {}
    pieces = {path: Piece.of(tensor, held.extents[path]) for path, tensor in kept(model).items()}
    for key, like in found.items():
        path, slash, _ = key.rpartition("/")
        if slash and path not in whole:
            raise InputError(f"has optimizer state of {path}, which is not trained", field=str(checkpoint))
        if slash and path in parameters:
            extent = held.extents[path]
            alike = like.shape == extent.shape and like.dim() > 0  # else it is a number, or has a shape of its own
            mine = stepped.get(parameters[path], parameters[path]).detach()
            state[key] = torch.zeros_like(mine) if alike else torch.empty(like.shape, dtype=like.dtype)
            pieces[key] = Piece.of(state[key], extent if alike else whole_of(tuple(like.shape)))
    load(dict(pieces), storage_reader=reader)
    restored: dict[Tensor, dict[str, Any]] = {}
    for key, value in state.items():
        path, _, name = key.rpartition("/")
        restored.setdefault(parameters[path], {})[name] = value
    optimizer.restore(restored)
    return Position(**document["position"])


def stored(model: Model) -> dict[str, Tensor]:
    """Returns the tensors that checkpoints hold, by path, of those that this rank's stage has."""
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {path: held[path] for path, *_ in stored_weights(model.spec) if path in held}


def kept(model: Model) -> dict[str, Tensor]:
    """Returns the tensors of this rank that its checkpoints hold: of a model with adapters what training changes."""
    held = stored(model)
    if not adapted(model):
        return held
    return {path: one for path, one in held.items() if one.requires_grad or not isinstance(one, nn.Parameter)}


def adapted(model: Model) -> bool:
    """Returns whether adapters alone are trained."""
    return any(path.endswith(ADAPTER) for path, _ in model.named_parameters())


def sizes(reader: HuggingFaceStorageReader, checkpoint: Path) -> dict[str, Tensor]:
    """Returns tensors on the meta device, as large as those that a checkpoint holds."""
    try:
        held = reader.read_metadata().state_dict_metadata
    except Exception as error:  # safetensors has an error of its own for each kind of damage
        fix = "remove this checkpoint to resume from the one before it"
        raise InputError(f"cannot be read: {error}", field=str(checkpoint), fix=fix) from error
    return {
        key: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
        for key, one in held.items()
        if isinstance(one, TensorStorageMetadata)
    }


def whole(checkpoint: Path, *, weights_alone: bool = False) -> dict[str, Tensor]:
    """Returns all tensors of a distributed checkpoint, or its weights and buffers alone, by one process."""
    reader = HuggingFaceStorageReader(str(checkpoint))
    wanted = {key: one for key, one in sizes(reader, checkpoint).items() if not (weights_alone and "/" in key)}
    held = {key: torch.empty_like(one, device="cpu") for key, one in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant here
        load(held, storage_reader=reader, no_dist=True)
    return held


def _optimizer_pieces(model: Model, optimizer: Optimizers, places: dict[str, Extent]) -> dict[str, Piece]:
    paths: dict[Tensor, str] = {parameter: path for path, parameter in model.named_parameters()}
    return {
        f"{paths[parameter]}/{name}": Piece.of(
            value, places[paths[parameter]] if value.shape == parameter.shape else whole_of(tuple(value.shape))
        )
        for parameter, held in optimizer.states()
        for name, value in held.items()
    }
