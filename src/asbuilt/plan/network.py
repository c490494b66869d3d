"""What joins the devices, and how long what they send takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asbuilt.catalog.machine import Machine

# Devices of one machine that are joined by fast links: tensor parallelism is not chosen wider than that.
NODE = 8
# Bytes/s of one device to those of other nodes: an adapter of 400 Gb/s each.
NETWORK = 50e9
# Bytes/s within a node where the machine's row names no link: the bus that every accelerator sits on.
LINK = 32e9
LINK_SOURCE = f"{LINK / 1e9:g} GB/s where the machine's row names no link: PCIe 4 x16"


@dataclass(frozen=True, kw_only=True)
class Network:
    """What joins `gpus` GPUs: `link` bytes/s one way within a node of `node` of them, `between` per GPU across nodes.

    `host` is the way to the CPU's memory. `named` says where each figure comes from.
    """

    gpus: int
    node: int
    link: float
    between: float
    host: float
    named: dict[str, str]

    def bandwidth(self, size: int, stride: int) -> float:
        """Bytes/s of a ring of `size` ranks that stand `stride` apart: as slow as its slowest link."""
        return self.link if self.inside(size, stride) else min(self.link, self.between)

    def inside(self, size: int, stride: int) -> bool:
        """Whether every such ring stays within a node: groups of a size that does not divide the node straddle two."""
        span = size * stride
        return self.gpus <= self.node or self.node % span == 0

    def source(self, size: int, stride: int) -> str:
        """Where that figure comes from."""
        return self.named["link" if self.inside(size, stride) else "between"]


def joining(
    machine: Machine,
    gpus: int,
    node: int,
    between: float,
    host: float = math.inf,
    sources: Mapping[str, str] | None = None,
) -> Network:
    """Returns what joins so many of a machine: its own link, or the bus where its row names none.

    `sources` say where the other figures come from.
    """
    link = LINK if machine.link is None else machine.link.bandwidth
    source = LINK_SOURCE if machine.link is None else f"{machine.link.kind}, {machine.source}"
    return Network(
        gpus=gpus, node=node, link=link, between=between, host=host, named={"link": source, **(sources or {})}
    )


def unlinked(machine: Machine) -> str:
    """What is said of a machine without a link of which several are planned."""
    return f"no link is known for {machine.name}: {LINK / 1e9:g} GB/s are assumed, PCIe 4 x16 (--gpu NAME,link=300GB/s)"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one device sends in one step for one kind of parallelism, and how long that takes at the link's rate."""

    bytes: int
    seconds: float
    formula: str
    source: str = ""


def ring(size: int) -> float:
    """The share of a tensor that each rank sends in one all-gather or one reduce-scatter: (n-1)/n."""
    return (size - 1) / size
