"""The seconds that a device computes: products with weights, scores, and passes over memory."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.plan.network import Network
from asbuilt.plan.placement import Placement
from asbuilt.plan.train.efficiency import AGAIN, CAST, FUSED_BACKWARD, PASSES, SCORE_BYTES, Reached
from asbuilt.plan.train.shares import Piece
from asbuilt.plan.train.stages import Job, StageMemory


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of one device: FLOP/s at the job's precision, bytes/s of its memory and of its links.

    `narrow` is the rate of fp8. `efficiency`, if given, is the fraction of `rate` reached while it computes, instead of
    those that are `assumed` of each kind; `utilisation`, if given, the fraction reached over the whole step.
    """

    rate: float
    precision: str
    narrow: float
    memory: float
    efficiency: float | None
    assumed: Reached
    utilisation: float | None
    network: Network

    @property
    def reached_memory(self) -> float:
        """Bytes/s of the memory, as reached."""
        return self.memory * (self.assumed.memory if self.efficiency is None else 1)


@dataclass(frozen=True, kw_only=True)
class Computing:
    """What one micro-batch takes a device of a layout, at the speeds that are assumed of each kind."""

    layout: Placement
    job: Job
    speed: Speed

    def stage(self, stage: StageMemory) -> dict[str, float]:
        """Returns the seconds of one micro-batch on one device of a stage, by kind."""
        pieces = [(kind, count, True) for kind, count in stage.section.kinds]
        pieces += [(piece, 1, False) for piece in stage.section.outer]
        moved = sum(count * self._moved_over(piece, inside=inside) for piece, count, inside in pieces)
        if stage.section.stage.last:
            moved += 2 * stage.logits_alive * stage.shares.logits
        return {
            "products": sum(count * self._products(piece, inside=inside) for piece, count, inside in pieces),
            "scores": sum(count * self._scores(piece, inside=inside) for piece, count, inside in pieces),
            "passes": moved / self.speed.reached_memory,
        }

    def _products(self, piece: Piece, *, inside: bool) -> float:
        """Returns the seconds of a piece's products: each as long as its FLOPs or its operands take."""
        speed, job, total = self.speed, self.job, 0.0
        for made in piece.products:
            narrow = job.fp8 and made.narrow
            rate = speed.narrow * speed.assumed.fp8 if narrow else speed.rate * speed.assumed.products
            numbers = made.rows + made.weights / (self.layout.ep if made.spread else 1)
            once = max(made.flops / rate, numbers * job.width / speed.reached_memory)
            again = inside and (job.checkpointing == "full" or (made.repeated and job.checkpointing == "torchtitan-op"))
            total += made.count * once * (1 + made.gradients + again)
        return total

    def _scores(self, piece: Piece, *, inside: bool) -> float:
        """Returns the seconds of products of two activations: fused; all of them with Megatron-LM's recomputation."""
        work, unfused = piece.work, self.job.checkpointing == "megatron-selective"
        scores, alone = (work.scores, work.alone) if unfused else (work.scores_causal, work.alone_causal)
        backward = 2 if unfused else FUSED_BACKWARD
        again = inside and self.job.checkpointing in ("full", "megatron-selective")
        return (scores * (1 + backward + again) + alone * (1 + again)) / (self.speed.rate * self.speed.assumed.scores)

    def _moved_over(self, piece: Piece, *, inside: bool) -> float:
        """Returns the bytes of the passes over a piece's saved and recomputed tensors, scores, and casts to fp8."""
        job, saved = self.job, piece.kept["none"]
        moved = float(PASSES * saved + AGAIN * (saved - piece.kept[job.checkpointing]))
        if inside and job.checkpointing == "megatron-selective":
            moved += (PASSES + AGAIN) * SCORE_BYTES * piece.scored
        if job.fp8:
            ep = self.layout.ep
            cast = [(m.rows + m.weights / (ep if m.spread else 1)) * m.count for m in piece.products if m.narrow]
            moved += CAST * sum(cast)
        return moved
