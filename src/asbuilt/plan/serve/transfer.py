"""The cache of a prompt on its way from the devices that prefill to those that decode.

Every sending device sends its part and every receiving one receives its own, both at the bandwidth of one device; a
cache that several receiving devices hold is sent to each of them. Pages are sent whole, windows and states as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from asbuilt.plan.devices import known
from asbuilt.plan.network import joining
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.pages import Layout, held_numbers

Transfer = Literal["after", "layerwise"]
TRANSFERS: dict[Transfer, str] = {
    "after": "the cache is sent when the whole prompt is computed",
    "layerwise": "each layer's cache is sent while the next layers are computed; all layers take equal times",
}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that cross for one sequence: in all, from the fullest sending device, to the fullest receiving one."""

    nbytes: int
    sending: float
    receiving: int

    def seconds(self, bandwidth: float) -> float:
        """Returns the seconds at the bandwidth of one device, those of the slower side."""
        return max(self.sending, self.receiving) / bandwidth

    def beyond(self, other: Sent) -> Sent:
        """Returns what crosses beyond another's."""
        return Sent(
            nbytes=self.nbytes - other.nbytes,
            sending=self.sending - other.sending,
            receiving=self.receiving - other.receiving,
        )


def sent(sender: Capacity, receiver: Capacity, tokens: int) -> Sent:
    """Returns what crosses of a sequence's cache of `tokens`."""
    if not tokens:
        return Sent(nbytes=0, sending=0.0, receiving=0)
    held, kept = _shares(sender, tokens), _shares(receiver, tokens)
    there, here = (sum(each * count for each, count in shares) for shares in (held, kept))
    nbytes, holds = here * receiver.layout.tp, there * sender.layout.tp
    fullest = max(each for each, _ in held)
    return Sent(
        nbytes=nbytes, sending=fullest * nbytes / holds if holds else 0.0, receiving=max(each for each, _ in kept)
    )


def _shares(capacity: Capacity, tokens: int) -> list[tuple[int, int]]:
    """Returns the bytes on one device of each stage, and how many stages are alike."""
    layout = Layout(block=capacity.pages.block, whole=capacity.pages.whole)
    numbers = [(held_numbers(stage, tokens, layout), stage.stage.count) for stage in capacity.device.stages]
    return [(math.ceil(each.nbytes(capacity.kv_bytes)), count) for each, count in numbers]


def pieces(capacity: Capacity, transfer: Transfer) -> int:
    """Returns in how many equal pieces, one after the other, a prompt is computed and its cache sent."""
    return len(known(capacity.spec).order) if transfer == "layerwise" else 1


def joined(sender: Capacity, receiver: Capacity) -> tuple[float, str]:
    """Returns bytes/s of one device between the pools and its source: the link's if all are in one node."""
    gpus, rules = sender.layout.gpus + receiver.layout.gpus, receiver.conventions
    network = joining(
        receiver.machine, gpus, rules.node, rules.network, sources={"between": "--network, between nodes"}
    )
    return network.bandwidth(gpus, 1), network.source(gpus, 1)


def ends(begun: float, computed: float, free: float, seconds: float, many: int) -> float:
    """Returns when a cache has arrived that is computed from `begun` to `computed` and sent in `many` equal pieces.

    The first piece is sent when it is computed and the link is `free`, and the last one takes `seconds` / `many` after
    the end: max(max(free, begun + P / n) + S, computed + S / n).
    """
    first = max(free, begun + (computed - begun) / many)
    return max(first + seconds, computed + seconds / many)
