"""What one device holds besides weights: activations, buffers, logits, what an engine takes, and sequences' caches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from asbuilt import cost
from asbuilt.catalog.machine import Machine
from asbuilt.cost.folded import CacheNumbers, Folded
from asbuilt.plan.devices import Device, DeviceStage, device, split
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import Precision, cache_bytes
from asbuilt.plan.serve.adapters import Adapters
from asbuilt.plan.serve.conventions import CPU_WORKSPACE, SAMPLER_BYTES, WORKSPACE, Conventions
from asbuilt.plan.serve.engines import IDEAL, NOTHING, Engine, Given
from asbuilt.plan.serve.offload import Offload
from asbuilt.plan.serve.pages import Layout, Shared, held_bytes, held_numbers, with_states
from asbuilt.spec import Kind, MixtureOfExperts, Model, Pass
from asbuilt.spec.part import CacheFormat

# Engines expand the keys and values of this many past tokens at once, where a cache holds latents (vLLM: the workspace
# of chunked prefill, at most 64 Ki tokens).
PIECE = 65536
ADAPTERS = "LoRA adapters"
MXFP4 = "quantised (mxfp4)"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The bytes of an engine's profile run: of a whole chunk, or of its hidden states beside the sampler.

    `incoming` is what an earlier stage sends, `library` the workspaces of products, `workspace` those of experts, which
    stay allocated while the sampler runs.
    """

    forward: int
    hidden: int
    sampler: int
    workspace: int
    incoming: int
    library: int

    @property
    def nbytes(self) -> int:
        """The larger of the two, with what stays."""
        return max(self.forward, self.sampling) + self.incoming + self.library

    @property
    def sampling(self) -> int:
        """Bytes while the sampler runs."""
        return self.hidden + self.sampler + self.workspace


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
    engine: Engine = IDEAL
    sequences: int | None = None
    """The most sequences that one group of devices runs at once, None for no limit."""
    given: Given = NOTHING
    """What was asked of the engine."""
    adapters: Adapters | None = None
    """LoRA adapters beside the model."""
    offload: Offload | None = None
    """What is in host memory."""
    kv_host: float | None = None
    """Bytes of host memory for caches of one copy of the model."""

    def moved(self, machine: Machine, layout: Placement) -> Capacity:
        """Returns the capacity elsewhere, with nothing in host memory.

        The engine's values are those for that machine where none were given.
        """
        if not self.engine.profiled:
            return replace(self, machine=machine, layout=layout, offload=None)
        sizes, given = self.engine.sizes(machine), self.given
        return replace(
            self,
            machine=machine,
            layout=layout,
            offload=None,
            chunk=sizes.chunk if given.chunk is None else given.chunk,
            sequences=sizes.sequences if given.sequences is None else given.sequences,
            conventions=self.engine.rules(machine, layout, given.conventions),
        )

    @cached_property
    def device(self) -> Device:
        """The stages, and one device's part of the model."""
        if self.offload is not None:
            return split(self.spec, self.precision, self.offload.layers, self.offload.experts)
        return device(self.spec, self.layout, self.precision)

    @property
    def host(self) -> tuple[DeviceStage, Offload] | None:
        """What is in host memory and computed there, None if nothing is."""
        held = self.device.host
        return None if held is None or self.offload is None else (held, self.offload)

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

    def activations(self, context: int) -> int:
        """Returns the peak bytes while a sequence is prefilled chunk by chunk."""
        kernel = "engine" if self.conventions.kernel == "engine" else "fused"
        most = PIECE + min(self.chunk, context) if self.engine.profiled else context
        return self.device.peak_bytes(self.chunk, min(context, most), kernel, self.width)

    @property
    def width(self) -> int:
        """Bytes of one activation in the engine."""
        return 4 if self.engine.float32 else self.precision.width

    @cached_property
    def logits(self) -> int:
        """Bytes per sequence of logits in the activations' dtype, their float32 copy, and probabilities."""
        return self.vocabulary * (self.precision.width + SAMPLER_BYTES)

    @cached_property
    def vocabulary(self) -> int:
        """Numbers of one token's logits; 0 if the model gives none."""
        return cost.logits_bytes(self.spec, Pass(tokens=1, width=1))

    @cached_property
    def workspace(self) -> int:
        """Bytes for graphs and libraries."""
        if self.conventions.workspace is not None:
            return math.ceil(self.conventions.workspace)
        return CPU_WORKSPACE if self.machine.kind == "cpu" else WORKSPACE

    def buffers(self, stage: DeviceStage) -> dict[str, int]:
        """Returns by name what an engine keeps beside weights: what pads vocabulary and experts, and RoPE tables."""
        engine, vocabulary = self.engine, self.vocabulary
        found = {}
        more = -vocabulary % engine.vocabulary
        if more:
            tables = [e for e in stage.folds.stored if e.kind in ("embedding", "head")]
            rows = sum(e.nbytes * e.count for e in tables if e.weight.shape[0] * self.layout.tp == vocabulary)
            found["padding of the vocabulary"] = math.ceil(rows * Fraction(more, vocabulary))
        padded = self._expert_padding(stage)
        if padded:
            found["padding of experts"] = padded
        if engine.tables:
            found["RoPE tables"] = self.kept[0]
        return found

    def _expert_padding(self, stage: DeviceStage) -> int:
        """Returns the bytes by which experts in mxfp4 are padded to what the engine's kernel multiplies."""
        if self.precision.name != MXFP4:
            return 0
        inner, outer = self.engine.multiples(self.machine)
        more = Fraction(0)
        for entry in stage.folds.stored:
            part = None if entry.node is None else entry.node.own
            if isinstance(part, MixtureOfExperts) and entry.name in part.spreads() and len(entry.weight.shape) > 2:
                wide = Fraction(-part.d_ff % inner, part.d_ff) + 1, Fraction(-part.d_expert % outer, part.d_expert) + 1
                more += entry.nbytes * entry.count * (wide[0] * wide[1] - 1)
        return math.ceil(more)

    @cached_property
    def kept(self) -> tuple[int, int]:
        """Bytes of RoPE tables of the model's whole context, and of workspaces of experts."""
        return self.device.kept(self.chunk, self.spec.max_positions, self.width)

    def profiled(self, stage: DeviceStage, context: int) -> Profile:
        """Returns what an engine's activations consist of, on the stage."""
        engine, rows = self.engine, self.chunk
        sampled = self.sequences or 1
        if engine.samples == "chunk":
            sampled = rows
        hidden = sampler = 0
        if engine.sampler is not None and stage.stage.last and self.vocabulary:
            hidden = (rows * self.spec.stream_width + min(sampled, rows) * self.spec.d_model) * self.width
            sampler = engine.sampler.nbytes(min(sampled, rows), self.vocabulary, self.width)
        incoming = 0 if stage.stage.first else 2 * rows * self.spec.stream_width * self.width
        return Profile(
            forward=self.activations(context),
            hidden=hidden,
            sampler=sampler,
            incoming=incoming,
            workspace=self.kept[1] if engine.keeps else 0,
            library=0 if self.machine.kind == "cpu" else engine.outside.library,
        )

    def one_adapter(self, stage: DeviceStage) -> dict[Kind, int]:
        """Returns the bytes of one LoRA adapter in the stage, by kind of part; none without adapters."""
        if self.adapters is None:
            return {}
        found = self.adapters.numbers(self.layout, self.device.stages.index(stage))
        return {kind: numbers * self.precision.width for kind, numbers in found.items()}

    def all_adapters(self, stage: DeviceStage) -> int:
        """Returns the bytes of all LoRA adapters in the stage."""
        return 0 if self.adapters is None else self.adapters.count * sum(self.one_adapter(stage).values())

    def spent(self, stage: DeviceStage, context: int) -> dict[str, int]:
        """Returns by line the bytes of the stage that are needed regardless of the number of users."""
        spent = self._spent(stage, context, self.all_adapters(stage))
        return {name: nbytes for name, nbytes in spent.items() if name != ADAPTERS or self.adapters is not None}

    def _spent(self, stage: DeviceStage, context: int, adapters: int) -> dict[str, int]:
        c, weights = self.conventions, stage.folds.total_bytes
        if c.overhead is not None:
            spent = {"weights": weights, ADAPTERS: adapters, "overhead": math.ceil(c.overhead)}
            return {"reserve": self.reserve(0, 0)} | spent
        if not self.engine.profiled:
            spent = {"activations": self.activations(context), "graphs and workspace": self.workspace}
            return {"reserve": self.reserve(0, 0), "weights": weights, ADAPTERS: adapters} | spent
        outside = self.engine.outside_bytes(self.machine, self.layout) if c.workspace is None else self.workspace
        profile = self.profiled(stage, context)
        spent = {
            "weights": weights,
            ADAPTERS: adapters,
            "buffers": sum(self.buffers(stage).values()),
            "activations": profile.nbytes if self.engine.counts_activations else 0,
            "outside PyTorch": outside,
        }
        return {"reserve": self.reserve(outside, sum(spent.values()))} | spent

    def reserve(self, outside: int, spent: int) -> int:
        """Returns the bytes that are not used, of the device's memory, what is free, or what is left."""
        of = {"total": 0, "free": outside, "left": spent}[self.engine.base]
        return math.ceil(max(0, self.memory - of) * (1 - self.conventions.utilisation) + self.conventions.reserve)

    @cached_property
    def graphs(self) -> int:
        """Bytes of captured graphs, which an engine takes from what the utilisation leaves."""
        layers = len(getattr(self.spec, "blocks", ())) / self.layout.pp
        return math.ceil(layers * self.engine.graphs)

    def reserve_left(self, context: int) -> int:
        """Returns the bytes of the reserve that activations do not take."""
        stage = self.tightest(context)
        taken = 0 if self.engine.counts_activations else self.profiled(stage, context).nbytes
        return self.spent(stage, context)["reserve"] - taken

    def fixed(self, stage: DeviceStage, context: int) -> int:
        """Returns the bytes needed regardless of the number of users of `context` tokens."""
        return sum(self.spent(stage, context).values())

    def scratch(self, stage: DeviceStage) -> int:
        """Returns the bytes of logits and sampler per sequence."""
        counted = self.conventions.overhead is None and not self.engine.profiled
        return self.logits if stage.stage.last and counted else 0

    @property
    def pages(self) -> Layout:
        """How the engine lays out cached tokens."""
        c = self.conventions
        reserved = c.windows == "reserved"
        return Layout(
            block=c.block_size if c.page else 1,
            whole=c.windows == "full",
            chunk=self.chunk if reserved else None,
            grouped=self.engine.grouped and reserved,
        )

    def numbers(self, stage: DeviceStage, context: int) -> CacheNumbers:
        """Returns the cached numbers of one sequence in this stage, paged and windowed by convention."""
        return held_numbers(stage, context, self.pages)

    def per_user(self, stage: DeviceStage, context: int) -> int:
        """Returns the cache bytes of one sequence of `context` tokens in this stage."""
        return math.ceil(held_bytes(stage, context, self.pages, self.kv_bytes, self.width))

    def shared(self, stage: DeviceStage, context: int) -> Shared | None:
        """Returns the pages of one sequence if those of states are those of tokens, else None."""
        return with_states(stage, context, self.pages, self.kv_bytes, self.width)

    def in_group(self, stage: DeviceStage, context: int) -> int | float:
        """Returns how many sequences one group fits in this stage, rounded by convention; infinite without a cache."""
        left = self.memory - self.fixed(stage, context)
        each = self.per_user(stage, context) + self.scratch(stage)
        return min(self._many(left, each), self.in_host(context))

    def in_host(self, context: int) -> int | float:
        """Returns how many sequences fit in host memory, infinite if nothing is there."""
        if self.host is None:
            return math.inf
        held, offload = self.host
        return self._many(offload.room - held.folds.total_bytes, self.per_user(held, context))

    def _many(self, left: int, each: int) -> int | float:
        """Returns how many of `each` bytes fit, rounded by convention; infinite if they have none."""
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
        in_host = self.host is None or self.host[0].folds.total_bytes <= self.host[1].room
        return in_host and all(self.fixed(stage, context) <= self.memory for stage in self.device.stages)

    def users(self, context: int) -> int | float:
        """Returns how many sequences of `context` tokens fit on all devices together."""
        return self.in_group(self.tightest(context), context) * self.layout.replicas

    def running(self, context: int) -> int | float:
        """Returns how many sequences of `context` tokens fit and run at once on all devices together."""
        most = math.inf if self.sequences is None else self.sequences * self.layout.replicas
        return min(self.users(context), most)

    def weight_bytes(self) -> int:
        """Weight bytes of the fullest device."""
        return max(stage.folds.total_bytes for stage in self.device.stages)
