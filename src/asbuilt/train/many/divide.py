"""Dividing a model's weights, gradients and optimizer state over ranks by FSDP2.

Each block is gathered while it runs, forward and backward; what lies outside the blocks is gathered once per
micro-batch. With one rank per copy, nothing is gathered and gradients are summed over the copies.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from asbuilt.nn.block import Block
from asbuilt.nn.linear import PartModule
from asbuilt.nn.model import Model
from asbuilt.train.many.group import Group


def divide(model: Model, group: Group) -> None:
    """Divides the model in place; its parameters are DTensors from then on."""
    separate(model)
    model.to(group.device)
    whole = group.shard == 1
    for one in model.modules():
        if isinstance(one, Block) and own_weights(one):
            fully_shard(one, mesh=group.mesh, reshard_after_forward=not whole)
    fully_shard(model, mesh=group.mesh, reshard_after_forward=False)
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
