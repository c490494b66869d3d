"""Dividing a model over ranks: layers by tensor parallelism, experts; weights, gradients and optimizer state by FSDP2.

FSDP2 gathers each block while it runs, forward and backward; what lies outside the blocks is gathered once per
micro-batch. With one rank per copy, nothing is gathered and gradients are summed over the copies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from asbuilt.nn.block import Block
from asbuilt.nn.linear import PartModule
from asbuilt.nn.model import Model
from asbuilt.train.divisible import tensor_share
from asbuilt.train.many.context import divide_sequences
from asbuilt.train.many.expert import mixtures, spread_experts, stacks
from asbuilt.train.many.extent import Extent, extents
from asbuilt.train.many.group import Group, Held
from asbuilt.train.many.pipeline import Staged, chunks_of, cut
from asbuilt.train.many.state import stored
from asbuilt.train.many.tensor import compute_together, partial_weights, share


def divide(model: Model, group: Group, vocabulary: bool = True) -> Model:
    """Returns this rank's model, of the whole one; its parameters are DTensors."""
    whole = model.spec
    own = tensor_share(whole, group.tensor, vocabulary)
    places = extents(whole, own, group.mesh.get_local_rank("tensor"), group.tensor)
    if group.tensor > 1:
        model = share(model, own, places)
        compute_together(model, whole, group.mesh.get_group("tensor"))
    if group.sequences is not None:
        divide_sequences(model, group.sequences)
    separate(model)
    if group.stages > 1:
        cut(model, chunks_of(whole.n_layers, group))
        places = {path: places[path] for path in places if path in stored(model)}
    of_experts: dict[str, Extent] = {}
    if group.expert > 1:
        of_experts = spread_experts(model, group.spread.get_group("expert"), places)
        places |= of_experts
    fully_share(model, group)
    held = dict(model.named_parameters())
    partial = [held[path] for path in partial_weights(own, whole) if path in held]
    replicas = {path: group.at.of_experts[0] if path in of_experts else group.at.replicate for path in held}
    copies: dict[Tensor, int] = {one: places[path].copies * replicas[path] for path, one in held.items()}
    if group.stages > 1:
        group.pipeline = Staged(model, group)
    group.held = Held(spec=whole, extents=places, partial=partial, copies=copies)
    return model


def fully_share(model: Model, group: Group) -> None:
    """Divides weights, gradients and state over the data-parallel ranks, in place."""
    model.to(group.device)
    whole = group.shard == 1
    spread = [one for _, one in mixtures(model)] if group.expert > 1 else []
    apart = {stack for one in spread for stack in stacks(one)}
    for one in model.modules():
        if isinstance(one, Block) and own_weights(one):
            fully_shard(one, mesh=group.data, reshard_after_forward=not whole, ignored_params=apart)
    for one in spread:
        others = set(one.parameters()) - apart
        fully_shard(one, mesh=group.experts, reshard_after_forward=not whole, ignored_params=others)
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
