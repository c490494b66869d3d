"""The time of a step: what each device computes, moves and sends, at the machine's rates.

There are two ways, never mixed. By default products run at the fraction of the dense rate that kernels reach, and the
pipeline bubble, exposed communication and the optimizer's pass over its state are added: the utilisation of the whole
step is a result. Or that utilisation is given, as published runs report it, and nothing is added.

The first is a lower bound with stated assumptions: rings at the slowest link's full rate, perfect overlap of what can
be overlapped (gradients and gathered weights of data parallelism, keys and values of a context's ring), and the rest is
exposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from asbuilt.plan.lines import Line, total
from asbuilt.plan.network import Network, Traffic, ring
from asbuilt.plan.placement import Placement
from asbuilt.plan.train.options import ASSUMPTIONS
from asbuilt.plan.train.shares import LOGITS_WIDTH, split
from asbuilt.plan.train.stages import Job, StageMemory

# Backward has two thirds of a training step's FLOPs.
BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of one device: FLOP/s at the job's precision, bytes/s of its memory and of its links.

    `efficiency` is the fraction of `rate` reached while it computes; `utilisation`, if given, the fraction reached over
    the whole step.
    """

    rate: float
    precision: str
    memory: float
    efficiency: float
    utilisation: float | None
    network: Network

    @property
    def reached(self) -> float:
        """FLOP/s reached while it computes."""
        return self.rate * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Bytes that one rank's optimizer reads and writes: gradients, trained weights, and its state."""

    gradients: int
    trained: int
    kept: int
    master: bool


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One optimizer step of a layout, from its stages.

    `needed` is the model's FLOPs per token by convention, without recomputation, as a utilisation counts them.
    """

    stages: list[StageMemory]
    layout: Placement
    job: Job
    speed: Speed
    needed: Mapping[str, float]

    @cached_property
    def passes(self) -> int:
        """Forward passes per micro-batch: two with full checkpointing."""
        return 2 if self.job.checkpointing == "full" else 1

    def _flops(self, stage: StageMemory) -> int:
        """Returns the FLOPs of one micro-batch on one device: training, masked pairs skipped, and recomputation."""
        total = 0
        for kind, count in stage.section.kinds:
            work = kind.work
            again = work.forward() if self.job.checkpointing == "full" else 0
            total += count * (work.training() + again)
        return total + sum(piece.work.training() for piece in stage.section.outer)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one micro-batch on the busiest device."""
        return max(self._flops(stage) for stage in self.stages)

    @cached_property
    def compute_seconds(self) -> float:
        """Seconds of computing one micro-batch."""
        return self.flops / self.speed.reached

    @cached_property
    def tensor(self) -> Traffic:
        """Tensor-parallel traffic: per residual branch one all-reduce forward and one backward.

        Full checkpointing repeats those forward, up to the last sum of a block, on which no gradient depends; selective
        keeps their results. A divided table reduces its lookups once forward, a divided head the gradient of its input
        once backward, and the loss three float32 numbers a token; with sequence parallelism each is two halves of the
        same size (arXiv 1909.08053, section 3; 2205.05198, section 4.2). Weights within what is divided that each rank
        has whole, such as norms of heads, sum their gradients once a step.
        """
        nbytes = 2 * ring(self.layout.tp) * max(self._reduced(stage) for stage in self.stages)
        formula = (
            "2 (n-1)/n x stream, a residual branch, forward, backward and where blocks are repeated, x micro-batches;"
            " table and head once; three numbers a token in the loss"
        )
        return self._traffic(nbytes, self.layout.tp, 1, formula)

    def _reduced(self, stage: StageMemory) -> int:
        """Returns the bytes that a device's all-reduces over tensor-parallel ranks are of, in one step."""
        repeated = self.job.checkpointing == "full"
        numbers = sum((2 * piece.reduced + repeated * piece.again) * n for piece, n in stage.section.kinds)
        numbers += sum(piece.reduced for piece in stage.section.outer)
        measured = sum(piece.measured for piece in stage.section.outer)
        summed = sum(piece.summed * n for piece, n in stage.section.counted)
        ways = self.layout.replicas if self.layout.zero >= 2 else 1
        return self.job.accumulate * (numbers * self.job.width + measured * LOGITS_WIDTH) + split(summed, ways)

    @cached_property
    def expert(self) -> Traffic:
        """Expert-parallel traffic: rows to the experts and back (all-to-all), forward and backward."""
        numbers = max(sum(p.sent * n for p, n in stage.section.counted) for stage in self.stages)
        per_pass = 2 * ring(self.layout.ep) * numbers * self.job.width
        return self._traffic(
            per_pass * (self.passes + 1) * self.job.accumulate,
            self.layout.ep,
            self.layout.tp,
            "2 (n-1)/n x chosen rows, a mixture, forward and backward, x micro-batches",
        )

    @cached_property
    def context(self) -> Traffic:
        """Context-parallel traffic: keys and values on the ring, backward with gradients too (arXiv 2310.01889)."""
        passed = max(sum(p.passed * n for p, n in stage.section.counted) for stage in self.stages)
        return self._traffic(
            passed * (self.passes + 2) * self.job.accumulate,
            self.layout.cp,
            self.layout.tp,
            "keys and values of the other ranks, once forward and twice backward, x micro-batches",
        )

    @cached_property
    def pipeline(self) -> Traffic:
        """Pipeline traffic: activations and their gradient; a tied table's gradient between first and last stage."""
        layout, shares = self.layout, self.stages[0].shares
        if layout.pp == 1:
            return NOTHING
        stream = 2 * shares.stream * self.job.accumulate * self.job.interleave
        return self._traffic(
            stream + shares.copied.gradients,
            layout.pp,
            layout.tp * layout.replicas,
            "stream and its gradient x micro-batches x chunks of a stage, and the gradient of a tied table",
        )

    @cached_property
    def data(self) -> Traffic:
        """Data-parallel traffic: gradients averaged, weights gathered over replicas (arXiv 1910.02054, section 7)."""
        layout, found = self.layout, []
        for stage in self.stages:
            dense, experts = stage.section.dense, stage.section.experts
            outside = sum(piece.dense.weights for piece in stage.section.outer)
            found.append(
                self._sharded(2 * dense.weights - outside, dense.gradients, layout.replicas, layout.tp)
                + self._sharded(2 * experts.weights, experts.gradients, layout.copies, layout.tp * layout.ep)
            )
        nbytes, seconds = max((sum(b for b, _ in f), sum(s for _, s in f)) for f in found)
        formula = DATA_FORMULAS[layout.zero]
        source = self.speed.network.source(layout.replicas, layout.tp)
        return Traffic(bytes=round(nbytes), seconds=seconds, formula=formula, source=source)

    def _sharded(self, gathered: int, gradients: int, ranks: int, stride: int) -> list[tuple[float, float]]:
        """Returns (bytes, seconds) of one group; `gathered` are the weights that ZeRO-3 gathers for one micro-batch.

        Blocks are gathered forward and backward; weights outside them stay gathered in between, like FSDP's root.
        """
        if ranks == 1:
            return []
        m, zero = self.job.accumulate, self.layout.zero
        recipe = self.job.recipe  # frozen weights do not change, so only ZeRO-3 gathers them
        trained = gradients // recipe.gradient_width * recipe.weight_width
        volume = (
            2 * gradients,
            gradients + trained,
            m * gradients + trained,
            m * (gathered + gradients),
        )[zero] * ring(ranks)
        return [(volume, volume / self.speed.network.bandwidth(ranks, stride))]

    @cached_property
    def offload(self) -> Traffic:
        """Offload traffic with host memory: gradients and weights once per step, saved tensors per micro-batch."""
        nbytes = max(self._moved(stage) for stage in self.stages)
        formula = "gradients to the host, trained weights back, and saved tensors both ways"
        return Traffic(
            bytes=nbytes,
            seconds=nbytes / self.speed.network.host,
            formula=formula,
            source=self.speed.network.named["host"],
        )

    def _moved(self, stage: StageMemory) -> int:
        """Returns the bytes to and from the host: of the shard that a rank updates, and of its saved tensors."""
        nbytes = 2 * stage.kept * self.job.accumulate if self.job.offloads_activations else 0
        if self.job.offloads_optimizer:
            nbytes += sum(shard.gradients + shard.trained for shard in self._shards(stage))
        return nbytes

    def _shards(self, stage: StageMemory) -> list[Shard]:
        """Returns what one rank's optimizer updates, of experts and of other weights; from ZeRO-1 on its share."""
        layout, width = self.layout, self.job.recipe.gradient_width
        groups = ((stage.section.dense, layout.replicas), (stage.section.experts, layout.copies))
        found = []
        for state, ranks in groups:
            ways = ranks if layout.zero else 1
            trained = state.gradients // width * self.job.recipe.weight_width
            kept = state.master + sum(state.optimizer.values())
            found.append(
                Shard(
                    gradients=split(state.gradients, ways),
                    trained=split(trained, ways),
                    kept=split(kept, ways),
                    master=state.master > 0,
                )
            )
        return found

    def _traffic(self, nbytes: float, ranks: int, stride: int, formula: str) -> Traffic:
        network = self.speed.network
        seconds = nbytes / network.bandwidth(ranks, stride)
        return Traffic(bytes=round(nbytes), seconds=seconds, formula=formula, source=network.source(ranks, stride))

    @cached_property
    def communication(self) -> dict[str, Traffic]:
        """The bytes that one device sends per step, by kind of parallelism."""
        return {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
            "offload": self.offload,
        }

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer's pass over its state at full memory bandwidth; 0 if the host does it.

        It reads gradients and state, writes state and weights, and reads weights only without a master copy.
        """
        if self.job.offloads_optimizer:
            return 0.0
        return max(self._updated(stage) for stage in self.stages) / self.speed.memory

    def _updated(self, stage: StageMemory) -> int:
        """Returns the memory traffic of one device's optimizer step."""
        shards = self._shards(stage)
        return sum(s.gradients + s.trained * (1 if s.master else 2) + 2 * s.kept for s in shards)

    @cached_property
    def micro_seconds(self) -> float:
        """Seconds of one micro-batch in the slowest stage, forward and backward."""
        return self.compute_seconds + sum(self._waited.values())

    @cached_property
    def _waited(self) -> dict[str, float]:
        """Exposed communication per micro-batch, by kind; of a context's ring only what exceeds computing."""
        m = self.job.accumulate
        return {
            "tensor": self.tensor.seconds / m,
            "expert": self.expert.seconds / m,
            "pipeline": self.pipeline.seconds / m,
            "context": max(0.0, self.context.seconds / m - self.compute_seconds),
        }

    @cached_property
    def idle(self) -> float:
        """The idle time of a stage, in micro-batches: (p-1) / v."""
        return (self.layout.pp - 1) / self.job.interleave

    @cached_property
    def bubble(self) -> float:
        """The idle fraction of a stage with m micro-batches: (p-1) / (mv + p-1)."""
        return self.idle / (self.job.accumulate + self.idle)

    @cached_property
    def exposed_seconds(self) -> float:
        """Exposed seconds of data parallelism: it overlaps with the last backward pass, from ZeRO-2 on with all passes.

        It overlaps with computing, and with communication on other links than its own.
        """
        own = self.data.source
        others = sum(s for name, s in self._waited.items() if self.communication[name].source != own)
        passes = self.job.accumulate if self.layout.zero >= 2 else BACKWARD
        return max(0.0, self.data.seconds - passes * (self.compute_seconds + others))

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of one step by cause; they sum to the step."""
        if self.speed.utilisation is not None:
            return {"at the utilisation": self._at(self.speed.utilisation)}
        m = self.job.accumulate
        return {
            "computing": m * self.compute_seconds,
            **{name: m * seconds for name, seconds in self._waited.items()},
            "bubble": self.idle * self.micro_seconds,
            "data": self.exposed_seconds,
            "offload": self.offload.seconds,
            "optimizer": self.optimizer_seconds,
        }

    @cached_property
    def seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.breakdown.values())

    @property
    def counted(self) -> str:
        """The convention of a given utilisation: 6ND, or with adapters the exact products."""
        return "6ND" if self.job.lora is None else "exact_causal"

    def _at(self, utilisation: float) -> float:
        """Returns the seconds of a step at a utilisation of all GPUs, which includes bubble and communication."""
        return self.needed[self.counted] * self.tokens / (self.layout.gpus * self.speed.rate * utilisation)

    @cached_property
    def mfu(self) -> dict[str, float]:
        """Model FLOPs utilisation (arXiv 2204.02311): the fraction of the dense rate reached by a step, by convention.

        6ND is meaningless with adapters, since most weights need no gradient.
        """
        there = self.layout.gpus * self.speed.rate * self.seconds
        said = self.needed if self.job.lora is None else {n: v for n, v in self.needed.items() if n != "6ND"}
        return {name: flops * self.tokens / there for name, flops in said.items()}

    @property
    def tokens(self) -> int:
        """Tokens per step, over all replicas."""
        return self.job.batch * self.job.seq * self.job.accumulate * self.layout.dp

    def lines(self) -> list[Line]:
        """The derivation of the step's time."""
        if self.speed.utilisation is not None:
            return [*self._sent(), self._given(self.speed.utilisation)]
        return [self._computing(), *self._sent(), *self._added()]

    def _computing(self) -> Line:
        speed, again = self.speed, ", every block run again" * (self.passes - 1)
        return Line(
            name="computing one micro-batch",
            unit="seconds",
            value=self.compute_seconds,
            formula="{FLOPs of the busiest device} / ({rate} × {kernel efficiency})",
            numbers={
                "FLOPs of the busiest device": self.flops,
                "rate": speed.rate,
                "kernel efficiency": speed.efficiency,
            },
            source=ASSUMPTIONS["kernel efficiency"],
            note=f"training FLOPs, masked pairs skipped{again}",
        )

    def _sent(self) -> list[Line]:
        return [
            Line(
                name=f"communication: {name}",
                unit="seconds",
                value=traffic.seconds,
                formula="{bytes one device sends} / {bytes a second}",
                numbers={"bytes one device sends": traffic.bytes, "bytes a second": traffic.bytes / traffic.seconds},
                note=traffic.formula,
                source=traffic.source,
            )
            for name, traffic in self.communication.items()
            if traffic.bytes
        ]

    def _added(self) -> list[Line]:
        p, m, v = self.layout.pp, self.job.accumulate, self.job.interleave
        return [
            total("one micro-batch", {"computing": self.compute_seconds, **self._waited}, unit="seconds"),
            Line(
                name="the pipeline's bubble",
                unit="of the micro-batches' time",
                value=self.bubble,
                formula="({stages} − 1) / ({micro-batches} × {chunks of a stage} + {stages} − 1)",
                numbers={"stages": p, "micro-batches": m, "chunks of a stage": v},
            ),
            Line(
                name="one step",
                unit="seconds",
                value=self.seconds,
                formula="({micro-batches} + ({stages} − 1) / {chunks of a stage}) × {one micro-batch}"
                " + {data, waited for} + {offload} + {optimizer}",
                numbers={
                    "micro-batches": m,
                    "stages": p,
                    "chunks of a stage": v,
                    "one micro-batch": self.micro_seconds,
                    "data, waited for": self.exposed_seconds,
                    "offload": self.offload.seconds,
                    "optimizer": self.optimizer_seconds,
                },
                note="lower bound",
            ),
        ]

    def _given(self, utilisation: float) -> Line:
        return Line(
            name="one step",
            unit="seconds",
            value=self.seconds,
            formula="{FLOPs a token} × {tokens} / ({GPUs} × {rate} × {utilisation})",
            numbers={
                "FLOPs a token": self.needed[self.counted],
                "tokens": self.tokens,
                "GPUs": self.layout.gpus,
                "rate": self.speed.rate,
                "utilisation": utilisation,
            },
            note="at the given utilisation, which includes bubble and communication",
        )


NOTHING = Traffic(bytes=0, seconds=0.0, formula="")
DATA_FORMULAS = (
    "2 (n-1)/n x gradients",
    "(n-1)/n x (gradients + trained weights)",
    "(n-1)/n x (micro-batches x gradients + trained weights)",
    "(n-1)/n x micro-batches x (2 x blocks' weights + those outside + gradients)",
)
