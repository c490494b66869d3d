"""What a device holds at the moments of a step in which it may hold the most, beside its state and saved tensors.

Unless weights are sharded, the moments differ in working memory alone. ZeRO-3 is taken to be PyTorch's FSDP2, as in
`torch/distributed/fsdp/_fully_shard` of PyTorch 2.13, with blocks and what lies outside them as its groups. A group has
its shard, and beside it

- while its weights are gathered, one flat buffer of all of them, and the weights copied out of that
  (`foreach_all_gather`, `foreach_all_gather_copy_out`). Forward, the buffer stays until the next group's is copied out
  (`wait_for_unshard`); backward, until its own is, after which that of the next block is gathered
  (`_backward_prefetch`). What lies outside the blocks is copied out from the first block's pass to the end of the last;
- once gradients have been computed, those in full (`unsharded_param.grad`), outside the blocks until the end of the
  backward pass; then a second copy, in the dtype of gradients, that is reduced and scattered (`foreach_reduce`). It
  stays until the next group scatters its own (`reduce_scatter_states`).

A group of one rank has no buffer, but a copy of its weights, and its gradients are those of the state.

Saved tensors are counted as if all were there: what is gone by the time of a moment, or not yet saved, is taken off it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from asbuilt.plan.train.optimizers import Recipe, State
    from asbuilt.plan.train.stages import StageMemory

# A tied table's gradients from the head and from the embedding, and their sum. Measured, by benchmarks/training.py.
TABLES_ALIVE = 3

Kind = Literal["loss", "block", "gradient"]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes beside state and saved tensors: weights gathered, gradients not yet scattered, and working memory.

    It is in the loss, in a block's pass, or while gradients outside the blocks are computed.
    """

    kind: Kind
    gathered: int = 0
    scattered: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """The total."""
        return self.gathered + self.scattered + self.working


class Group(NamedTuple):
    """Bytes of one group of FSDP2 beside its shard: copied-out weights, their buffer, and each form of gradients."""

    weights: int = 0
    buffer: int = 0
    gradients: int = 0
    reduced: int = 0

    @classmethod
    def of(cls, state: State, recipe: Recipe, ranks: int) -> Group:
        """Returns the group of weights with this state, sharded over `ranks`."""
        alone, scattered = ranks == 1, state.gradients
        return cls(
            weights=state.weights,
            buffer=0 if alone else state.weights,
            gradients=0 if alone else scattered * recipe.weight_width // recipe.gradient_width,
            reduced=scattered,
        )


def moments(stage: StageMemory) -> Iterator[Moment]:
    """Yields the moments of a pipeline stage's fullest device."""
    if stage.divides_blocks:
        yield from _of_fsdp(stage)
        return
    held = {"gathered": stage.stage_weights, "scattered": stage.stage_gradients}
    yield Moment(kind="loss", working=stage.loss_peak, **held)
    yield Moment(kind="block", working=stage.recompute_peak, **held)
    yield Moment(kind="gradient", working=stage.gradient_peak, **held)


def _of_fsdp(stage: StageMemory) -> Iterator[Moment]:
    """The first and the last block's pass, the loss, and the backward passes of loss, blocks and embedding."""
    section, saved = stage.section, stage.saved
    root = _sum(_group(stage, piece.dense) for piece in section.outer)
    late = (stage.shares.copied, stage.shares.after.dense) if section.stage.last else ()
    waiting = sum(_group(stage, state).gradients for state in late)  # from the loss on
    block, count = _largest(stage), sum(count for _, count in section.kinds)
    coming = block.buffer if count > 1 else 0
    kept = 0 if stage.job.offloads_activations else min(kind.kept[stage.job.checkpointing] for kind, _ in section.kinds)
    # the buffer of the group before is held until a group's weights are copied out
    yield _without(saved, "block", root.weights + root.buffer + block.buffer + block.weights)
    yield _without(kept, "block", root.weights + coming + block.buffer + block.weights)
    yield Moment(kind="loss", gathered=root.weights, working=stage.loss_peak)
    yield Moment(kind="gradient", gathered=root.weights, working=max(stage.head_peak, stage.norm_peak))
    # the last block has the next one's buffer beside it, the first the gradients before, those between have both;
    # of one block alone, which has neither, the buffer makes it a bound
    for ahead, behind in ((True, False), (False, True), (True, True))[:count]:
        yield Moment(
            kind="block",
            gathered=root.weights + block.weights + (block.buffer if ahead else 0),
            # as much is gone as the block before had saved
            scattered=waiting + (max(0, block.reduced - kept) if behind else 0),
            working=stage.recompute_peak,
        )
    scattering = waiting + block.gradients + block.reduced + stage.shares.stream
    yield _without(kept, "block", root.weights + coming, scattering)
    encoder = coming if stage.encoded else 0  # its last block's, whose pass is next
    computed = root.gradients + block.reduced + _tables(stage)
    yield _without(saved - stage.encoded, "gradient", root.weights + encoder, computed)
    yield _without(saved, "gradient", 0, root.gradients + root.reduced)


def _without(absent: int, kind: Kind, gathered: int, scattered: int = 0) -> Moment:
    """Returns a moment at which so many bytes of saved tensors are not there: they are taken off the rest."""
    left = max(0, scattered - absent)
    return Moment(kind=kind, gathered=max(0, gathered - max(0, absent - scattered)), scattered=left)


def _tables(stage: StageMemory) -> int:
    """Gradients of a tied table beside the one that waits, where the embedding's is computed."""
    copied, recipe = stage.shares.copied, stage.job.recipe
    if not (stage.section.stage.first and stage.section.stage.last):
        return 0
    one = copied.gradients * recipe.weight_width // recipe.gradient_width
    return TABLES_ALIVE * one - _group(stage, copied).gradients


def _group(stage: StageMemory, dense: State) -> Group:
    return Group.of(dense, stage.job.recipe, stage.layout.sharded)


def _sum(groups: Iterable[Group]) -> Group:
    return Group(*(sum(each) for each in zip(Group(), *groups, strict=True)))


def _largest(stage: StageMemory) -> Group:
    """Returns the largest of a stage's blocks: of unlike ones the most of each."""
    spread = stage.layout.sharded_experts
    found = [
        _sum((_group(stage, kind.dense), Group.of(kind.experts, stage.job.recipe, spread)))
        for kind, _ in stage.section.kinds
    ]
    return Group(*(max(each) for each in zip(*found, strict=True)))
