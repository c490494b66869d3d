"""The roofline: each component takes the longer of its bytes over the bandwidth and its FLOPs over the rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from asbuilt.cost.folded import RunCost
from asbuilt.plan.devices import DeviceStage
from asbuilt.plan.network import Network, joining
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.conventions import Conventions
from asbuilt.plan.serve.expected import MINIMUM, Efficiencies, Level, assumed
from asbuilt.plan.serve.transfer import Transfer, ends, joined, pieces, sent
from asbuilt.spec import Kind, Pass

Where = Literal["device", "host"]
Bound = Literal["memory", "compute", "link"]
# A prompt of more chunks than this is computed as this many longer ones.
MOST_CHUNKS = 64
LARGEST_BATCH = 2**20


@dataclass(frozen=True, kw_only=True)
class Component:
    """One kind of part on one device in one or more passes: bytes stored and moved, FLOPs, seconds by either roof.

    `seconds` is the sum over passes of the longer of the two; `binding` are the bytes, product FLOPs and score FLOPs
    that determine it.
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
    where: Where = "device"

    @property
    def name(self) -> str:
        """The kind, and where it is computed if not on the device."""
        return self.kind if self.where == "device" else f"{self.kind} (host)"

    @property
    def moved(self) -> int:
        """Total bytes moved."""
        return self.weights + self.lookups + self.cache

    @property
    def flops(self) -> float:
        """Total FLOPs: of products with weights, and of attention scores and weighted sums."""
        return self.products + self.scores

    def and_then(self, other: Component, times: int) -> Component:
        """Returns the sum of this and `times` passes like `other`; stored bytes count once."""
        sums = {name: getattr(self, name) + times * getattr(other, name) for name in ADDED}
        binding = tuple(a + times * b for a, b in zip(self.binding, other.binding, strict=True))
        return replace(self, **sums, binding=binding)

    @property
    def bound(self) -> Bound:
        """The longer of the two in total."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


# The fields that are summed over passes.
ADDED = ("weights", "lookups", "cache", "products", "scores", "memory_seconds", "compute_seconds", "seconds")


def _nothing(kind: Kind, where: Where) -> Component:
    return Component(
        kind=kind,
        where=where,
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
    """One pass of `rows` tokens on one device, run `times` times: its components, and the seconds of its links."""

    components: tuple[Component, ...]
    link_seconds: float
    rows: int
    times: int = 1

    @property
    def memory_seconds(self) -> float:
        """Total bytes over the bandwidth."""
        return self.times * sum(c.memory_seconds for c in self.components)

    @property
    def compute_seconds(self) -> float:
        """Total FLOPs over the rate."""
        return self.times * sum(c.compute_seconds for c in self.components)

    @property
    def seconds(self) -> float:
        """The sum of components, each at its own roof, and links."""
        return self.times * sum(c.seconds for c in self.components) + self.link_seconds

    @property
    def overlapped_seconds(self) -> float:
        """The lower bound with everything fully overlapped."""
        return max(self.memory_seconds, self.compute_seconds, self.link_seconds)

    @property
    def bound(self) -> Bound:
        """The bottleneck: what takes longest in total."""
        roofs: dict[Bound, float] = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "link": self.link_seconds,
        }
        return max(roofs, key=lambda name: roofs[name])


@dataclass(frozen=True, kw_only=True, eq=False)
class Roofline:
    """The times of a capacity's device; the efficiencies are the fractions of bandwidth and rate that are reached.

    `timed` are those with which the roofline takes what was timed on the device, instead of assumed ones.
    """

    capacity: Capacity
    bandwidth_efficiency: float = 1.0
    compute_efficiency: float = 1.0
    reached: Efficiencies = MINIMUM
    timed: Efficiencies | None = None
    level: Level | None = None
    prefiller: Roofline | None = None
    """That of the devices that compute prompts, where these decode alone."""
    transfer: Transfer = "after"

    def changed(self, **fields: Any) -> Roofline:  # noqa: ANN401
        """Returns the roofline with other fields of its capacity, those of the devices that prefill too."""
        prefiller = None if self.prefiller is None else self.prefiller.changed(**fields)
        return replace(self, capacity=replace(self.capacity, **fields), prefiller=prefiller)

    def at(self, level: Level) -> Roofline:
        """Returns the roofline with the timed or assumed efficiencies of this machine; unchanged if some are given."""
        if self.given:
            return self
        reached = assumed(self.capacity.machine, level) if self.timed is None else self.timed
        prefiller = None if self.prefiller is None else self.prefiller.at(level)
        return replace(self, reached=reached, level=level, prefiller=prefiller)

    @property
    def given(self) -> bool:
        """Whether efficiencies are given, which apply to every time."""
        return self.bandwidth_efficiency != 1 or self.compute_efficiency != 1

    @cached_property
    def judged(self) -> Roofline:
        """The roofline whose times are held against targets: the expected ones, or the theoretical minima."""
        return self.at("middle") if self.conventions.targets == "expected" else self

    @cached_property
    def host(self) -> Roofline | None:
        """The roofline of the processor that computes what is in host memory, None if nothing is."""
        offload = self.capacity.offload
        if offload is None:
            return None
        alone = replace(self.capacity, machine=offload.processor, offload=None)
        reached = MINIMUM if self.level is None else assumed(offload.processor, self.level)
        return replace(self, capacity=alone, reached=reached)

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
        """FLOP/s and precision: of products with weights, and of scores."""
        machine, precision = self.capacity.machine, self.capacity.precision
        (weights, a), (scores, b) = machine.rate(precision.compute), machine.rate(precision.activation)
        return (weights * self.compute_efficiency, a), (scores * self.compute_efficiency, b)

    @cached_property
    def _charged(self) -> int | None:
        """Parameters that count 2 FLOPs each, None if the declared products are counted."""
        if self.conventions.flops == "declared":
            return None
        active = round(self.capacity.alone.active_parameters)
        return active if self.conventions.flops == "2n" else round(active, -max(0, len(str(active)) - 3))

    def reading(self, others: int, cache: int) -> float:
        """Returns the seconds of reading bytes of the cache, and others."""
        slow, cached = self.bandwidth * self.reached.bandwidth, self.bandwidth * self.reached.attention
        return (others + cache) / slow if slow == cached else others / slow + cache / cached

    def crossed(self, tokens: int) -> float:
        """Returns the seconds in which a sequence's cache crosses from the devices that prefill, 0 if these do."""
        if self.prefiller is None:
            return 0.0
        bandwidth, _ = joined(self.prefiller.capacity, self.capacity)
        return sent(self.prefiller.capacity, self.capacity, tokens).seconds(bandwidth * self.reached.link)

    def first_token(self, prompt: int) -> float:
        """Returns the seconds from a prompt alone to its first token: its prefill, and where it crosses its cache's."""
        if self.prefiller is None:
            return self.prefill(prompt).seconds
        computed = self.prefiller.prefill(prompt).seconds
        return ends(0.0, computed, 0.0, self.crossed(prompt), pieces(self.capacity, self.transfer))

    def decode(self, users: int, context: int) -> Run:
        """Returns the step in which `users` sequences on all copies reach `context` tokens.

        The batch is divided into as many parts as there are stages, so a step takes the slowest stage's time once per
        part.
        """
        layout = self.capacity.layout
        group = math.ceil(users / (layout.replicas))
        portion = Pass(tokens=1, batch=math.ceil(group / layout.pp), past=context - 1)
        runs = [self.run(stage, portion, layout.pp) for stage in self.capacity.device.stages]
        return self._and_host(max(runs, key=lambda run: run.seconds), portion)

    def prefill(self, prompt: int) -> Run:
        """Returns the passes of one prompt alone, summed over chunks and stages."""
        chunk = max(self.capacity.chunk, math.ceil(prompt / MOST_CHUNKS))
        total: dict[tuple[Where, Kind], Component] = {}
        links = 0.0
        for stage in self.capacity.device.stages:
            for past in range(0, prompt, chunk):
                passed = Pass(tokens=min(chunk, prompt - past), past=past, logits="last")
                run = self._and_host(self.run(stage, passed, 1), passed)
                links += run.link_seconds * stage.stage.count
                for c in run.components:
                    before = total.get((c.where, c.kind), _nothing(c.kind, c.where))
                    total[c.where, c.kind] = before.and_then(c, stage.stage.count)
        stored = {"device": self.capacity.device.stages[0].folds.weight_bytes}
        if self.capacity.host is not None:
            stored["host"] = self.capacity.host[0].folds.weight_bytes
        components = tuple(replace(c, stored=stored[where].get(kind, 0)) for (where, kind), c in total.items())
        return Run(components=components, link_seconds=links, rows=prompt)

    def _and_host(self, run: Run, passed: Pass) -> Run:
        """Returns the pass with what the host computes of it, before or after the device, and the way between them."""
        if self.host is None or self.capacity.host is None:
            return run
        on_host = self.host.run(self.capacity.host[0], passed, 1)
        components = tuple(replace(c, where="host") for c in on_host.components)
        links = run.link_seconds + self.crossing(passed.rows) / (self.conventions.host * self.reached.link)
        return replace(run, components=run.components + components, link_seconds=links)

    def crossing(self, rows: int) -> int:
        """Returns the bytes between device and host in a pass: the stream once, and rows to experts and back."""
        spec, offload = self.capacity.spec, self.capacity.offload
        if offload is None:
            return 0
        return rows * self.capacity.precision.width * (spec.stream_width + 2 * offload.crossing_experts * spec.d_model)

    def run(self, stage: DeviceStage, run: Pass, times: int) -> Run:
        """Returns one pass of one stage, run `times` times."""
        steps = stage.folds.step(run, self.capacity.kv_bytes)
        self._read_embedding(stage, steps)
        self._with_adapters(stage, steps, run)
        products, causal, counted = self._products(run), self.conventions.scores == "causal", self._charged is None
        (weight_rate, _), (score_rate, _) = self.rates
        reached, held, components = self.reached, stage.folds.weight_bytes, []
        weight_rate, score_rate = weight_rate * reached.compute, score_rate * reached.scores
        for kind, step in steps.items():
            scores = float(step.scores_causal if causal else step.scores) if counted else 0.0
            weights, nbytes, stored = float(step.products * products), step.nbytes, held.get(kind, 0)
            reading = self.reading(step.weights + math.ceil(step.lookups), math.ceil(step.cache))
            computing = weights / weight_rate + scores / score_rate
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

    def weights(self, stage: DeviceStage, run: Pass) -> dict[Kind, int]:
        """Returns the bytes of weights that a pass of one stage reads, by kind of part."""
        steps = stage.folds.step(run, self.capacity.kv_bytes)
        self._read_embedding(stage, steps)
        self._with_adapters(stage, steps, run)
        return {kind: step.weights for kind, step in steps.items()}

    def _read_embedding(self, stage: DeviceStage, steps: dict[Kind, RunCost]) -> None:
        if self.conventions.embedding == "read":
            for entry in stage.folds.stored:
                if entry.weight.role == "table" and entry.path not in stage.folds.multiplied_elsewhere:
                    steps[entry.kind].weights += math.ceil(entry.nbytes) * entry.count

    def _with_adapters(self, stage: DeviceStage, steps: dict[Kind, RunCost], run: Pass) -> None:
        """Adds the LoRA adapters that a pass reads, one for each sequence at most, and each token's products."""
        capacity = self.capacity
        if capacity.adapters is None:
            return
        number = capacity.device.stages.index(stage)
        for kind, nbytes in capacity.one_adapter(stage).items():
            steps[kind].weights += min(capacity.adapters.count, run.batch) * nbytes
        for kind, flops in capacity.adapters.products(capacity.layout, number, run).items():
            steps[kind].products += flops

    def _products(self, run: Pass) -> Fraction | int:
        """Returns the factor on product FLOPs if parameters are counted instead."""
        if self._charged is None:
            return 1
        whole = sum(step.products for step in self.capacity.alone.step(run, 1).values())
        return Fraction(2 * self._charged * run.rows, 1) / whole if whole else 1

    @cached_property
    def network(self) -> Network:
        """The links between the devices."""
        return joining(
            self.capacity.machine, self.capacity.layout.gpus, self.conventions.node, self.conventions.network
        )

    def _links(self, stage: DeviceStage, run: Pass) -> float:
        """Returns the seconds of the links: sums over tp devices, rows to experts and back, rows to the next stage.


        Each runs at the link's rate if its group lies within one node, and otherwise at the network's.
        """
        layout, width = self.capacity.layout, self.capacity.precision.width
        spec, seconds = self.capacity.spec, 0.0
        if layout.tp > 1:  # a ring all-reduce sends each number 2 (tp - 1) / tp times
            sums = {".".join(node.path.split(".")[:3]): node.count for node, _ in stage.folds.contracted(run)}
            nbytes = sum(sums.values()) * run.rows * spec.d_model * width * Fraction(2 * (layout.tp - 1), layout.tp)
            seconds += float(nbytes) / self.network.bandwidth(layout.tp, 1)
        if layout.ep > 1:
            nbytes = 2 * run.rows * self._to_experts(stage) * width * Fraction(layout.ep - 1, layout.ep)
            seconds += float(nbytes) / self.network.bandwidth(layout.wide, 1)
        if layout.pp > 1 and not stage.stage.last:
            seconds += run.rows * spec.stream_width * width / self.network.bandwidth(layout.pp, layout.wide)
        return seconds / self.reached.link

    def _to_experts(self, stage: DeviceStage) -> int:
        """Returns the numbers that come back from the experts for a row: the output of each that it chose."""
        if stage not in self._returned:
            self._returned[stage] = sum(
                node.count * product.a * product.c
                for node, seen in stage.folds.root.runs(Pass(tokens=1))
                for product in node.own.multiplies(seen)
                if product.weight in node.own.spreads() and node.own.holds()[product.weight].split == "in"
            )
        return self._returned[stage]

    @cached_property
    def _returned(self) -> dict[DeviceStage, int]:
        return {}

    def knee(self, context: int) -> int | None:
        """Returns the smallest batch that is compute-bound in total; None if every batch is memory-bound.

        Cache reads grow with the batch as fast as FLOPs do, so with a long context there is no such batch.

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
