"""A workload on two pools of devices: one computes prompts, the other writes answers, caches cross in between.

Requests are dealt in turn to the groups of the first pool, and finished prompts in turn to those of the second. A group
sends one cache at a time and receives one at a time; a cache stays in the memory of the first pool until it has been
sent. A decoding group that has no room lets caches wait, in no memory of its own; a sequence that it preempts it
computes again itself. As many groups of both are simulated as make one of several equal parts.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.simulate import Group, Outcome, Request, Room
from asbuilt.plan.serve.steptime import StepTimes
from asbuilt.plan.serve.transfer import Sent, ends, joined, pieces, sent
from asbuilt.plan.serve.verdict import Delays, Verdict, every, verdict
from asbuilt.plan.serve.workload import (
    USUAL_MOST,
    Pools,
    Prepared,
    Served,
    Workload,
    delays,
    held_at_least,
    most_requests,
    prepared,
    requests,
    spread,
)
from asbuilt.plan.serve.workload import simulate as alone

# So many requests are simulated at most, if fewer are too few to tell whether their rate is kept up.
MOST_TRIED = 10_000
# Seconds; where answers have one token, or nothing was counted, no time is spent.
TINY = 1e-12


class Prefilling(Group):
    """A group that computes prompts and sends their caches, one at a time, in `many` equal pieces each."""

    def __init__(
        self, times: StepTimes, room: Room, source: Iterator[Request], *, send: Callable[[Request], float], many: int
    ) -> None:
        super().__init__(times, room, source)
        self.send, self.many = send, many
        self.sending: deque[Request] = deque()
        self.done: deque[Request] = deque()
        self.free = 0.0
        self.sent_seconds = 0.0

    @property
    def _held(self) -> bool:
        return super()._held or bool(self.sending)

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        seconds = self.send(request)
        request.sent = self.free = ends(request.begun, self.now, self.free, seconds, self.many)
        self.sent_seconds += seconds
        self.kept += request.kept
        self.sending.append(request)
        self.done.append(request)

    def _admit(self) -> None:
        """Admits; if only caches on their way take the room, waits for the next one to be gone."""
        self._release()
        super()._admit()
        while self.waiting and self.sending and not self.prefilling:
            self.now = max(self.now, self.sending[0].sent)
            self._release()
            super()._admit()

    def _release(self) -> None:
        while self.sending and self.sending[0].sent <= self.now:
            self.kept -= self.sending.popleft().kept

    def finished(self) -> Iterator[Request]:
        """Yields without end the requests whose caches are sent, in order."""
        while True:
            while not self.done:
                self.turn()
            yield self.done.popleft()


class Decoding(Group):
    """A group whose requests come with the cache of their prompts."""

    def _take(self, request: Request) -> None:
        if request.generated:  # it was preempted
            super()._take(request)
            return
        request.begun = self.now
        self._start(request)


def deal(source: Iterator[Request], hands: int) -> list[Iterator[Request]]:
    """Returns as many iterators, to which the requests are given in turn."""
    queues: list[deque[Request]] = [deque() for _ in range(hands)]
    turns = count()

    def hand(number: int) -> Iterator[Request]:
        while True:
            while not queues[number]:
                queues[next(turns) % hands].append(next(source))
            yield queues[number].popleft()

    return [hand(number) for number in range(hands)]


@dataclass(kw_only=True)
class Receiver:
    """The link of a decoding group, which receives one cache at a time."""

    seconds: Callable[[Request], float]
    free: float = 0.0
    busy: float = 0.0

    def requests(self, source: Iterator[Request], bytes_of: Callable[[int], float]) -> Iterator[Request]:
        """Yields what arrives as requests of the group; `bytes_of` gives the bytes of shared tokens."""
        for number, request in enumerate(source):
            seconds = self.seconds(request)
            self.free = max(request.sent, self.free + seconds)
            self.busy += seconds
            yield Request(
                number=number,
                arrived=self.free,
                prompt=request.prompt,
                output=_origin(request).output,
                shared=request.shared,
                saved=bytes_of(request.shared) if request.shared else 0.0,
                first=self.free,
                origin=request,
            )


def simulate(roofline: Roofline, workload: Workload) -> Served | None:
    """Returns how the devices serve the workload, in one pool or two; None if its longest sequence does not fit.

    If it does not say how many requests, enough of them to say whether their rate is kept up, as far as MOST_TRIED.
    """
    found = _simulate(roofline, workload)
    most = min(MOST_TRIED, most_requests(workload, roofline.capacity.chunk))
    while found is not None and found.enough and workload.requests is None and found.simulated < most:
        before, more = found.simulated, min(most, max(4 * found.simulated, found.enough))
        found = _simulate(roofline, replace(workload, requests=more))
        if found is not None and found.simulated <= before:
            break
    return found


def _simulate(roofline: Roofline, workload: Workload) -> Served | None:
    if roofline.prefiller is None:
        return alone(roofline, workload)
    longest = max(prompt for prompt, _ in workload.lengths)
    first = prepared(roofline.prefiller, workload, longest, 1)
    second = prepared(roofline, workload, workload.longest, workload.drafts + 1)
    if first is None or second is None:
        return None
    return Tandem(roofline, workload, first, second).served()


class Tandem:
    """The groups of one of `parts` equal parts of both pools."""

    def __init__(self, roofline: Roofline, workload: Workload, first: Prepared, second: Prepared) -> None:
        prefiller = roofline.prefiller
        assert prefiller is not None
        self.roofline, self.prefiller, self.workload = roofline, prefiller, workload
        groups = [one.capacity.layout.replicas for one in (prefiller, roofline)]
        self.parts = math.gcd(*groups)
        here, there = (many // self.parts for many in groups)
        bandwidth = joined(prefiller.capacity, roofline.capacity)[0] * roofline.reached.link
        crossing = self._crossing()
        many = pieces(roofline.capacity, roofline.transfer)
        total = workload.requests or min(USUAL_MOST, workload.count(None) * max(here, there))
        self.count = math.ceil(total / there)

        def send(request: Request) -> float:
            return crossing(request.prompt, request.shared).seconds(bandwidth)

        def receive(request: Request) -> float:
            return crossing(request.prompt, request.shared).receiving / bandwidth

        sources = deal(self._prompts(first), here)
        self.senders = [Prefilling(first.times, first.room, one, send=send, many=many) for one in sources]
        for group in self.senders:
            group.begin(first.stored, total, workload.warm(None) // here)  # nothing is decoded: its curve is not read
        merged = heapq.merge(*(group.finished() for group in self.senders), key=lambda request: request.sent)
        dealt = deal(merged, there)
        self.links = [Receiver(seconds=receive) for _ in dealt]
        self.receivers = [self._receiver(second, link, one) for link, one in zip(self.links, dealt, strict=True)]
        curve, warm = second.curve, workload.warm(None) * self.count // workload.count(None)
        self.outcomes = [group.run(curve, self.count, warm) for group in self.receivers]

    def _receiver(self, ready: Prepared, link: Receiver, source: Iterator[Request]) -> Decoding:
        workload = self.workload
        return Decoding(
            ready.times,
            ready.room,
            link.requests(source, ready.bytes_of),
            advance=workload.advance,
            drafting=1 + workload.drafts * workload.draft_cost,
        )

    def _prompts(self, ready: Prepared) -> Iterator[Request]:
        """Yields the requests of a part without their answers, which are those of their origins."""
        for request in requests(self.workload, self.parts, ready.bytes_of):
            yield replace(request, output=1, origin=request)

    def _crossing(self) -> Callable[[int, int], Sent]:
        sender, receiver = self.prefiller.capacity, self.roofline.capacity

        @cache
        def whole(tokens: int) -> Sent:
            return sent(sender, receiver, tokens)

        def crossing(prompt: int, shared: int) -> Sent:
            block = receiver.pages.block  # a page is sent whole, so its tokens are alike
            return whole(math.ceil(prompt / block) * block).beyond(whole(shared // block * block))

        return crossing

    def served(self) -> Served:
        """Returns how the workload is served by all parts."""
        counted = [request for one in self.outcomes for request in one.requests[one.warm :]]
        finished = self.parts * _rate(self.outcomes, "finished")
        outputs = self.parts * _rate(self.outcomes, "outputs")
        cache = [
            (one.end.cache - one.begin.cache) / max(one.end.busy - one.begin.busy, TINY) / one.room
            for one in self.outcomes
        ]
        slow = [(r.finished - r.first) / (r.output - 1) for r in counted if r.output > 1]
        whole = [r.finished - _origin(r).arrived for r in counted]
        kept = self._verdicts()
        pools, inputs = self._pools(counted, kept)
        overall = every(list(kept.values()))
        gpus = [one.capacity.layout.gpus for one in (self.prefiller, self.roofline)]
        return Served(
            requests_per_second=finished,
            input_tokens_per_second=inputs,
            output_tokens_per_second=outputs,
            first_token=spread([r.first - _origin(r).arrived for r in counted]),
            per_token=spread(slow) if slow else None,
            request=spread(whole),
            sustained=overall.kept,
            enough=overall.enough,
            busy=_rate(self.outcomes, "busy") / len(self.outcomes),
            prefill_share=gpus[0] / sum(gpus),
            concurrency=finished * sum(whole) / len(whole),
            cache_used=sum(cache) / len(cache),
            cache_most=max(one.most_cache / one.room for one in self.outcomes),
            preemptions=sum(one.preempted for one in self.outcomes),
            simulated=sum(len(one.requests) for one in self.outcomes),
            pools=pools,
        )

    def _verdicts(self) -> dict[str, Verdict]:
        """Returns whether each pool, and the links between them, keep up with their shares of the rate."""
        rate = (self.workload.rate or 0.0) / self.parts
        every_one = sorted((r for one in self.outcomes for r in one.requests), key=lambda r: _origin(r).arrived)
        computed = [_origin(r) for r in every_one]
        sent = [(_origin(r).finished, r.arrived - _origin(r).finished) for r in every_one]
        sent.sort()
        carried = [seconds for _, seconds in sent]
        links = Delays(rate=rate, arrived=[at for at, _ in sent], waited=carried, whole=carried, served=carried)
        return {
            "prefill": verdict(delays(computed, [r.finished - r.arrived for r in computed], rate)),
            "transfer": verdict(links),
            "decode": every([self._decoded(one, rate / len(self.outcomes)) for one in self.outcomes]),
        }

    def _decoded(self, found: Outcome, rate: float) -> Verdict:
        """Returns whether a group that writes answers keeps up."""
        held = held_at_least(found.requests, found.limits, rate)
        return verdict(delays(found.requests, [r.begun - r.arrived for r in found.requests], rate, held))

    def _pools(self, counted: list[Request], kept: dict[str, Verdict]) -> tuple[Pools, float]:
        """Returns what requests wait for in between, and tokens/s of prompts on all devices."""
        found = [group.end() for group in self.senders]
        here, inputs = len(found), self.parts * _rate(found, "inputs")
        computed = [(r, _origin(r)) for r in counted]
        pools = Pools(
            prefill=spread([first.finished - first.arrived for _, first in computed]),
            transfer=spread([r.first - first.finished for r, first in computed]),
            admission=spread([r.begun - r.arrived for r in counted]),
            prefill_busy=_rate(found, "busy") / here,
            sending=sum(group.sent_seconds / max(group.now, group.free, TINY) for group in self.senders) / here,
            receiving=sum(link.busy / max(link.free, TINY) for link in self.links) / len(self.links),
            prefill_cache_most=max(one.most_cache / one.room for one in found),
            transfer_sustained=kept["transfer"].kept,
            prefill_sustained=kept["prefill"].kept,
        )
        return pools, inputs


def _rate(outcomes: list[Outcome], name: str) -> float:
    """Returns what was counted of one figure for a second, summed over groups."""
    ends = [
        (getattr(one.end, name) - getattr(one.begin, name), one.end.seconds - one.begin.seconds) for one in outcomes
    ]
    return sum(counted / max(seconds, TINY) for counted, seconds in ends)


def _origin(request: Request) -> Request:
    """Returns the request as it was at the devices that prefill."""
    assert request.origin is not None
    return request.origin
