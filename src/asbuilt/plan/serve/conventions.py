"""What published answers differ by, as switches; and what is assumed where no declaration and no data sheet says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from asbuilt.catalog.machine import MEMORY_CONVENTIONS, MemoryConvention
from asbuilt.errors import InputError
from asbuilt.families.shared.reader import is_whole
from asbuilt.plan.network import NETWORK, NODE

GIB = 2**30
# Assumptions. An engine takes this share of the device; the rest is for the driver's context and other processes.
UTILISATION = 0.90
# Captured graphs, library workspaces and communication buffers; nothing on a processor of the usual kind.
WORKSPACE = 1 * GIB
CPU_WORKSPACE = 0
# Tokens that an engine prefills at once, which is what activations are sized by.
CHUNK = 2048
# Tokens per page of a paged cache.
BLOCK_SIZE = 16
# The sampler keeps per sequence and token of the vocabulary: a float32 copy of the logits, and probabilities.
SAMPLER_BYTES = 8
# What every time in a plan is, and what it leaves out.
TIMES = (
    "theoretical minimum (floor): bytes at the full bandwidth, FLOPs at the full dense rate, messages at the full "
    "rate of their link, each times its efficiency where one is given; no launches, no waiting, no scheduling, so "
    "tokens/s are the most there can be"
)

Embedding = Literal["lookup", "read"]
FlopsConvention = Literal["declared", "2n", "2n-rounded"]
Scores = Literal["causal", "full"]
Count = Literal["floor", "nearest"]
Windows = Literal["held", "full"]
AttentionKernel = Literal["engine", "library"]

CHOICES: dict[str, tuple[str, ...]] = {
    "memory": MEMORY_CONVENTIONS,
    "embedding": ("lookup", "read"),
    "flops": ("declared", "2n", "2n-rounded"),
    "scores": ("causal", "full"),
    "count": ("floor", "nearest"),
    "windows": ("held", "full"),
    "kernel": ("engine", "library"),
}
MEANING = {
    "memory": {
        "process": "device memory is what a process is told that it has, some 0.5 GiB less than the driver reports",
        "reported": "device memory is what the driver reports",
        "vendor": "device memory is the vendor's number times 10^9 bytes",
        "binary": "device memory is the vendor's number times 2^30 bytes, which is what the chips hold",
    },
    "embedding": {
        "lookup": "of an embedding that no head multiplies, a step reads the rows it looks up",
        "read": "a step is charged with reading the whole embedding too",
    },
    "flops": {
        "declared": "FLOPs are those of the declared products: looking up an embedding multiplies nothing",
        "2n": "2 FLOPs are charged for every (active) parameter, the embedding's too, and none for scores",
        "2n-rounded": "the same with the number of parameters rounded to three digits, as models are named",
    },
    "scores": {
        "causal": "masked pairs are skipped, as fused attention does",
        "full": "masked pairs are multiplied too",
    },
    "count": {
        "floor": "a user counts when the whole cache is there",
        "nearest": "users are rounded to the nearest whole number",
    },
    "windows": {
        "held": "layers with a window keep that window",
        "full": "layers with a window keep every token, as engines without a hybrid cache do",
    },
    "kernel": {
        "engine": "attention is a serving engine's fused kernel: scores are never stored, with sinks and soft caps too",
        "library": "attention is this library's kernel: it stores scores where sinks, soft caps or biases are",
    },
}


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """The switches; `MEANING` says what each of them means.

    `overhead`, in bytes, stands in one figure for activations, logits and workspace. `reserve` is kept free beside what
    `utilisation` leaves. `node` devices share the machine's fast link; `network` is in bytes/s of one device beyond.
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
    node: int = NODE
    network: float = NETWORK

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError("not allowed", field=name, value=getattr(self, name), allowed=", ".join(allowed))
        if not 0 < self.utilisation <= 1:
            raise InputError("out of bounds", field="utilisation", value=self.utilisation, allowed="above 0, at most 1")
        for name in ("reserve", "overhead", "workspace"):
            size = getattr(self, name)
            if size is not None and not 0 <= size < math.inf:
                raise InputError("out of bounds", field=name, value=size, allowed="bytes, from 0")
        for name, what in (("block_size", "tokens"), ("node", "devices")):
            many = getattr(self, name)
            if not is_whole(many) or not 1 <= many <= 2**20:
                raise InputError("out of bounds", field=name.replace("_", "-"), value=many, allowed=f"1 to 2^20 {what}")
        if not 0 < self.network < math.inf:
            raise InputError("out of bounds", field="network", value=self.network, allowed="a rate above 0")

    def plain(self) -> dict[str, object]:
        """Returns the switches as they stand, and what the times are."""
        switches: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        return switches | {"times": TIMES}

    def others(self, names: tuple[str, ...]) -> Iterator[tuple[str, str, Conventions]]:
        """Yields (switch, value, conventions) for every other setting of the named switches, one changed at a time."""
        for name in names:
            for value in CHOICES[name]:
                if value != getattr(self, name):
                    yield name, value, replace(self, **{name: value})
