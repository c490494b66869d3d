"""The links between devices, and the time of their communication."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from asbuilt.catalog.machine import Machine

# Devices per node, connected by fast links: tensor parallelism is not chosen wider than this.
NODE = 8
# Bytes/s of one device to other nodes: a 400 Gb/s adapter each.
NETWORK = 50e9
# Bytes/s within a node if no link is known for the machine: the bus of every accelerator.
LINK = 32e9
# Bytes/s between a device and host memory.
HOST = 25e9
LINK_SOURCE = f"{LINK / 1e9:g} GB/s if no link is known for the machine: PCIe 4 x16"


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of `gpus` GPUs: `link` bytes/s one way within a node of `node` GPUs, `between` per GPU across nodes.

    `host` is the bandwidth to host memory. `named` has the source of each figure.
    """

    gpus: int
    node: int
    link: float
    between: float
    host: float
    named: dict[str, str]

    def reaching(self, share: float) -> Network:
        """Returns the network whose links between devices reach this share of their rates."""
        named = {name: f"{share:.0%} of {source}" if name != "host" else source for name, source in self.named.items()}
        return replace(self, link=share * self.link, between=share * self.between, named=named)

    def bandwidth(self, size: int, stride: int) -> float:
        """Returns bytes/s of a ring of `size` ranks, `stride` apart: those of its slowest link."""
        return self.link if self.inside(size, stride) else min(self.link, self.between)

    def inside(self, size: int, stride: int) -> bool:
        """Returns whether every such ring lies within a node; groups whose size does not divide the node span two."""
        span = size * stride
        return self.gpus <= self.node or self.node % span == 0

    def source(self, size: int, stride: int) -> str:
        """Returns the source of that bandwidth."""
        return self.named["link" if self.inside(size, stride) else "between"]


def joining(
    machine: Machine,
    gpus: int,
    node: int,
    between: float,
    host: float = math.inf,
    sources: Mapping[str, str] | None = None,
) -> Network:
    """Returns the network of several such machines: their own link, or the bus if none is known.

    `sources` are the sources of the other figures.
    """
    link = LINK if machine.link is None else machine.link.bandwidth
    source = LINK_SOURCE if machine.link is None else f"{machine.link.kind}, {machine.source}"
    return Network(
        gpus=gpus, node=node, link=link, between=between, host=host, named={"link": source, **(sources or {})}
    )


def unlinked(machine: Machine) -> str:
    """Returns the warning for a plan with several machines without a known link."""
    return f"no link is known for {machine.name}: {LINK / 1e9:g} GB/s are assumed, PCIe 4 x16 (--gpu NAME,link=300GB/s)"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The bytes one device sends per step for one kind of parallelism, and their time at the link's rate."""

    bytes: int
    seconds: float
    formula: str
    source: str = ""


def ring(size: int) -> float:
    """Returns the share of a tensor that each rank sends in an all-gather or a reduce-scatter: (n-1)/n."""
    return (size - 1) / size
