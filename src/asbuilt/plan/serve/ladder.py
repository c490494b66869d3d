"""The memory ladder: memory, reserve, weights, activations, logits, workspace, cache, tokens, users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from asbuilt import cost
from asbuilt.catalog.machine import Machine
from asbuilt.cost.folded import CacheNumbers, Folded
from asbuilt.plan.devices import Device, DeviceStage, device
from asbuilt.plan.lines import Line
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import Precision, cache_bytes
from asbuilt.plan.serve.conventions import CPU_WORKSPACE, MEANING, SAMPLER_BYTES, UTILISATION, WORKSPACE, Conventions
from asbuilt.spec import Model, Pass
from asbuilt.spec.part import CacheFormat, Remembered

ENDLESS = 2**62
DECLARED = "declared by the parts"


@dataclass(frozen=True, kw_only=True, eq=False)
class Capacity:
    """What one device of a placement holds besides its weights; figures are per device unless stated otherwise."""

    spec: Model
    machine: Machine
    layout: Placement
    precision: Precision
    kv_dtype: str
    chunk: int
    conventions: Conventions

    @cached_property
    def device(self) -> Device:
        """The stages, and one device's part of the model."""
        return device(self.spec, self.layout, self.precision)

    @cached_property
    def alone(self) -> Folded:
        """The folds of the whole model on one device."""
        return device(self.spec, Placement(), self.precision).stages[0].folds

    @cached_property
    def kv_bytes(self) -> Fraction | int | CacheFormat:
        """Bytes of one cached number, or how a format with scales holds numbers."""
        return cache_bytes(self.kv_dtype, self.precision.activation)

    @cached_property
    def memory(self) -> int:
        """Memory of one device in bytes, by convention."""
        return self.machine.memory_bytes(self.conventions.memory)

    @cached_property
    def reserve(self) -> int:
        """Bytes that are not used."""
        return math.ceil(self.memory * (1 - self.conventions.utilisation) + self.conventions.reserve)

    def activations(self, context: int) -> int:
        """Returns the peak bytes while a sequence is prefilled chunk by chunk."""
        kernel = "engine" if self.conventions.kernel == "engine" else "fused"
        return self.device.peak_bytes(self.chunk, context, kernel, self.precision.width)

    @cached_property
    def logits(self) -> int:
        """Bytes per sequence of logits in the activations' dtype, their float32 copy, and probabilities."""
        one = Pass(tokens=1, width=self.precision.width)
        return cost.logits_bytes(self.spec, one) // self.precision.width * (self.precision.width + SAMPLER_BYTES)

    @cached_property
    def workspace(self) -> int:
        """Bytes for graphs and libraries."""
        if self.conventions.workspace is not None:
            return math.ceil(self.conventions.workspace)
        return CPU_WORKSPACE if self.machine.kind == "cpu" else WORKSPACE

    def fixed(self, stage: DeviceStage, context: int) -> int:
        """Returns the bytes needed regardless of the number of users of `context` tokens."""
        weights = stage.folds.total_bytes
        if self.conventions.overhead is not None:
            return self.reserve + weights + math.ceil(self.conventions.overhead)
        return self.reserve + weights + self.activations(context) + self.workspace

    def scratch(self, stage: DeviceStage) -> int:
        """Returns the bytes of logits and sampler per sequence."""
        return self.logits if stage.stage.last and self.conventions.overhead is None else 0

    def numbers(self, stage: DeviceStage, context: int) -> CacheNumbers:
        """Returns the cached numbers of one sequence in this stage, paged and windowed by convention."""
        block = self.conventions.block_size if self.conventions.page else 1
        return held_numbers(stage, context, block, whole=self.conventions.windows == "full")

    def per_user(self, stage: DeviceStage, context: int) -> int:
        """Returns the cache bytes of one sequence of `context` tokens in this stage."""
        return math.ceil(self.numbers(stage, context).nbytes(self.kv_bytes))

    def in_group(self, stage: DeviceStage, context: int) -> int | float:
        """Returns how many sequences one group fits in this stage, rounded by convention; infinite without a cache."""
        left = self.memory - self.fixed(stage, context)
        each = self.per_user(stage, context) + self.scratch(stage)
        if left < 0:
            return 0
        if not each:
            return math.inf
        return left // each if self.conventions.count == "floor" else int(Fraction(left, each) + Fraction(1, 2))

    def tightest(self, context: int) -> DeviceStage:
        """Returns the stage that fits the fewest sequences."""
        if len(self.device.stages) == 1:
            return self.device.stages[0]
        return min(self.device.stages, key=lambda s: (self.in_group(s, context), self.memory - self.fixed(s, context)))

    def holds_weights(self, context: int) -> bool:
        """Returns whether every stage fits what it needs regardless of users."""
        return all(self.fixed(stage, context) <= self.memory for stage in self.device.stages)

    def users(self, context: int) -> int | float:
        """Returns how many sequences of `context` tokens fit on all devices together."""
        return self.in_group(self.tightest(context), context) * self.layout.replicas

    def weight_bytes(self) -> int:
        """Weight bytes of the fullest device."""
        return max(stage.folds.total_bytes for stage in self.device.stages)


def held_numbers(stage: DeviceStage, context: int, block: int, *, whole: bool) -> CacheNumbers:
    """Returns the cached numbers of one sequence in a stage, in pages of `block` tokens."""
    key = (context, block, whole)
    if key not in stage.held:
        if len(stage.held) > 1000:
            stage.held.clear()
        stage.held[key] = stage.folds.cache_numbers(context, lambda r, n: held_tokens(r, n, block, whole=whole))
    return stage.held[key]


def held_tokens(r: Remembered, tokens: int, block: int, *, whole: bool) -> int:
    """Returns for how many tokens an engine with pages of `block` tokens stores `r`; with `whole`, beyond its window.

    A window of w tokens spans at most ceil((w-1)/block) + 1 pages, the first of which is only partly needed.
    """
    longest = r.tokens_kept(ENDLESS)
    entries = math.ceil(tokens / r.every)
    pages = math.ceil(entries / block)
    if longest <= 1 or block == 1:  # a state has no pages
        return entries if whole and longest > 1 else r.tokens_kept(tokens)
    if not whole:
        pages = min(pages, math.ceil((longest - 1) / block) + 1)
    return pages * block


def ladder(capacity: Capacity, context: int, users: int) -> tuple[Line, ...]:
    """Returns the lines from device memory to cache for a device of the tightest stage, with `users` in its group."""
    stage = capacity.tightest(context)
    lines = [_memory(capacity), _reserve(capacity), _weights(capacity, stage)]
    if capacity.conventions.overhead is not None:
        overhead = math.ceil(capacity.conventions.overhead)
        lines.append(
            Line(
                name="overhead",
                value=overhead,
                formula="{given}",
                numbers={"given": overhead},
                source="given: one figure for activations, logits and workspace",
            )
        )
    else:
        lines += [_activations(capacity, context), _logits(capacity, stage, users), _workspace(capacity)]
    numbers = {line.name: line.value for line in lines}
    names = [*numbers]
    formula = f"{{{names[0]}}}" + "".join(f" − {{{name}}}" for name in names[1:])
    left = numbers[names[0]] - sum(numbers[name] for name in names[1:])
    note = "" if left >= 0 else "negative: it does not fit"
    return (*lines, Line(name="cache budget", value=left, formula=formula, numbers=numbers, note=note))


def _memory(capacity: Capacity) -> Line:
    machine, convention = capacity.machine, capacity.conventions.memory
    source = machine.source
    if convention == "process" and machine.process_gib is not None:
        formula, numbers = "floor({GiB a process gets} × {bytes in a GiB})", {"GiB a process gets": machine.process_gib}
        numbers["bytes in a GiB"], source = 2**30, machine.process_source
    elif convention in ("process", "reported") and machine.reported_gib is not None:
        formula, numbers = "floor({reported GiB} × {bytes in a GiB})", {"reported GiB": machine.reported_gib}
        numbers["bytes in a GiB"] = 2**30
    else:
        unit = 2**30 if convention == "binary" else 10**9
        formula, numbers = "floor({vendor's number} × {bytes})", {"vendor's number": machine.memory_gb, "bytes": unit}
    note = f"{machine.memory_gb:g} GB by the vendor"
    if machine.reported_gib is not None:
        note += f", {machine.reported_gib:.2f} GiB reported by the driver"
    return Line(name="device memory", value=capacity.memory, formula=formula, numbers=numbers, source=source, note=note)


def _reserve(capacity: Capacity) -> Line:
    c = capacity.conventions
    return Line(
        name="reserve",
        value=capacity.reserve,
        formula="ceil({device memory} × (1 − {utilisation}) + {kept free})",
        numbers={"device memory": capacity.memory, "utilisation": c.utilisation, "kept free": c.reserve},
        source="utilisation: an assumption, the default of engines"
        if c.utilisation == UTILISATION
        else "utilisation: given",
    )


def _weights(capacity: Capacity, stage: DeviceStage) -> Line:
    parts = {f"{kind} weights": nbytes for kind, nbytes in stage.folds.weight_bytes.items() if nbytes}
    formula = " + ".join(f"{{{name}}}" for name in parts) or "0"
    layout, note = capacity.layout, capacity.precision.note
    if layout.per_copy > 1:
        whose = f"one device of tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"
        note = f"{whose}; {note}" if note else whose
    return Line(
        name="weights",
        value=sum(parts.values()),
        formula=formula,
        numbers=parts,
        note=note,
        source=f"{DECLARED}, in {capacity.precision.name}",
    )


def _activations(capacity: Capacity, context: int) -> Line:
    """Returns the line, which names the kernel: one that stores scores needs many times the memory of a fused one."""
    busiest, tokens = capacity.activations(context), min(capacity.chunk, context)
    after = f" after {context - tokens:,}" if context > tokens else ""
    kernel = MEANING["kernel"][capacity.conventions.kernel]
    return Line(
        name="activations",
        value=busiest,
        formula="{busiest moment of a chunk}",
        numbers={"busiest moment of a chunk": busiest},
        source=f"{DECLARED}; {kernel}",
        note=f"prefilling {tokens:,} tokens at once{after}, in {capacity.precision.activation}",
    )


def _logits(capacity: Capacity, stage: DeviceStage, users: int) -> Line:
    each = capacity.scratch(stage)
    per_token = capacity.precision.width + SAMPLER_BYTES
    numbers = {"sequences": users, "vocabulary": each // per_token, "bytes": per_token}
    return Line(
        name="logits and sampler",
        value=users * each,
        formula="{sequences} × {vocabulary} × {bytes}",
        numbers=numbers,
        source="bytes: logits in the activations' dtype, a float32 copy, probabilities; an assumption",
    )


def _workspace(capacity: Capacity) -> Line:
    given = capacity.conventions.workspace is not None
    return Line(
        name="graphs and workspace",
        value=capacity.workspace,
        formula="{allowance}",
        numbers={"allowance": capacity.workspace},
        source="given" if given else "an assumption",
    )


def counted(capacity: Capacity, context: int, budget: int, users: int) -> tuple[Line, ...]:
    """Returns the lines from the cache budget to tokens and users."""
    stage, c = capacity.tightest(context), capacity.conventions
    cache, scratch = capacity.per_user(stage, context), capacity.scratch(stage)
    numbers = capacity.numbers(stage, context)
    formula, size = _cached(numbers, capacity.kv_bytes)
    paged = f"pages of {c.block_size} tokens" if c.page else "no pages"
    lines = [
        Line(
            name="cache per user",
            value=cache,
            formula=f"ceil({formula})",
            numbers=size,
            source=f"{DECLARED}, in {capacity.kv_dtype}",
            note=f"{context:,} tokens, {paged}",
        )
    ]
    if cache:
        lines.append(
            Line(
                name="cache tokens",
                value=cached_tokens(capacity, stage, context, budget),
                unit="tokens",
                formula="floor(max(0, {cache budget}) × {context} / {cache per user})",
                numbers={"cache budget": budget, "context": context, "cache per user": cache},
            )
        )
    left = capacity.memory - capacity.fixed(stage, context)
    many = capacity.layout.replicas
    if cache or scratch:
        half = 0.5 if c.count == "nearest" else 0
        lines.append(
            Line(
                name="users that fit",
                value=users,
                unit="users at this context",
                formula="floor(max(0, {room for users}) / ({cache per user} + {logits per user})"
                " + {rounding}) × {groups}",
                numbers={
                    "room for users": left,
                    "cache per user": cache,
                    "logits per user": scratch,
                    "rounding": half,
                    "groups": many,
                },
                note="room for users: the cache budget before any user's logits are subtracted",
            )
        )
    return tuple(lines)


def _cached(numbers: CacheNumbers, held: Fraction | int | CacheFormat) -> tuple[str, dict[str, float]]:
    """Returns the formula of a sequence's cache bytes and its numbers: by width of vectors, if these have scales."""
    own = held.state if isinstance(held, CacheFormat) else held
    if isinstance(held, CacheFormat):
        terms = [
            (f"vectors of {width}", count, f"bytes of a vector of {width}", held.vector_bytes(width))
            for width, count in numbers.vectors
        ]
        terms += [("numbers of states", numbers.states, "bytes of one of a state", own)] if numbers.states else []
    else:
        terms = [("cached numbers", numbers.cached, "bytes", held)]
    if numbers.float32:
        terms.append(("float32 numbers", numbers.float32, "bytes of one", max(4, own)))
    formula = " + ".join(f"{{{name}}} × {{{size}}}" for name, _, size, _ in terms)
    said = {name: count for name, count, _, _ in terms} | {size: float(each) for _, _, size, each in terms}
    return formula or "0", said


def cached_tokens(capacity: Capacity, stage: DeviceStage, context: int, budget: int) -> int:
    """Returns how many tokens fit in the cache budget, in sequences of `context` tokens."""
    each = capacity.per_user(stage, context)
    return max(0, budget) * context // each if each else 0
