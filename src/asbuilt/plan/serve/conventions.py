"""The conventions in which published answers differ, as switches, and the assumptions behind a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from asbuilt.catalog.machine import MEMORY_CONVENTIONS, MemoryConvention
from asbuilt.errors import InputError, one_of
from asbuilt.plan.network import HOST, NETWORK, NODE

GIB = 2**30
# Assumptions. The fraction of device memory that an engine uses; the rest is for the driver and other processes.
UTILISATION = 0.90
# Captured graphs, library workspaces and communication buffers; nothing on a CPU.
WORKSPACE = 1 * GIB
CPU_WORKSPACE = 0
# Tokens that an engine prefills at once, which determines the size of activations.
CHUNK = 2048
# Tokens per page of a paged cache.
BLOCK_SIZE = 16
# The sampler's bytes per sequence and token of the vocabulary: a float32 copy of the logits, and probabilities.
SAMPLER_BYTES = 8
# The meaning of every time in a plan, and what it leaves out.
TIMES = (
    "theoretical minimum: bytes at the full bandwidth, FLOPs at the full dense rate, messages at the full rate of "
    "their link, each times its efficiency if one is given; no launches, no waiting, no scheduling, so tokens/s are "
    "a theoretical maximum"
)

Embedding = Literal["lookup", "read"]
FlopsConvention = Literal["declared", "2n", "2n-rounded"]
Scores = Literal["causal", "full"]
Count = Literal["floor", "nearest"]
Windows = Literal["held", "reserved", "full"]
AttentionKernel = Literal["engine", "library"]
Targets = Literal["expected", "minimum"]

CHOICES: dict[str, tuple[str, ...]] = {
    "memory": MEMORY_CONVENTIONS,
    "embedding": ("lookup", "read"),
    "flops": ("declared", "2n", "2n-rounded"),
    "scores": ("causal", "full"),
    "count": ("floor", "nearest"),
    "windows": ("held", "reserved", "full"),
    "kernel": ("engine", "library"),
    "targets": ("expected", "minimum"),
}
# Conventions that are sizes in bytes, which may be 0.
SIZES = ("reserve", "overhead", "workspace")
MEANING = {
    "memory": {
        "process": "device memory as a process sees it, some 0.5 GiB less than the driver reports",
        "reported": "device memory as the driver reports it",
        "vendor": "device memory is the vendor's number times 10^9 bytes",
        "binary": "device memory is the vendor's number times 2^30 bytes, the capacity of the chips",
    },
    "embedding": {
        "lookup": "a step reads only the rows that it looks up in an embedding that is not tied to a head",
        "read": "a step also reads the whole embedding",
    },
    "flops": {
        "declared": "FLOPs are those of the declared products; an embedding lookup has none",
        "2n": "2 FLOPs for every (active) parameter, including the embedding's, and none for attention scores",
        "2n-rounded": "as 2n, with the number of parameters rounded to three digits, as in model names",
    },
    "scores": {
        "causal": "masked pairs are skipped, as in fused attention",
        "full": "masked pairs are computed too",
    },
    "count": {
        "floor": "only users whose whole cache fits are counted",
        "nearest": "users are rounded to the nearest whole number",
    },
    "windows": {
        "held": "sliding-window layers cache only their window",
        "reserved": "sliding-window layers cache their window and a chunk, which engines with a hybrid cache reserve",
        "full": "sliding-window layers cache every token, as in engines without a hybrid cache",
    },
    "kernel": {
        "engine": "a serving engine's fused attention and experts: no scores are stored, even with sinks and soft caps",
        "library": "asbuilt's own attention: scores are stored if there are sinks, soft caps or biases",
    },
    "targets": {
        "expected": "targets are compared with expected times, the middle of their range",
        "minimum": "targets are compared with theoretical minima",
    },
}


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """The switches, explained in `MEANING`.

    `overhead`, in bytes, replaces activations, logits and workspace by one figure. `reserve` is kept free in addition
    to what `utilisation` leaves. `node` devices share the machine's fast link; `network` is the bytes/s of one device
    to other nodes, `host` those between a device and host memory.
    """

    memory: MemoryConvention = "process"
    utilisation: float = UTILISATION
    reserve: float = 0
    overhead: float | None = None
    workspace: float | None = None
    page: bool = True
    block_size: int = BLOCK_SIZE
    embedding: Embedding = "lookup"
    flops: FlopsConvention = "declared"
    scores: Scores = "causal"
    count: Count = "floor"
    windows: Windows = "held"
    kernel: AttentionKernel = "engine"
    targets: Targets = "expected"
    node: int = NODE
    network: float = NETWORK
    host: float = HOST

    def __post_init__(self) -> None:
        from asbuilt.families.shared.reader import is_whole  # families know models, which help does not need

        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(field=name, value=getattr(self, name), allowed=one_of(allowed))
        if not 0 < self.utilisation <= 1:
            raise InputError(field="utilisation", value=self.utilisation, allowed="above 0 and at most 1")
        for name in ("reserve", "overhead", "workspace"):
            size = getattr(self, name)
            if size is not None and not 0 <= size < math.inf:
                raise InputError(field=name, value=size, allowed="a number of bytes, at least 0")
        for name, what in (("block_size", "tokens"), ("node", "devices")):
            many = getattr(self, name)
            if not is_whole(many) or not 1 <= many <= 2**20:
                raise InputError(field=name.replace("_", "-"), value=many, allowed=f"1 to 2^20 {what}")
        for name in ("network", "host"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(field=name, value=getattr(self, name), allowed="a rate above 0")

    def plain(self) -> dict[str, object]:
        """Returns the switches as plain data, with the meaning of times."""
        return {**self.given(), "times": TIMES}

    def given(self) -> dict[str, Any]:
        """Returns all switches by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def others(self, names: tuple[str, ...]) -> Iterator[tuple[str, str, Conventions]]:
        """Yields (switch, value, conventions) for every other setting of the named switches, changed one at a time."""
        for name in names:
            for value in CHOICES[name]:
                if value != getattr(self, name):
                    yield name, value, replace(self, **{name: value})
