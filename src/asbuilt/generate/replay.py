"""Decode steps that are recorded once and run again: compiled, as CUDA graphs, or both.

A step of one token per row is hundreds of small kernels, which Python starts one by one; recorded, they are started at
once. A record reads a fixed number of the cache's places, so there is one for each of a few lengths. Shapes: batch B,
vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.kernels.compiler import recording, require_compiler
from asbuilt.nn.cache import CACHES, Cache
from asbuilt.nn.model import Model
from asbuilt.nn.registry import registered
from asbuilt.nn.step import ReplayedStep
from asbuilt.spec import model as spec
from asbuilt.spec.part import Kernel, walk
from asbuilt.spec.positions import rotaries_by_length

FEWEST = 256  # places of the cache that a record reads at least, if there are as many
WARM_UPS = 3  # passes before a graph is captured, in which libraries choose and allocate

# From tokens and positions (B, 1) to logits (B, V), which the next run overwrites.
Decode = Callable[[Tensor, Tensor], Tensor]
# Returns what runs the step again, on the numbers that the two tensors then have.
Record = Callable[[Decode, Tensor, Tensor], Callable[[], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How decode steps are recorded: by torch.compile, as a CUDA graph, or a graph of what is compiled."""

    compiled: bool = False
    graphs: bool = False

    @property
    def field(self) -> str:
        """The setting that asks for it."""
        return "compile" if self.compiled else "cuda_graphs"

    def check(self, model: spec.Model, device: torch.device, *, drafts: bool = False) -> None:
        """Raises InputError where steps of this model cannot be recorded, not on this device, or not beside drafts."""
        if drafts:
            raise InputError("drafts are verified in passes of several tokens", field=self.field, fix="leave one out")
        if self.graphs and device.type != "cuda":
            raise InputError("graphs are CUDA's", field="cuda_graphs", value=str(device), allowed="a CUDA device")
        if self.compiled:
            require_compiler(device.type, self.field)
        reason = cannot(model)
        if reason:
            raise InputError(f"steps of this model are not recorded: {reason}", field=self.field, fix="leave it out")

    def record(self) -> Record:
        """Returns what records a step."""
        graphs = Graphs() if self.graphs else None
        if graphs is None:
            return compiled
        return graphs if not self.compiled else lambda decode, *given: graphs(_compiled(decode, *given), *given)


def cannot(model: spec.Model) -> str:
    """Returns why a decode step of the model depends on more than numbers in tensors; empty if it does not."""
    if model.reads != ("tokens",):
        return f"it reads {', '.join(model.reads)}"
    if rotaries_by_length(model):
        return "its RoPE frequencies depend on the text's length"
    for path, part in walk(model):
        if part.spreads():
            return f"which experts run at {path} depends on the tokens"
        if part.remembers():
            registered(type(part))  # imports its module, which may have a cache class of its own
            if type(part) in CACHES:
                return f"what {path} caches depends on the text's length"
    return ""


class Replayed:
    """Decodes one token for each row of a cache, by steps that `record` has recorded."""

    def __init__(self, model: Model, cache: Cache, record: Record, kernel: Kernel) -> None:
        batch, device = len(cache.lengths), model.device
        self._model, self._cache, self._record = model, cache, record
        self._kernel: Kernel = kernel
        self._tokens_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._positions_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._constants: dict[Hashable, Tensor] = {}
        self._runs: dict[int, Callable[[], Tensor]] = {}

    def __call__(self, tokens_B1: Tensor) -> Tensor:
        """Returns the logits (B, V) of the tokens after these, until the next call."""
        past = self._cache.lengths
        self._cache.advance(tuple(n + 1 for n in past))
        self._tokens_B1.copy_(tokens_B1)
        self._positions_B1.copy_(torch.tensor(past)[:, None])
        slots = places(max(past) + 1, self._cache.capacity)
        if slots not in self._runs:
            self._runs[slots] = self._recorded(slots)
        return self._runs[slots]()

    def _recorded(self, slots: int) -> Callable[[], Tensor]:
        """Returns a step over so many places; what recording it does to states is undone."""

        def decode(tokens_B1: Tensor, positions_B1: Tensor) -> Tensor:
            step = ReplayedStep(
                positions_B1,
                slots,
                cache=self._cache,
                dtype=self._model.dtype,
                kernel=self._kernel,
                constants=self._constants,
            )
            return self._model.logits(tokens_B1, step, True)[:, -1]

        changed = [tensor for layer in self._cache.layers.values() if layer.rings is None for tensor in layer.tensors]
        before = [tensor.clone() for tensor in changed]
        decode(self._tokens_B1, self._positions_B1)  # makes the constants
        run = self._record(decode, self._tokens_B1, self._positions_B1)
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
        return run


def places(length: int, capacity: int) -> int:
    """Returns how many places of a cache a step of a text of `length` tokens reads: up to a quarter more than these."""
    slots = min(FEWEST, capacity)
    while slots < length:
        slots = min(capacity, slots + max(FEWEST, slots // 4))
    return slots


def compiled(decode: Decode, tokens_B1: Tensor, positions_B1: Tensor) -> Callable[[], Tensor]:
    """Returns the step, compiled by torch.compile at its first run."""
    made = _compiled(decode, tokens_B1, positions_B1)
    return lambda: made(tokens_B1, positions_B1)


def _compiled(decode: Decode, tokens_B1: Tensor, positions_B1: Tensor) -> Decode:
    return torch.compile(traced(decode, tokens_B1, positions_B1), dynamic=False, fullgraph=True)


def traced(decode: Decode, tokens_B1: Tensor, positions_B1: Tensor) -> Any:  # noqa: ANN401  a torch.fx.GraphModule
    """Returns the operations of one run of the step, as a function of the two tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with recording():
        return make_fx(decode)(tokens_B1, positions_B1)


class Graphs:
    """Captures steps as CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, decode: Decode, tokens_B1: Tensor, positions_B1: Tensor) -> Callable[[], Tensor]:
        """Returns what replays the graph."""
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                decode(tokens_B1, positions_B1)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph, pool=self._pool):
            logits_BV = decode(tokens_B1, positions_B1)

        def run() -> Tensor:
            graph.replay()
            return logits_BV

        return run
