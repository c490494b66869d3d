"""A simulation of continuous batching: one group of devices that share sequences, step by step, by events.

A step decodes every running sequence and fills the rest of the token budget with chunks of the oldest prompts. A
request waits until its prompt fits in the cache; if the running sequences outgrow it, the newest one loses its cache,
returns to the front of the queue and is computed again (Kwon et al. 2023, arXiv 2309.06180; chunked prefill: Agrawal et
al. 2023, arXiv 2308.16369). With room in host memory its cache goes there and is brought back over the bus, one at a
time, while others decode. Between two events nothing but the pasts change, and linearly: such steps are summed at
once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from asbuilt.plan.serve.curve import NEAR, Curve, Vector
from asbuilt.plan.serve.steptime import StepTimes

# No more requests are taken in once so many times the counted ones wait: they would change nothing.
PILE = 2


@dataclass(frozen=True, kw_only=True)
class Room:
    """What limits a group: bytes of its cache, of which `stored(past)` are a sequence's, and sequences at once."""

    nbytes: float
    stored: Callable[[int], float]
    sequences: int


@dataclass(kw_only=True)
class HostRoom:
    """Host memory for caches of a group: bytes in all, and those and the seconds on the bus of cached tokens.

    `used` are taken, `free` is when the bus is free again, `returned` sequences were brought back.
    """

    nbytes: float
    stored: Callable[[int], float]
    seconds: Callable[[int], float]
    used: float = 0.0
    most: float = 0.0
    free: float = 0.0
    returned: int = 0

    def keep(self, request: Request, tokens: int) -> None:
        """Takes in the cached tokens of a sequence that others do not share, if there is room for them."""
        nbytes = self.stored(tokens) - self.stored(request.shared)
        if tokens > request.shared and self.used + nbytes <= self.nbytes:
            self.used += nbytes
            self.most = max(self.most, self.used)
            request.hosted = tokens

    def send(self, request: Request, now: float) -> None:
        """Sends a sequence back to the device, after all others that were asked for."""
        request.back = self.free = max(now, self.free) + self.seconds(request.hosted) - self.seconds(request.shared)

    def drop(self, request: Request) -> None:
        """Frees the room of a sequence that is back."""
        self.used -= self.stored(request.hosted) - self.stored(request.shared)
        self.returned += 1
        request.hosted = 0


@dataclass(kw_only=True)
class Request:
    """One request: when it arrived, its tokens, those of its prompt that others share, and what became of it.

    The `shared` tokens are cached already, once for all, which saves `saved` bytes.
    """

    number: int
    arrived: float
    prompt: int
    output: int
    shared: int = 0
    saved: float = 0.0
    first: float = math.inf
    finished: float = math.inf
    # where prompts are computed elsewhere: the request there, and when its first chunk began and its cache arrived
    origin: Request | None = None
    begun: float = math.inf
    sent: float = math.inf
    # of the simulation: tokens generated, tokens of prompt and answer to compute and those computed, bytes kept for
    # them; and while it decodes the step in which its past was 0, its piece of the curves and its last step
    generated: float = 0
    whole: int = 0
    done: int = 0
    kept: float = 0
    began: int = 0
    offset: float = 0
    piece: int = 0
    last: int = 0
    runs: int = 0
    # tokens in host memory, and when they are back
    hosted: int = 0
    back: float = math.inf


@dataclass(kw_only=True)
class Tally:
    """What was counted up to a moment."""

    seconds: float = 0.0
    arrived: int = 0
    finished: int = 0
    inputs: int = 0
    outputs: float = 0.0
    prefilling: float = 0.0
    busy: float = 0.0
    cache: float = 0.0


@dataclass(kw_only=True)
class Outcome:
    """The first requests, in order, of which the first `warm` are not counted, and the tallies when those are served
    and when all are; of the bytes of cache among the `limits`, the most that were used.
    """

    limits: Room
    warm: int
    requests: list[Request] = field(default_factory=list)
    begin: Tally = field(default_factory=Tally)
    end: Tally = field(default_factory=Tally)
    preempted: int = 0
    most_cache: float = 0.0
    host: HostRoom | None = None

    @property
    def room(self) -> float:
        """Bytes of cache."""
        return self.limits.nbytes


class Group:
    """The state of a group; `run` simulates until the first `count` requests are served.

    `source` yields requests by their arrival; in a `closed` workload each of `users` sends its next one when the last
    is served. A step gives `advance` tokens of each answer, and takes `drafting` times as long without prompts.
    """

    def __init__(
        self,
        times: StepTimes,
        room: Room,
        source: Iterator[Request],
        *,
        users: int | None = None,
        closed: bool = False,
        advance: float = 1.0,
        drafting: float = 1.0,
        host: HostRoom | None = None,
    ) -> None:
        self.host = host
        self.returning: deque[Request] = deque()
        self.times, self.room, self.source, self.advance, self.drafting = times, room, source, advance, drafting
        self.users, self.closed = users, closed
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.events: list[tuple[int, int, int]] = []
        self.requests: dict[int, Request] = {}
        self.now, self.step = 0.0, 0
        self.kept = 0.0  # bytes of prompts that are being computed
        self.next: Request | None = None
        self.inside = 0
        self.tally = Tally()
        self.width = times.width + 1
        self._reset()

    def _reset(self) -> None:
        """Clears the sums over running sequences: seconds by kind, and bytes; and how they change in a step."""
        self.total, self.growth = [0.0] * self.width, [0.0] * self.width

    def run(self, curve: Curve, count: int, warm: int) -> Outcome:
        """Simulates; `curve` has a sequence's seconds and bytes by its past."""
        self.begin(curve, count, warm)
        while self.left:
            self.turn()
        return self.end()

    def begin(self, curve: Curve, count: int, warm: int) -> None:
        """Prepares for `turn`, to be called until the first `count` requests are served."""
        self.curve, self.count = curve, count
        self.outcome = Outcome(limits=self.room, warm=warm, host=self.host)
        self.next = next(self.source)
        self.left = count

    def turn(self) -> None:
        """Simulates up to the next event, or waits for the next request."""
        self._arrive()
        self._return()
        self._admit()
        if not self.running and not self.prefilling:
            assert self.next is not None
            coming = [self.returning[0].back] if self.returning else []
            if not coming or self.next.arrived > self.now:
                coming.append(self.next.arrived)
            self.now = max(self.now, min(coming))
            return
        self._make_room()
        if not self.running and not self.prefilling:
            return
        if self.prefilling:
            self._mixed_step()
        else:
            self._decode_steps()
        self._events()

    def end(self) -> Outcome:
        """Returns what was counted until now."""
        self.tally.seconds = self.now
        self.outcome.end = self.tally
        return self.outcome

    def _arrive(self) -> None:
        """Takes in the requests that have arrived, unless so many wait that more would change nothing."""
        while self.next is not None and self.next.arrived <= self.now:
            if self._full:
                return
            if len(self.waiting) >= PILE * self.count:
                return
            request = self.next
            if self.closed:
                request.arrived = self.now
            self.inside += 1
            self.tally.arrived += 1
            self.waiting.append(request)
            self.requests[request.number] = request
            if request.number < self.count:
                self.outcome.requests.append(request)
            self.next = next(self.source)

    @property
    def _free(self) -> float:
        """Bytes that are free beside the running sequences, each with the token of the next step."""
        return self.room.nbytes - self.total[-1] - self.kept

    def _admit(self) -> None:
        while self.waiting and self._many < self.room.sequences:
            request = self.waiting[0]
            whole = request.prompt + int(request.generated)
            kept = self.room.stored(whole) - request.saved
            if kept > self._free and self._held:
                return
            self.waiting.popleft()
            request.whole, request.done, request.kept = whole, min(request.shared, whole - 1), kept
            if request.hosted and self.host is not None:
                self.kept += kept
                self.host.send(request, self.now)
                self.returning.append(request)
            else:
                self._take(request)

    @property
    def _many(self) -> int:
        return len(self.running) + len(self.prefilling) + len(self.returning)

    @property
    def _held(self) -> bool:
        """Whether any sequence is in the cache."""
        return self._many > 0

    def _return(self) -> None:
        """Goes on with the sequences whose caches are back from host memory."""
        while self.returning and self.returning[0].back <= self.now:
            request = self.returning.popleft()
            assert self.host is not None
            tokens = request.hosted
            self.host.drop(request)
            if request.generated:
                self.kept -= request.kept
                request.whole = tokens
                self._decode(request)
            else:
                request.done = max(request.done, tokens)
                self.prefilling.append(request)

    def _take(self, request: Request) -> None:
        """Begins with an admitted request."""
        self.kept += request.kept
        self.prefilling.append(request)

    def _make_room(self) -> None:
        """Stops the newest sequences whose growth does not fit; not those on their way back."""
        while self._free < 0 and self._many > 1 and (self.running or self.prefilling):
            self.outcome.preempted += 1
            if self.prefilling:
                request = self.prefilling.pop()
                self.kept -= request.kept
                self._host(request, request.done)
            else:
                request = self.running[next(reversed(self.running))]
                done = self.step - request.began
                request.generated = min(request.output - 1, request.generated + self.advance * done)
                self._host(request, int(request.offset + self.advance * self.step))
                self._stop(request)
            self.waiting.appendleft(request)

    def _host(self, request: Request, tokens: int) -> None:
        """Keeps the cache of a stopped sequence in host memory, if it has room."""
        if self.host is not None:
            self.host.keep(request, tokens)

    def _mixed_step(self) -> None:
        """Decodes once, and computes as many tokens of prompts as the budget leaves."""
        times, n = self.times, len(self.running)
        left = most = max(1, times.chunk * times.pp - n * times.each)
        chunks: list[float] | Vector = ()
        finished: list[Request] = []
        for request in self.prefilling:
            request.begun = min(request.begun, self.now)
            tokens = min(left, request.whole - request.done, times.chunk)
            one = times.prefill(tokens, request.done)
            chunks = [a + b for a, b in zip(chunks, one, strict=True)] if chunks else one
            request.done += tokens
            left -= tokens
            if request.done == request.whole:
                finished.append(request)
            if not left:
                break
        seconds = times.seconds(n, self.total, most - left, tuple(chunks))
        alone = times.seconds(n, self.total) if n else 0.0
        self.tally.prefilling += seconds - alone
        self._advance(1, seconds + (self.drafting - 1) * alone)
        for request in finished:
            self.prefilling.remove(request)
            self.kept -= request.kept
            self._start(request)

    def _decode_steps(self) -> None:
        """Decodes until the next event, arrival that may be admitted, or end of the cache."""
        growth = self.growth
        steps = max(1, self.events[0][0] - self.step)
        if growth[-1] > 0:
            steps = max(1, min(steps, int(self._free / growth[-1]) + 1))
        first = self._seconds_after(0)
        end = first if steps == 1 else self._seconds_after(steps - 1)
        while steps > 2:  # where another bound binds half-way, time is not linear: up to there alone
            middle = self._seconds_after((steps - 1) // 2)
            if abs(first + (end - first) * ((steps - 1) // 2) / (steps - 1) - middle) <= NEAR * middle:
                break
            steps, end = (steps - 1) // 2 + 1, middle
        seconds = steps * (first + end) / 2
        coming = [self.returning[0].back] if self.returning else []
        if self.next is not None and self._many < self.room.sequences and not self.waiting and not self._full:
            coming.append(self.next.arrived)
        if coming:
            wait = min(coming) - self.now
            if wait < seconds:
                more = (end - first) / (steps - 1) if steps > 1 else 0.0
                steps = _steps_to(wait, first, more, steps)
                seconds = steps * first + more * steps * (steps - 1) / 2
        self._advance(steps, seconds)

    def _seconds_after(self, steps: int) -> float:
        """Returns the time of a decode step after so many others."""
        total = [a + steps * b for a, b in zip(self.total, self.growth, strict=True)] if steps else self.total
        return self.drafting * self.times.seconds(len(self.running), total)

    @property
    def _full(self) -> bool:
        """Whether every user has a request in the system."""
        return self.users is not None and self.inside >= self.users

    def _advance(self, steps: int, seconds: float) -> None:
        tally, total = self.tally, self.total
        self.now += seconds
        self.step += steps
        tally.outputs += steps * self.advance * len(self.running)
        tally.busy += seconds
        tally.cache += seconds * (total[-1] + self.kept)
        if steps == 1:
            self.total = [a + b for a, b in zip(total, self.growth, strict=True)]
        else:
            self.total = [a + steps * b for a, b in zip(total, self.growth, strict=True)]
        self.outcome.most_cache = max(self.outcome.most_cache, self.total[-1] + self.kept)

    def _start(self, request: Request) -> None:
        """Lets a request whose prompt is computed decode; the prompt's last token gives a token of the answer."""
        request.generated += 1
        self.tally.outputs += 1
        if request.first == math.inf:
            request.first = self.now
            self.tally.inputs += request.prompt
        if request.generated >= request.output:
            self._finish(request)
            return
        self._decode(request)

    def _decode(self, request: Request) -> None:
        """Lets a request decode from its next token on."""
        request.runs += 1
        request.began = self.step
        request.offset = request.whole - self.advance * self.step
        request.last = self.step + math.ceil((request.output - request.generated) / self.advance)
        request.piece = self.curve.piece(request.whole)
        self.running[request.number] = request
        self._change(request, 1)
        self._await(request)

    def _await(self, request: Request) -> None:
        """Notes the step in which a request is served, or its past passes a point of the curve."""
        curve, at = self.curve, request.last
        if request.piece + 1 < len(curve.slopes):
            at = min(at, math.ceil((curve.points[request.piece + 1] - request.offset) / self.advance))
        heappush(self.events, (max(at, self.step + 1), request.number, request.runs))

    def _change(self, request: Request, sign: int) -> None:
        """Adds or removes a sequence's seconds and bytes, and their growth."""
        curve, i = self.curve, request.piece
        past = request.offset + self.advance * self.step
        further, by = sign * (past - curve.points[i]), sign * self.advance
        self.total = [
            t + sign * a + further * b for t, a, b in zip(self.total, curve.values[i], curve.slopes[i], strict=True)
        ]
        self.growth = [g + by * b for g, b in zip(self.growth, curve.slopes[i], strict=True)]
        self.total[-1] -= sign * request.saved

    def _stop(self, request: Request) -> None:
        self._change(request, -1)
        del self.running[request.number]
        request.runs += 1
        if not self.running:
            self._reset()

    def _events(self) -> None:
        """Ends the requests that are served, and moves those that pass a point of the curve to its next piece."""
        while self.events and self.events[0][0] <= self.step:
            _, number, runs = heappop(self.events)
            request = self.requests.get(number)
            if request is None or request.runs != runs:
                continue  # it was preempted since
            if request.last <= self.step:
                done = request.generated + self.advance * (self.step - request.began)
                self.tally.outputs -= done - request.output
                self._stop(request)
                self._finish(request)
            else:
                self._change(request, -1)
                request.piece = self.curve.piece(request.offset + self.advance * self.step)
                self._change(request, 1)
                self._await(request)

    def _finish(self, request: Request) -> None:
        request.finished = self.now
        self.inside -= 1
        del self.requests[request.number]
        tally = self.tally
        tally.finished += 1
        if request.number < self.count:
            self.left -= 1
        if tally.finished == self.outcome.warm:
            tally.seconds = self.now
            self.outcome.begin = Tally(**vars(tally))


def _steps_to(wait: float, first: float, more: float, most: int) -> int:
    """Returns after how many steps `wait` is over: the first one takes `first`, each further one `more` more."""
    if wait <= 0:
        return 1
    half = more / 2
    if abs(half) * most < 1e-9 * first:
        steps = wait / first
    else:  # steps first + half steps (steps - 1) = wait
        linear = first - half
        steps = 2 * wait / (linear + math.sqrt(max(0.0, linear * linear + 4 * half * wait)))
    return max(1, min(most, math.ceil(steps - 1e-9)))
