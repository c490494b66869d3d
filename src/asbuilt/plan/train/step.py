"""The time of a step: what each device computes, moves and sends, at the machine's rates.

There are two meanings of utilisation, never mixed. Products, scores, passes over memory and links reach their own
fractions of a machine's rates (`efficiency`), and the pipeline bubble, exposed communication and the optimizer's pass
over its state are added: the utilisation of the whole step is a result. Or that utilisation is given, as published runs
report it, and nothing is added.

With one efficiency of all that a device computes, the first is a lower bound: memory and links at their full rates.
Data parallelism's gradients and gathered weights and the keys and values of a context's ring overlap with computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from asbuilt.plan.lines import Line, total
from asbuilt.plan.network import Traffic, ring
from asbuilt.plan.placement import Placement
from asbuilt.plan.train import schedule
from asbuilt.plan.train.computing import Computing, Speed
from asbuilt.plan.train.efficiency import TAKEN
from asbuilt.plan.train.optimizers import State
from asbuilt.plan.train.options import ASSUMPTIONS
from asbuilt.plan.train.shares import LOGITS_WIDTH, split
from asbuilt.plan.train.stages import Job, StageMemory

# Backward has two thirds of a training step's FLOPs.
BACKWARD = 2 / 3
# Bytes of a number that goes to an expert in fp8, with its share of a float32 scale of 128 (arXiv 2412.19437).
FP8_SENT = 1 + 4 / 128


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

    `needed` is the model's FLOPs per token, or per pair of an image and a text, by convention, without recomputation,
    as a utilisation counts them; a sequence is `each` of them.
    """

    stages: list[StageMemory]
    layout: Placement
    job: Job
    speed: Speed
    needed: Mapping[str, float]
    each: int

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
        if self.speed.efficiency is not None:
            return self.flops / (self.speed.rate * self.speed.efficiency)
        return sum(self.computing.values())

    @cached_property
    def computing(self) -> dict[str, float]:
        """Seconds of one micro-batch on the busiest device: products with weights, scores, passes over memory.

        A device of DualPipe holds two stages, each for half of the micro-batches: of the ends, the mean.
        """
        computing = Computing(layout=self.layout, job=self.job, speed=self.speed)
        found = [computing.stage(stage) for stage in self.stages]
        if self.job.schedule == "dualpipe" and len(found) > 1:
            ends = [mine for mine, stage in zip(found, self.stages, strict=True) if _end(stage)]
            rest = [mine for mine, stage in zip(found, self.stages, strict=True) if not _end(stage)]
            found = [{name: sum(end[name] for end in ends) / len(ends) for name in ends[0]}, *rest]
        return max(found, key=lambda seconds: sum(seconds.values()))

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
        """Expert-parallel traffic: rows to the experts and back (all-to-all), forward and backward.

        With fewer nodes a token, each of them is sent a row once, which goes on over the fast link meanwhile.
        """
        layout, network = self.layout, self.speed.network
        numbers = max(sum(p.sent * n for p, n in stage.section.counted) for stage in self.stages)
        times = (self.passes + 1) * self.job.accumulate
        there_and_back = (FP8_SENT if self.job.fp8_dispatch else self.job.width) + self.job.width
        nbytes = ring(layout.ep) * numbers * there_and_back * times
        nodes = layout.ep * layout.tp / network.node
        if self.job.expert_nodes is None or network.inside(layout.ep, layout.tp) or nodes <= 1:
            formula = "2 (n-1)/n x chosen rows, a mixture, forward and backward, x micro-batches"
            return self._traffic(nbytes, layout.ep, layout.tp, formula)
        once = max(sum(p.once * n for p, n in stage.section.counted) for stage in self.stages)
        reached = min(self.job.expert_nodes, nodes) * (1 - 1 / nodes)
        between = reached * once * there_and_back * times
        return Traffic(
            bytes=round(between),
            seconds=max(between / network.bandwidth(layout.ep, layout.tp), nbytes / network.link),
            formula="rows to each of a token's nodes and back, forward and backward, x micro-batches",
            source=network.source(layout.ep, layout.tp),
        )

    @cached_property
    def context(self) -> Traffic:
        """Context-parallel traffic: keys and values on the ring, backward with gradients too (arXiv 2310.01889).

        Those that are gathered stay until the backward pass, which scatters their gradients alone.
        """
        passed = max(sum(p.passed * n for p, n in stage.section.counted) for stage in self.stages)
        gathers = self.job.gathers_context
        times = "gathered forward and where blocks are repeated, gradients scattered" if gathers else RING_TIMES
        return self._traffic(
            passed * (self.passes + (1 if gathers else 2)) * self.job.accumulate,
            self.layout.cp,
            self.layout.tp,
            f"keys and values of the other ranks, {times}, x micro-batches",
        )

    @cached_property
    def pipeline(self) -> Traffic:
        """Pipeline traffic: activations and their gradient; a tied table's gradient between first and last stage.

        The first stage has nothing to send back, nor the last to send on: of two devices each sends one chunk fewer.
        """
        layout, shares = self.layout, self.stages[0].shares
        if layout.pp == 1:
            return NOTHING
        chunks = 2 * self.job.interleave - (layout.pp == 2)
        stream = chunks * shares.stream * self.job.accumulate
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
            groups = (
                (2 * dense.weights - outside, dense, (layout.sharded, layout.replicas), layout.tp),
                (2 * experts.weights, experts, (layout.sharded_experts, layout.copies), layout.tp * layout.ep),
            )
            found.append([one for group in groups for one in self._sharded(*group)])
        nbytes, seconds = max((sum(b for b, _ in f), sum(s for _, s in f)) for f in found)
        formula = DATA_FORMULAS[layout.zero]
        if layout.pp > 1 and layout.zero >= 2:
            formula = PIPELINED_FORMULAS[layout.zero - 2]
        if layout.sharded < layout.replicas:
            formula += "; and 2 (n-1)/n x a rank's gradients, over the groups"
        source = self.speed.network.source(layout.replicas, layout.tp)
        return Traffic(bytes=round(nbytes), seconds=seconds, formula=formula, source=source)

    def _sharded(self, gathered: int, state: State, ranks: tuple[int, int], stride: int) -> list[tuple[float, float]]:
        """Returns (bytes, seconds) of groups; `gathered` are the weights that ZeRO-3 gathers for one micro-batch.

        Blocks are gathered forward and backward; weights outside them stay gathered in between, like FSDP's root. A
        pipeline's stage gathers once a step. `ranks` are those that shard, and all that hold the same weights.
        """
        (sharding, alike), gradients = ranks, state.gradients
        if alike == 1:
            return []
        m, zero = self.job.accumulate, self.layout.zero
        if self.layout.pp > 1:
            m, gathered = 1, state.weights
        recipe = self.job.recipe  # frozen weights do not change, so only ZeRO-3 gathers them
        trained = gradients // recipe.gradient_width * recipe.weight_width
        volume = (
            2 * gradients,
            gradients + trained,
            m * gradients + trained,
            m * (gathered + gradients),
        )[zero] * ring(sharding)
        network = self.speed.network
        found = [(volume, volume / network.bandwidth(sharding, stride))]
        if sharding < alike:
            averaged = 2 * ring(alike // sharding) * gradients / sharding
            found.append((averaged, averaged / network.bandwidth(alike // sharding, stride * sharding)))
        return found

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
        groups = ((stage.section.dense, layout.sharded), (stage.section.experts, layout.sharded_experts))
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
        return max(self._updated(stage) for stage in self.stages) / self.speed.reached_memory

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
        """Exposed communication per micro-batch, by kind; of what overlaps only what exceeds computing."""
        m, overlaps = self.job.accumulate, self.job.overlaps_experts
        dual = self.job.schedule == "dualpipe"
        return {
            "tensor": self._beside(self.tensor.seconds / m) if self.job.overlaps_tensor else self.tensor.seconds / m,
            "expert": self._beside(self.expert.seconds / m) if overlaps else self.expert.seconds / m,
            "pipeline": self._beside(self.pipeline.seconds / m) if dual else self.pipeline.seconds / m,
            "context": self.context.seconds / m if self.job.gathers_context else self._beside(self.context.seconds / m),
        }

    def _beside(self, seconds: float) -> float:
        """Returns what communication that overlaps with computing one micro-batch adds to it."""
        hidden = min(seconds, self.compute_seconds)
        return seconds - hidden + self._taken(hidden)

    def _taken(self, hidden: float) -> float:
        """Returns by how much computing is longer while so many seconds of communication overlap with it."""
        return 0.0 if self.speed.efficiency is not None else TAKEN * hidden

    @cached_property
    def idle(self) -> float:
        """The idle time of a stage, in micro-batches; (p-1) / v of 1F1B."""
        return schedule.idle(self.job.schedule, self.layout.pp, self.job.interleave)

    @cached_property
    def bubble(self) -> float:
        """The idle fraction of a stage with m micro-batches; (p-1) / (mv + p-1) of 1F1B."""
        return self.idle / (self.job.accumulate + self.idle)

    @cached_property
    def exposed_seconds(self) -> float:
        """Exposed seconds of data parallelism: it overlaps with the last backward pass, from ZeRO-2 on with all passes.

        It overlaps with computing, and with communication on other links than its own.
        """
        own = self.data.source
        others = sum(s for name, s in self._waited.items() if self.communication[name].source != own)
        passes = self.job.accumulate if self.layout.zero >= 2 and self.layout.pp == 1 else BACKWARD
        if self.layout.zero == 3 and self.layout.pp > 1:
            passes = (
                1  # weights are gathered beside the first forward pass, gradients scattered beside the last backward
            )
        hidden = min(self.data.seconds, passes * (self.compute_seconds + others))
        return self.data.seconds - hidden + self._taken(hidden)

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of one step by cause; they sum to the step."""
        if self.speed.utilisation is not None:
            return {"at the utilisation": self._at(self.speed.utilisation)}
        return self.modelled

    @cached_property
    def modelled(self) -> dict[str, float]:
        """Seconds of one step by cause as computed, whether or not a utilisation of the whole step is given."""
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
    def unit(self) -> str:
        """What `tokens` counts."""
        return "pairs" if self.job.loss == "contrastive" else "tokens"

    @property
    def tokens(self) -> int:
        """Tokens, or pairs, per step, over all replicas."""
        return self.job.batch * self.each * self.job.accumulate * self.layout.dp

    def lines(self) -> list[Line]:
        """The derivation of the step's time."""
        if self.speed.utilisation is not None:
            return [*self._sent(), self._given(self.speed.utilisation)]
        return [*self._computed(), *self._sent(), *self._added()]

    def _computed(self) -> list[Line]:
        speed, again = self.speed, ", every block run again" * (self.passes - 1)
        if speed.efficiency is None:
            kinds = {
                "products": f"at {speed.assumed.products:.0%} of the rate",
                "scores": f"at {speed.assumed.scores:.0%} of the rate, masked pairs skipped",
                "passes": f"over saved tensors, at {speed.assumed.memory:.0%} of the bandwidth",
            }
            found = [
                Line(
                    name=f"{name} of one micro-batch",
                    unit="seconds",
                    value=seconds,
                    source=ASSUMPTIONS[name],
                    note=kinds[name] + again,
                )
                for name, seconds in self.computing.items()
            ]
            return [*found, total("computing one micro-batch", self.computing, unit="seconds")]
        line = Line(
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
        return [line]

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
        m = self.job.accumulate
        return [
            total("one micro-batch", {"computing": self.compute_seconds, **self._waited}, unit="seconds"),
            Line(
                name="the pipeline's bubble",
                unit="of the micro-batches' time",
                value=self.bubble,
                formula="{idle micro-batches} / ({micro-batches} + {idle micro-batches})",
                numbers={"micro-batches": m, "idle micro-batches": self.idle},
                source=schedule.SAID[self.job.schedule] if self.layout.pp > 1 else "",
            ),
            Line(
                name="one step",
                unit="seconds",
                value=self.seconds,
                formula="({micro-batches} + {idle micro-batches}) × {one micro-batch}"
                " + {data, waited for} + {offload} + {optimizer}",
                numbers={
                    "micro-batches": m,
                    "idle micro-batches": self.idle,
                    "one micro-batch": self.micro_seconds,
                    "data, waited for": self.exposed_seconds,
                    "offload": self.offload.seconds,
                    "optimizer": self.optimizer_seconds,
                },
                note="expected" if self.speed.efficiency is None else "lower bound",
            ),
        ]

    def _given(self, utilisation: float) -> Line:
        one = self.unit.removesuffix("s")
        return Line(
            name="one step",
            unit="seconds",
            value=self.seconds,
            formula=f"{{FLOPs a {one}}} × {{{one}s}} / ({{GPUs}} × {{rate}} × {{utilisation}})",
            numbers={
                f"FLOPs a {one}": self.needed[self.counted],
                f"{one}s": self.tokens,
                "GPUs": self.layout.gpus,
                "rate": self.speed.rate,
                "utilisation": utilisation,
            },
            note="at the given utilisation, which includes bubble and communication",
        )


def _end(stage: StageMemory) -> bool:
    """Whether it is the first or the last stage of a pipeline."""
    return stage.section.stage.first or stage.section.stage.last


RING_TIMES = "once forward and twice backward"
NOTHING = Traffic(bytes=0, seconds=0.0, formula="")
DATA_FORMULAS = (
    "2 (n-1)/n x gradients",
    "(n-1)/n x (gradients + trained weights)",
    "(n-1)/n x (micro-batches x gradients + trained weights)",
    "(n-1)/n x micro-batches x (2 x blocks' weights + those outside + gradients)",
)
PIPELINED_FORMULAS = (
    "(n-1)/n x (gradients + trained weights), once a step",
    "(n-1)/n x (a stage's weights + gradients), once a step",
)
