"""How long a step takes: what each device multiplies and sends, at the machine's rates.

A floor with stated assumptions: rings at the slowest link's full rate, what can run beside computing does so perfectly
(gradients and gathered weights of data parallelism, keys and values of a context's ring), and the rest is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from asbuilt.plan.layout import Layout, Network, Traffic, ring
from asbuilt.plan.lines import Line
from asbuilt.plan.stages import Job, Stage

# Backward takes two thirds of a training step's products.
BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """FLOP/s of one device at the job's precision, and the share of it that is reached while it computes."""

    rate: float
    precision: str
    utilisation: float
    network: Network

    @property
    def reached(self) -> float:
        """FLOP/s."""
        return self.rate * self.utilisation


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of a layout, from its stages."""

    stages: list[Stage]
    layout: Layout
    job: Job
    speed: Speed

    @cached_property
    def passes(self) -> int:
        """Forward passes of a micro-batch: two where every block runs again."""
        return 2 if self.job.checkpointing == "full" else 1

    def _flops(self, stage: Stage) -> int:
        """FLOPs of one micro-batch on one device: training, masked pairs skipped, and what runs again."""
        total = 0
        for kind, count in stage.section.kinds:
            work = kind.work
            again = work.forward() if self.job.checkpointing == "full" else 0
            total += count * (work.training() + again)
        return total + sum(piece.work.training() for piece in stage.section.outer)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one micro-batch on the device that has the most."""
        return max(self._flops(stage) for stage in self.stages)

    @cached_property
    def compute_seconds(self) -> float:
        """Of one micro-batch."""
        return self.flops / self.speed.reached

    @cached_property
    def tensor(self) -> Traffic:
        """Sums over tensor-parallel ranks: for each residual branch one all-reduce forward, and one backward."""
        numbers = max(sum(p.reduced * n for p, n in stage.section.counted) for stage in self.stages)
        per_pass = 2 * ring(self.layout.tp) * numbers * self.job.width
        return self._traffic(
            per_pass * (self.passes + 1) * self.job.accumulate, self.layout.tp, 1,
            "2 (n-1)/n x stream, a residual branch, forward and backward, x micro-batches",
        )  # fmt: skip

    @cached_property
    def expert(self) -> Traffic:
        """Rows to the experts and back (all-to-all), forward and backward."""
        numbers = max(sum(p.sent * n for p, n in stage.section.counted) for stage in self.stages)
        per_pass = 2 * ring(self.layout.ep) * numbers * self.job.width
        return self._traffic(
            per_pass * (self.passes + 1) * self.job.accumulate, self.layout.ep, self.layout.tp,
            "2 (n-1)/n x chosen rows, a mixture, forward and backward, x micro-batches",
        )  # fmt: skip

    @cached_property
    def context(self) -> Traffic:
        """Keys and values round the ring: forward once, backward themselves and their gradients (arXiv 2310.01889)."""
        passed = max(sum(p.passed * n for p, n in stage.section.counted) for stage in self.stages)
        return self._traffic(
            passed * (self.passes + 2) * self.job.accumulate, self.layout.cp, self.layout.tp,
            "keys and values of the other ranks, once forward and twice backward, x micro-batches",
        )  # fmt: skip

    @cached_property
    def pipeline(self) -> Traffic:
        """The stream to the next stage and its gradient back; a tied table's gradient between first and last."""
        layout, shares = self.layout, self.stages[0].shares
        if layout.pp == 1:
            return Traffic(bytes=0, seconds=0.0, formula="")
        stream = 2 * shares.stream * self.job.accumulate
        return self._traffic(
            stream + shares.copied.gradients, layout.pp, layout.tp * layout.replicas,
            "stream and its gradient x micro-batches, and the gradient of a tied table",
        )  # fmt: skip

    @cached_property
    def data(self) -> Traffic:
        """Gradients averaged and weights gathered over the ranks that hold the same (arXiv 1910.02054, section 7)."""
        layout, found = self.layout, []
        for stage in self.stages:
            dense, experts = stage.section.dense, stage.section.experts
            found.append(
                self._sharded(dense.weights, dense.gradients, layout.replicas, layout.tp)
                + self._sharded(experts.weights, experts.gradients, layout.expert_replicas, layout.tp * layout.ep)
            )
        nbytes, seconds = max((sum(b for b, _ in f), sum(s for _, s in f)) for f in found)
        formula = DATA_FORMULAS[layout.zero]
        source = self.speed.network.source(layout.replicas, layout.tp)
        return Traffic(bytes=round(nbytes), seconds=seconds, formula=formula, source=source)

    def _sharded(self, weights: int, gradients: int, ranks: int, stride: int) -> list[tuple[float, float]]:
        """(bytes, seconds) of one group."""
        if ranks == 1:
            return []
        m, zero = self.job.accumulate, self.layout.zero
        recipe = self.job.recipe  # frozen weights do not change: only ZeRO-3 gathers them
        trained = gradients // recipe.gradient_width * recipe.weight_width
        volume = (
            2 * gradients,
            gradients + trained,
            m * gradients + trained,
            m * (2 * weights + gradients),
        )[zero] * ring(ranks)
        return [(volume, volume / self.speed.network.bandwidth(ranks, stride))]

    @cached_property
    def offload(self) -> Traffic:
        """To the host's memory and back: gradients and weights once a step, saved tensors of every micro-batch."""
        stage = max(self.stages, key=lambda s: s.on_host)
        state = stage.state
        nbytes = state.gradients + state.weights if self.job.offloads_optimizer else 0
        if self.job.offloads_activations:
            nbytes += 2 * stage.activations // stage.in_flight * self.job.accumulate
        formula = "gradients there and weights back, and saved tensors both ways"
        return Traffic(bytes=nbytes, seconds=nbytes / self.speed.network.host, formula=formula,
                       source=self.speed.network.named["host"])  # fmt: skip

    def _traffic(self, nbytes: float, ranks: int, stride: int, formula: str) -> Traffic:
        network = self.speed.network
        seconds = nbytes / network.bandwidth(ranks, stride)
        return Traffic(bytes=round(nbytes), seconds=seconds, formula=formula, source=network.source(ranks, stride))

    @cached_property
    def communication(self) -> dict[str, Traffic]:
        """Bytes that one device sends in a step, by kind of parallelism."""
        return {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
            "offload": self.offload,
        }

    @cached_property
    def micro_seconds(self) -> float:
        """One micro-batch through the slowest stage, forward and backward."""
        m = self.job.accumulate
        beside = max(self.compute_seconds, self.context.seconds / m)
        return beside + (self.tensor.seconds + self.expert.seconds + self.pipeline.seconds) / m

    @cached_property
    def bubble(self) -> float:
        """The share of a step in which a stage has nothing to do: (p-1) / (m+p-1)."""
        p, m = self.layout.pp, self.job.accumulate
        return (p - 1) / (m + p - 1)

    @cached_property
    def exposed_seconds(self) -> float:
        """What data parallelism makes a step wait: it runs beside the last backward pass, from ZeRO-2 beside all."""
        m = self.job.accumulate if self.layout.zero >= 2 else BACKWARD
        return max(0.0, self.data.seconds - m * self.compute_seconds)

    @cached_property
    def seconds(self) -> float:
        """One step."""
        p, m = self.layout.pp, self.job.accumulate
        return (m + p - 1) * self.micro_seconds + self.exposed_seconds + self.offload.seconds

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all replicas."""
        return self.job.batch * self.job.seq * self.job.accumulate * self.layout.dp

    def lines(self) -> list[Line]:
        """The derivation of the step's time."""
        p, m, speed = self.layout.pp, self.job.accumulate, self.speed
        context = self.context.seconds / m
        waited = {name: getattr(self, name).seconds / m for name in ("tensor", "expert", "pipeline")}
        beside = max(self.compute_seconds, context)
        return [
            Line(name="computing one micro-batch", unit="seconds", value=self.compute_seconds,
                 formula="{FLOPs of the busiest device} / ({rate} × {utilisation})",
                 numbers={"FLOPs of the busiest device": self.flops, "rate": speed.rate,
                          "utilisation": speed.utilisation},
                 note="training FLOPs, masked pairs skipped" + (", every block run again" * (self.passes - 1))),
            *(Line(name=f"communication: {name}", unit="seconds", value=traffic.seconds,
                   formula="{bytes one device sends} / {bytes a second}",
                   numbers={"bytes one device sends": traffic.bytes,
                            "bytes a second": traffic.bytes / traffic.seconds}, note=traffic.formula,
                   source=traffic.source)
              for name, traffic in self.communication.items() if traffic.bytes),
            Line(name="one micro-batch", unit="seconds", value=self.micro_seconds,
                 formula="{computing, or the context's ring if longer} + {tensor} + {expert} + {pipeline}",
                 numbers={"computing, or the context's ring if longer": beside, **waited}),
            Line(name="the pipeline's bubble", unit="of the step", value=self.bubble,
                 formula="({stages} − 1) / ({micro-batches} + {stages} − 1)",
                 numbers={"stages": p, "micro-batches": m}),
            Line(name="one step", unit="seconds", value=self.seconds,
                 formula="({micro-batches} + {stages} − 1) × {one micro-batch} + {data, waited for} + {offload}",
                 numbers={"micro-batches": m, "stages": p, "one micro-batch": self.micro_seconds,
                          "data, waited for": self.exposed_seconds, "offload": self.offload.seconds}),
        ]  # fmt: skip


DATA_FORMULAS = (
    "2 (n-1)/n x gradients",
    "(n-1)/n x (gradients + trained weights)",
    "(n-1)/n x (micro-batches x gradients + trained weights)",
    "(n-1)/n x micro-batches x (2 x weights + gradients)",
)
