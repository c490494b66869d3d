"""How fast: each component takes the longer of its bytes over the bandwidth and its FLOPs over the rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from asbuilt.cost.folded import RunCost
from asbuilt.plan.devices import DeviceStage
from asbuilt.plan.network import Network, joining
from asbuilt.plan.serve.conventions import Conventions
from asbuilt.plan.serve.ladder import Capacity
from asbuilt.spec import Kind, Pass

Bound = Literal["memory", "compute", "link"]
# A prompt of more chunks than this is reckoned in this many longer ones.
MOST_CHUNKS = 64
LARGEST_BATCH = 2**20


@dataclass(frozen=True, kw_only=True)
class Component:
    """One kind of part on one device in one run or more: bytes stored and moved, FLOPs, seconds by either roof.

    `seconds` add up the longer of the two of each run; `binding` are the bytes, the FLOPs with weights and those of
    scores that take them.
    """

    kind: Kind
    stored: int
    weights: int
    lookups: int
    cache: int
    products: float
    scores: float
    memory_seconds: float
    compute_seconds: float
    seconds: float
    binding: tuple[float, float, float]

    @property
    def moved(self) -> int:
        """All bytes moved."""
        return self.weights + self.lookups + self.cache

    @property
    def flops(self) -> float:
        """All FLOPs: with weights, and of scores and mixing."""
        return self.products + self.scores

    def and_then(self, other: Component, times: int) -> Component:
        """The same kind in one run, and in so many like another; what is stored is stored once."""
        sums = {name: getattr(self, name) + times * getattr(other, name) for name in ADDED}
        binding = tuple(a + times * b for a, b in zip(self.binding, other.binding, strict=True))
        return replace(self, **sums, binding=binding)

    @property
    def bound(self) -> Bound:
        """Which of the two is longer in all."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


# What adds up from run to run.
ADDED = ("weights", "lookups", "cache", "products", "scores", "memory_seconds", "compute_seconds", "seconds")


def _nothing(kind: Kind) -> Component:
    return Component(
        kind=kind,
        stored=0,
        weights=0,
        lookups=0,
        cache=0,
        products=0,
        scores=0,
        memory_seconds=0,
        compute_seconds=0,
        seconds=0,
        binding=(0, 0, 0),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `rows` tokens on one device, made `times` times: its components, and the seconds its links take."""

    components: tuple[Component, ...]
    link_seconds: float
    rows: int
    times: int = 1

    @property
    def memory_seconds(self) -> float:
        """All bytes over the bandwidth."""
        return self.times * sum(c.memory_seconds for c in self.components)

    @property
    def compute_seconds(self) -> float:
        """All FLOPs over the rate."""
        return self.times * sum(c.compute_seconds for c in self.components)

    @property
    def seconds(self) -> float:
        """Components one after the other, each at its own roof, and the links."""
        return self.times * sum(c.seconds for c in self.components) + self.link_seconds

    @property
    def overlapped_seconds(self) -> float:
        """The lower bound in all, with everything done at once."""
        return max(self.memory_seconds, self.compute_seconds, self.link_seconds)

    @property
    def bound(self) -> Bound:
        """What takes longest in all."""
        roofs: dict[Bound, float] = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "link": self.link_seconds,
        }
        return max(roofs, key=lambda name: roofs[name])


@dataclass(frozen=True, kw_only=True, eq=False)
class Roofline:
    """The times of a capacity's device; the efficiencies are shares of bandwidth and rate that are reached."""

    capacity: Capacity
    bandwidth_efficiency: float = 1.0
    compute_efficiency: float = 1.0

    @property
    def conventions(self) -> Conventions:
        """The switches."""
        return self.capacity.conventions

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s."""
        return self.capacity.machine.bandwidth * self.bandwidth_efficiency

    @cached_property
    def rates(self) -> tuple[tuple[float, str], tuple[float, str]]:
        """FLOP/s and their precision: of products with weights, and of scores."""
        machine, precision = self.capacity.machine, self.capacity.precision
        (weights, a), (scores, b) = machine.rate(precision.compute), machine.rate(precision.activation)
        return (weights * self.compute_efficiency, a), (scores * self.compute_efficiency, b)

    @cached_property
    def _charged(self) -> int | None:
        """Parameters that are charged 2 FLOPs each, None where the declared products are."""
        if self.conventions.flops == "declared":
            return None
        active = round(self.capacity.alone.active_parameters)
        return active if self.conventions.flops == "2n" else round(active, -max(0, len(str(active)) - 3))

    def decode(self, users: int, context: int) -> Run:
        """Returns the step in which `users` sequences of all copies together reach `context` tokens.

        Stages work on as many portions of the batch as there are stages, one after the other, so a step takes the
        slowest stage's time once for each portion.
        """
        layout = self.capacity.layout
        group = math.ceil(users / (layout.replicas))
        portion = Pass(tokens=1, batch=math.ceil(group / layout.pp), past=context - 1)
        runs = [self.run(stage, portion, layout.pp) for stage in self.capacity.device.stages]
        return max(runs, key=lambda run: run.seconds)

    def prefill(self, prompt: int) -> Run:
        """Returns the runs of one prompt alone, chunk by chunk, added up; stage after stage."""
        chunk = max(self.capacity.chunk, math.ceil(prompt / MOST_CHUNKS))
        total: dict[Kind, Component] = {}
        links = 0.0
        for stage in self.capacity.device.stages:
            for past in range(0, prompt, chunk):
                run = self.run(stage, Pass(tokens=min(chunk, prompt - past), past=past, logits="last"), 1)
                links += run.link_seconds * stage.stage.count
                for c in run.components:
                    total[c.kind] = total.get(c.kind, _nothing(c.kind)).and_then(c, stage.stage.count)
        stored = self.capacity.device.stages[0].folds.weight_bytes
        components = tuple(replace(c, stored=stored.get(kind, 0)) for kind, c in total.items())
        return Run(components=components, link_seconds=links, rows=prompt)

    def run(self, stage: DeviceStage, run: Pass, times: int) -> Run:
        """Returns one run of one stage, made `times` times."""
        steps = stage.folds.step(run, self.capacity.kv_bytes)
        self._read_embedding(stage, steps)
        products, causal, counted = self._products(run), self.conventions.scores == "causal", self._charged is None
        (weight_rate, _), (score_rate, _) = self.rates
        bandwidth, held, components = self.bandwidth, stage.folds.weight_bytes, []
        for kind, step in steps.items():
            scores = float(step.scores_causal if causal else step.scores) if counted else 0.0
            weights, nbytes, stored = float(step.products * products), step.nbytes, held.get(kind, 0)
            reading, computing = nbytes / bandwidth, weights / weight_rate + scores / score_rate
            if nbytes or scores or weights or stored:
                components.append(
                    Component(
                        kind=kind,
                        stored=stored,
                        weights=step.weights,
                        lookups=math.ceil(step.lookups),
                        cache=math.ceil(step.cache),
                        products=weights,
                        scores=scores,
                        memory_seconds=reading,
                        compute_seconds=computing,
                        seconds=max(reading, computing),
                        binding=(nbytes, 0, 0) if reading >= computing else (0, weights, scores),
                    )
                )
        return Run(
            components=tuple(components), link_seconds=times * self._links(stage, run), rows=run.rows, times=times
        )

    def _read_embedding(self, stage: DeviceStage, steps: dict[Kind, RunCost]) -> None:
        if self.conventions.embedding == "read":
            for entry in stage.folds.stored:
                if entry.weight.role == "table" and entry.path not in stage.folds.multiplied_elsewhere:
                    steps[entry.kind].weights += math.ceil(entry.nbytes) * entry.count

    def _products(self, run: Pass) -> Fraction | int:
        """What FLOPs of products are multiplied by, where parameters are charged instead."""
        if self._charged is None:
            return 1
        whole = sum(step.products for step in self.capacity.alone.step(run, 1).values())
        return Fraction(2 * self._charged * run.rows, 1) / whole if whole else 1

    @cached_property
    def network(self) -> Network:
        """What joins the devices."""
        return joining(
            self.capacity.machine, self.capacity.layout.gpus, self.conventions.node, self.conventions.network
        )

    def _links(self, stage: DeviceStage, run: Pass) -> float:
        """Seconds that the links take: sums over tp devices, rows to experts and back, the stream to the next stage.

        Each goes at the link's rate while its group lies within one node, and else at the network's.
        """
        layout, width = self.capacity.layout, self.capacity.precision.width
        stream, seconds = run.rows * self.capacity.spec.d_model, 0.0
        if layout.tp > 1:  # a ring passes each number on 2 (tp - 1) / tp times
            sums = {".".join(node.path.split(".")[:3]): node.count for node, _ in stage.folds.contracted(run)}
            nbytes = sum(sums.values()) * stream * width * Fraction(2 * (layout.tp - 1), layout.tp)
            seconds += float(nbytes) / self.network.bandwidth(layout.tp, 1)
        if layout.ep > 1:
            nbytes = 2 * self._to_experts(stage, run) * width * Fraction(layout.ep - 1, layout.ep)
            seconds += float(nbytes) / self.network.bandwidth(layout.wide, 1)
        if layout.pp > 1 and not stage.stage.last:
            seconds += stream * width / self.network.bandwidth(layout.pp, layout.wide)
        return seconds

    def _to_experts(self, stage: DeviceStage, run: Pass) -> int:
        """Numbers that come back from the experts: a chosen expert's result for each row."""
        return sum(
            node.count * product.a * product.c
            for node, seen in stage.folds.root.runs(run)
            for product in node.own.multiplies(seen)
            if product.weight in node.own.spreads() and node.own.holds()[product.weight].split == "in"
        )

    def knee(self, context: int) -> int | None:
        """Returns the smallest batch from which FLOPs take as long as bytes in all; None where they never do.

        Reading the caches grows with the batch as the FLOPs do, so with a long context there is no such batch.
        """
        if self._compute_bound(1, context):
            return 1
        if not self._compute_bound(LARGEST_BATCH, context):
            return None
        low, high = 1, LARGEST_BATCH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._compute_bound(middle, context) else (middle, high)
        return high

    def _compute_bound(self, users: int, context: int) -> bool:
        run = self.decode(users, context)
        return run.compute_seconds >= run.memory_seconds
