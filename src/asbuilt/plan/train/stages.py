"""The peak memory of each pipeline stage's devices, from the shares of their pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from asbuilt.kernels.memory.loss import IN_PLACE, LOGITS_ALIVE, Loss
from asbuilt.plan.placement import Placement
from asbuilt.plan.stage import Stage, stages
from asbuilt.plan.train import schedule as schedules
from asbuilt.plan.train.choices import Checkpointing, Offload
from asbuilt.plan.train.moments import TABLES_ALIVE, Moment, moments
from asbuilt.plan.train.optimizers import Pieces, Recipe, State
from asbuilt.plan.train.schedule import Schedule
from asbuilt.plan.train.shares import LOGITS_WIDTH, Adapters, Piece, Shares, split


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained and how, except the layout: `batch` sequences of `seq` tokens are one micro-batch of a replica.

    A step accumulates `accumulate` micro-batches. `chunks` divides the loss over the rows of a micro-batch,
    `interleave` the blocks of each pipeline stage into model chunks. With `fp8` the products of blocks run in it, with
    `fp8_dispatch` rows go to experts in it, each to at most `expert_nodes` nodes.
    """

    recipe: Recipe
    batch: int
    seq: int
    accumulate: int
    checkpointing: Checkpointing
    lora: Adapters | None
    offload: Offload
    chunks: int
    loss: Loss
    width: int
    interleave: int
    schedule: Schedule = "1f1b"
    fp8: bool = False
    fp8_dispatch: bool = False
    expert_nodes: int | None = None
    overlaps_experts: bool = False
    overlaps_tensor: bool = False
    gathers_context: bool = False

    @property
    def offloads_optimizer(self) -> bool:
        """Whether master weights and optimizer state are in host memory (arXiv 2101.06840)."""
        return self.offload in ("optimizer", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether the blocks' saved tensors are in host memory until the backward pass."""
        return self.offload in ("activations", "all")


@dataclass(frozen=True, kw_only=True)
class Section:
    """The pieces of one pipeline stage, before ZeRO and checkpointing."""

    stage: Stage
    shares: Shares

    @cached_property
    def outer(self) -> tuple[Piece, ...]:
        """The pieces other than blocks."""
        found = ((self.stage.first, self.shares.before), (self.stage.last, self.shares.after))
        return tuple(piece for there, piece in found if there)

    @cached_property
    def kinds(self) -> tuple[tuple[Piece, int], ...]:
        """Each kind of block with its count."""
        return tuple((self.shares.kinds[kind], count) for kind, count in self.stage.blocks)

    @cached_property
    def counted(self) -> tuple[tuple[Piece, int], ...]:
        """Every piece with its count."""
        return (*self.kinds, *((piece, 1) for piece in self.outer))

    @cached_property
    def dense(self) -> State:
        """State of all weights except experts, before ZeRO."""
        copied = self.shares.copied if self.stage.last and not self.stage.first else State()
        return sum((piece.dense.times(count) for piece, count in self.counted), copied)

    @cached_property
    def experts(self) -> State:
        """State of the experts held here, before ZeRO."""
        return sum((piece.experts.times(count) for piece, count in self.counted), State())

    def outside(self, way: Checkpointing) -> int:
        """Returns the bytes of one micro-batch saved outside the blocks, and of tensors that a stack's blocks share."""
        together: dict[str, int] = {}
        for piece, _ in self.counted:
            together |= piece.shared
        return sum(piece.kept[way] for piece in self.outer) + sum(together.values())

    @cached_property
    def lent(self) -> int:
        """Bytes of tensors that one block makes for all of a stack, and autograd does not save."""
        together: dict[str, int] = {}
        for piece, _ in self.counted:
            together |= piece.lent
        return sum(together.values())


def sections(shares: Shares, pp: int) -> list[Section]:
    """Returns the distinct sections: of those with equal pieces the first, which holds the most."""
    return [Section(stage=stage, shares=shares) for stage in stages(shares.blocks, pp)]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline stage of a layout, and what one of its devices holds.

    1F1B (PipeDream-Flush, arXiv 2104.04473): stage s of p holds the saved tensors of min(m, p - s) micro-batches.
    Interleaved (section 2.2), its blocks are v chunks, and it holds those of min(mv, 2(p - s) - 1 + (v - 1)p) chunks.
    ZB-H1 holds what 1F1B does, ZB-V what its first stage does. DualPipe (arXiv 2412.19437, table 2) holds p + 1, and a
    device two stages, s and p - 1 - s, whose weights and gradients are taken to be twice those of s.
    """

    section: Section
    layout: Placement
    job: Job

    @property
    def shares(self) -> Shares:
        """The shares that its pieces belong to."""
        return self.section.shares

    @property
    def chunks_in_flight(self) -> int:
        """Model chunks, each of one micro-batch, whose saved tensors are held at once."""
        job = self.job
        return schedules.held(job.schedule, self.section.stage.number, self.layout.pp, job.interleave, job.accumulate)

    @property
    def in_flight(self) -> int | float:
        """Micro-batches whose saved tensors are held at once; fractional if some are held only in part."""
        whole, rest = divmod(self.chunks_in_flight, self.job.interleave)
        return self.chunks_in_flight / self.job.interleave if rest else whole

    @property
    def outer_in_flight(self) -> int:
        """Micro-batches in flight of the pieces outside the blocks.

        The first stage's first chunk starts a second round before the first one returns; the last stage holds one.
        """
        if self.job.interleave == 1:
            return self.chunks_in_flight
        most = (
            2 * self.layout.pp
            if self.section.stage.first
            else 1
            if self.section.stage.last
            else math.ceil(self.in_flight)
        )
        return min(self.job.accumulate, most)

    def _sharded(self, dense: int, experts: int, stage: int) -> int:
        """Returns the bytes of a state that ZeRO shards from `stage` on."""
        if self.layout.zero < stage:
            return dense + experts
        return split(dense, self.layout.sharded) + split(experts, self.layout.sharded_experts)

    @property
    def stages_held(self) -> int:
        """Stages that one device holds."""
        return 2 if self.job.schedule == "dualpipe" and self.layout.pp > 1 else 1

    @cached_property
    def state(self) -> State:
        """The state on one device, after sharding by ZeRO."""
        dense, experts = self.section.dense, self.section.experts
        names = dict.fromkeys((*dense.optimizer, *experts.optimizer))
        pieces: Pieces = {
            name: self._updated(dense.optimizer.get(name, 0), experts.optimizer.get(name, 0)) for name in names
        }
        return State(
            weights=self.stages_held * self._sharded(dense.weights, experts.weights, 3),
            gradients=self.stages_held * self._sharded(dense.gradients, experts.gradients, 2),
            master=self._updated(dense.master, experts.master),
            optimizer=pieces,
        )

    def _updated(self, dense: int, experts: int) -> int:
        """Returns the bytes of what the optimizer updates: of two stages, two devices that hold both share it."""
        return self._sharded(dense, experts, 1) * (1 if self.layout.zero else self.stages_held)

    @property
    def divides_blocks(self) -> bool:
        """Whether weights are gathered block by block: by FSDP2, which divides them or, as HSDP of one rank, does not.

        A pipeline's stage gathers all of its weights once, and keeps them for all micro-batches, as torchtitan does.
        """
        return self.layout.zero == 3 and self.shares.rows > 0 and (self.layout.pp == 1 or self.layout.sharded == 1)

    @property
    def stage_weights(self) -> int:
        """Copies of weights that a pipeline's stage gathers beside its shards."""
        if self.layout.zero < 3 or not self.shares.rows:
            return 0
        return self.stages_held * (self.section.dense.weights + self.section.experts.weights)

    @property
    def stage_gradients(self) -> int:
        """Gradients before ZeRO-2 and 3 reduce and scatter them: of one block, of a pipeline's stage all of them."""
        if self.layout.zero < 2 or not self.shares.rows:
            return 0
        dense, experts = self.section.dense.gradients, self.section.experts.gradients
        if self.layout.pp > 1:
            return self._beyond_shards(dense, dense, experts, experts)
        one, spread = self._block_gradients
        whole = max([one, *(piece.dense.gradients for piece in self.section.outer)])
        return self._beyond_shards(dense, whole, experts, spread)

    def _beyond_shards(self, dense: int, whole: int, experts: int, stack: int) -> int:
        """Returns the bytes beyond a rank's own shards while `whole` dense bytes and a `stack` of experts are there."""
        found = _beyond(dense, whole, self.layout.sharded) + _beyond(experts, stack, self.layout.sharded_experts)
        return self.stages_held * found

    @property
    def _block_gradients(self) -> tuple[int, int]:
        """The maximum over blocks, (dense, experts)."""
        kinds = [kind for kind, _ in self.section.kinds]
        return max(k.dense.gradients for k in kinds), max(k.experts.gradients for k in kinds)

    @cached_property
    def moment(self) -> Moment:
        """The moment at which the device holds the most; of equal ones the first."""
        return max(moments(self), key=lambda one: one.total)

    @property
    def gathered(self) -> int:
        """Copies of weights that ZeRO-3 has gathered at that moment."""
        return self.moment.gathered

    @property
    def scattered(self) -> int:
        """Gradients that ZeRO-2 and 3 have not yet scattered at that moment, beside those of the state."""
        return self.moment.scattered

    @cached_property
    def kept(self) -> int:
        """Bytes that the blocks save for the backward pass of one micro-batch."""
        return sum(count * kind.kept[self.job.checkpointing] for kind, count in self.section.kinds)

    @cached_property
    def activations(self) -> int:
        """Bytes that the blocks save for the backward pass, of all micro-batches in flight."""
        return split(self.chunks_in_flight * self.kept, self.job.interleave)

    @property
    def saved(self) -> int:
        """Bytes saved on the device, in the blocks and outside them, of all micro-batches in flight."""
        return self.outside + (0 if self.job.offloads_activations else self.activations)

    @property
    def encoded(self) -> int:
        """Bytes of them that an encoder's blocks save, which are there still when all others have been used."""
        stage, way = self.section.stage, self.job.checkpointing
        mine = sum(n * self.shares.kinds[kind].kept[way] for kind, n in stage.blocks if kind in self.shares.encoding)
        return 0 if self.job.offloads_activations else split(self.chunks_in_flight * mine, self.job.interleave)

    @cached_property
    def outside(self) -> int:
        """Bytes saved outside the blocks, and of tensors that blocks share, or need again when they are repeated."""
        lent = self.section.lent if self.job.checkpointing != "none" else 0
        return self.outer_in_flight * (self.section.outside(self.job.checkpointing) + lent)

    @cached_property
    def logits(self) -> int:
        """Bytes of one float32 tensor of the logits processed at once; 0 except on the last stage."""
        if not self.section.stage.last or not self.shares.rows:
            return 0
        return self.shares.logits // self.shares.rows * split(self.shares.rows, self.job.chunks)

    @cached_property
    def loss_peak(self) -> int:
        """The tensors of the logits' size that the loss holds, and what is kept of other chunks."""
        return self.logits_alive * self.logits + self.loss_gradients

    @property
    def logits_alive(self) -> int:
        """Tensors of the logits' size, in float32, that the loss holds at once."""
        job = self.job
        in_place = job.loss == "asbuilt" and self.shares.read_once and job.width == LOGITS_WIDTH
        return IN_PLACE if in_place else LOGITS_ALIVE[job.loss]

    @cached_property
    def loss_gradients(self) -> int:
        """Gradients that a chunked loss keeps: of its input and, where a chunk's are computed at once, of the head."""
        if not self.section.stage.last or self.job.chunks == 1:
            return 0
        return self.shares.stream + (self._head_gradient if self.job.loss == "asbuilt" else 0)

    @property
    def _head_gradient(self) -> int:
        """A new gradient of the head's matrix, or of the table that it shares."""
        return max(self.shares.copied.gradients, self.shares.after.dense.gradients)

    @property
    def norm_peak(self) -> int:
        """What the norm before the head needs in its backward pass, its gradient being where the head's input was."""
        return self.shares.norm if self.section.stage.last else 0

    @cached_property
    def recompute_peak(self) -> int:
        """Tensors that one block recomputes, and its working memory, where what runs later has let go of its own."""
        return max(0, *(self._room(kind, count) for kind, count in self.section.stage.blocks))

    @property
    def largest(self) -> Piece:
        """The block that needs the most working memory."""
        return self.shares.kinds[max(self.section.stage.blocks, key=lambda one: self._room(*one))[0]]

    def _room(self, number: int, count: int) -> int:
        """Returns the bytes that the last or the first block of a kind needs beside all that is saved.

        In the backward pass of the first all others' saved tensors are gone, but not gradients that add up over them.
        """
        kind, way = self.shares.kinds[number], self.job.checkpointing
        last = kind.room(way)
        if kind.bounded:
            return last
        made = kind.made_again if way != "none" else 0
        first = last + made + (kind.awaited if count > 1 else 0) - (count - 1) * kind.kept[way]
        decoded = self.activations - self.encoded if number in self.shares.encoding else 0
        above = self.shares.after.kept[way] if self.section.stage.last else 0
        return max(last, first) - above - (0 if self.job.offloads_activations else decoded)

    @cached_property
    def head_peak(self) -> int:
        """A new gradient of the head's matrix, and the logits' gradient; 0 except on the last stage."""
        if not self.section.stage.last or not self.shares.rows:
            return 0
        logits = self.logits * self.job.width // LOGITS_WIDTH
        return logits + self._head_gradient + (self.loss_gradients if self.job.loss == "asbuilt" else 0)

    @cached_property
    def gradient_peak(self) -> int:
        """A new gradient of the head's matrix beside the one it is added to, and the logits' gradient.

        A tied table's gradient waits for the embedding's and for their sum: three of them when all else is freed. From
        ZeRO-2 on, new gradients count as not yet scattered.
        """
        if not self.section.stage.last or self.layout.zero >= 2:
            return 0
        tied = self.shares.copied.gradients
        tables, entering = TABLES_ALIVE * tied - (self.saved - self.encoded), self.shares.entering - self.saved
        return max(self.head_peak, self.norm_peak, *((tables, entering) if self.section.stage.first else (0,)))

    @property
    def temporary(self) -> int:
        """The peak of temporary memory on top of saved tensors."""
        return self.moment.working

    @cached_property
    def on_host(self) -> int:
        """Bytes of this device that are in host memory."""
        state = self.state
        optimizer = state.master + sum(state.optimizer.values()) if self.job.offloads_optimizer else 0
        return optimizer + (self.activations if self.job.offloads_activations else 0)

    @cached_property
    def total(self) -> int:
        """The device's peak memory."""
        return self.state.total + self.activations + self.outside + self.moment.total - self.on_host


def _beyond(held: int, whole: int, ranks: int) -> int:
    """Returns the bytes beyond a rank's own shard of `held` while `whole` is gathered."""
    return whole + split(held - whole, ranks) - split(held, ranks)


def fullest(found: list[StageMemory]) -> StageMemory:
    """Returns the stage whose devices hold the most."""
    return max(found, key=lambda stage: stage.total)
