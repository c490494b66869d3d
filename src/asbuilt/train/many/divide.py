"""Dividing a model over ranks: layers by tensor parallelism; weights, gradients and optimizer state by FSDP2.

FSDP2 gathers each block while it runs, forward and backward; what lies outside the blocks is gathered once per
micro-batch. With one rank per copy, nothing is gathered and gradients are summed over the copies.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from asbuilt.nn.block import Block
from asbuilt.nn.linear import PartModule
from asbuilt.nn.model import Model
from asbuilt.train.divisible import tensor_share
from asbuilt.train.many.extent import extents
from asbuilt.train.many.group import Group, Held
from asbuilt.train.many.tensor import compute_together, partial_weights, share


def divide(model: Model, group: Group, vocabulary: bool = True) -> Model:
    """Returns this rank's model, of the whole one; its parameters are DTensors."""
    whole = model.spec
    own = tensor_share(whole, group.tensor, vocabulary)
    places = extents(whole, own, group.mesh.get_local_rank("tensor"), group.tensor)
    if group.tensor > 1:
        model = share(model, own, places)
        compute_together(model, whole, group.mesh.get_group("tensor"))
    fully_share(model, group)
    held = dict(model.named_parameters())
    partial = [held[path] for path in partial_weights(own, whole)]
    group.held = Held(spec=whole, extents=places, partial=partial, copies={held[p]: places[p].copies for p in held})
    return model


def fully_share(model: Model, group: Group) -> None:
    """Divides weights, gradients and state over the data-parallel ranks, in place."""
    separate(model)
    model.to(group.device)
    whole = group.shard == 1
    for one in model.modules():
        if isinstance(one, Block) and own_weights(one):
            fully_shard(one, mesh=group.data, reshard_after_forward=not whole)
    fully_shard(model, mesh=group.data, reshard_after_forward=False)
    for one in model.modules():
        if isinstance(one, FSDPModule):
            # gradients are divided by the targets of all ranks already
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)


def reshard(model: Model) -> None:
    """Frees what a pass without gradients has left gathered: the model's parameters are each rank's own part again."""
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


def own_weights(block: Block) -> bool:
    """Returns whether a block runs its own weights, and no other block does."""
    return block.part.weights_from is None and block.part.weights_name is None


@torch.no_grad()
def separate(model: nn.Module) -> None:
    """Gives maps that lie in one tensor tensors of their own, so that it is not held beside their parts."""
    for one in model.modules():
        if isinstance(one, PartModule):
            for fused in one._together:
                fused.separate()
