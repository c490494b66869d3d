"""A workload: requests with prompts and answers of given lengths, how they arrive, and how a plan serves them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from asbuilt.errors import InputError
from asbuilt.files import read_regular
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.curve import Curve
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.simulate import Group, HostRoom, Outcome, Request, Room, Tally
from asbuilt.plan.serve.steptime import StepTimes
from asbuilt.plan.serve.verdict import KEPT, Delays, Verdict, verdict

LARGEST_FILE, MOST_LENGTHS, LONGEST = 1 << 24, 10**6, 10**9
MOST_REQUESTS, MOST_DRAFTS, MOST_USERS = 10**6, 64, 10**6
# Requests that are simulated: at least so many, some for each user, and not more unless asked.
USUAL, EACH_USER, USUAL_MOST = 1000, 5, 20_000
# Chunks of prompts that are simulated at most: about a minute.
MOST_CHUNKS = 2 * 10**6
# The share of the requests that is served before figures are counted.
WARM = 0.1
NAMES = ("input_tokens", "output_tokens")

Arrivals = Literal["poisson", "even"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of a deployment; requests draw their lengths, pairs of prompt and answer, at random from `lengths`.

    With a `rate` (requests/s) they arrive by themselves, at most `users` of them being served at a time, if given;
    without one each of `users` sends its next request when the last is served. Of each prompt `prefix_share` is in the
    cache already, one prefix for all. A step verifies `drafts` drafted tokens, each of which is accepted with
    probability `acceptance` if those before it are, and each takes `draft_cost` of a step to draft.
    """

    lengths: tuple[tuple[int, int], ...]
    rate: float | None = None
    users: int | None = None
    arrivals: Arrivals = "poisson"
    prefix_share: float = 0.0
    drafts: int = 0
    acceptance: float = 0.0
    draft_cost: float = 0.0
    requests: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _require_lengths(self.lengths)
        if self.rate is None and self.users is None:
            raise InputError("a workload needs one of them", field="rate, users", fix="as in --rate 5/s or --users 32")
        if self.rate is not None and not (math.isfinite(self.rate) and 0 < self.rate <= 1e9):
            raise InputError(field="rate", value=self.rate, allowed="a number of requests a second above 0")
        for name, most in (("users", MOST_USERS), ("requests", MOST_REQUESTS)):
            _whole(name, getattr(self, name), 1, most)
        _whole("speculate", self.drafts, 0, MOST_DRAFTS)
        _whole("seed", self.seed, 0, 2**63)
        if self.arrivals not in ("poisson", "even"):
            raise InputError(field="arrivals", value=self.arrivals, allowed="poisson or even")
        for name in ("prefix_share", "acceptance"):
            value = getattr(self, name)
            if not 0 <= value < 1 and not (name == "acceptance" and value == 1):
                allowed = "from 0 to 1" if name == "acceptance" else "at least 0 and below 1"
                raise InputError(field=name.replace("_", "-"), value=value, allowed=allowed)
        if not (math.isfinite(self.draft_cost) and 0 <= self.draft_cost <= 10):
            raise InputError(field="draft-cost", value=self.draft_cost, allowed="from 0 to 10 steps")
        if not self.drafts and (self.acceptance or self.draft_cost):
            raise InputError("nothing is drafted", field="acceptance, draft-cost", fix="give --speculate too")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(a + b for a, b in self.lengths)

    @property
    def mean(self) -> tuple[float, float]:
        """The mean tokens of a prompt and of an answer."""
        many = len(self.lengths)
        return sum(a for a, _ in self.lengths) / many, sum(b for _, b in self.lengths) / many

    @property
    def advance(self) -> float:
        """Tokens of an answer that a step gives on average: 1 + p + ... + p^drafts (Leviathan et al. 2023)."""
        return sum(self.acceptance**i for i in range(self.drafts + 1))

    def shared(self, prompt: int) -> int:
        """Returns how many tokens of a prompt are cached already; at least one is computed."""
        return min(int(prompt * self.prefix_share), prompt - 1)

    def count(self, users: int | None) -> int:
        """Returns how many requests are simulated, of so many users at once."""
        return self.requests or min(USUAL_MOST, max(USUAL, EACH_USER * (users or 0)))

    def warm(self, users: int | None) -> int:
        """Returns how many of those are not counted: a tenth, or the first ones of all users, who start at once."""
        count = self.count(users)
        first = users if self.rate is None and users and 2 * users <= count else 0
        return max(int(WARM * count), first)

    def plain(self) -> dict[str, Any]:
        """Returns it as plain data; of the lengths, how many and their means."""
        found = {name: value for name, value in asdict(self).items() if name != "lengths"}
        prompt, answer = self.mean
        return {"lengths": len(self.lengths), "mean_input_tokens": prompt, "mean_output_tokens": answer} | found


def _whole(field: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise InputError(field=field, value=value, allowed=f"a whole number from {least} to {most:,}")


def _require_lengths(lengths: Sequence[tuple[int, int]]) -> None:
    if not lengths:
        raise InputError("no lengths", field="lengths", fix="give pairs of input and output tokens")
    for pair in lengths:
        if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= LONGEST for n in pair):
            allowed = f"two whole numbers from 1 to {LONGEST:,}: tokens of a prompt and of its answer"
            raise InputError(field="input-tokens, output-tokens", value=pair, allowed=allowed)


PAIR = re.compile(r"\s*([0-9]{1,10})\s*[,;\s]\s*([0-9]{1,10})\s*")


def read_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """Returns the pairs of a file with the tokens of one prompt and of its answer on each line, after a header or none.

    Raises InputError naming the line that is anything else, and for an empty file.
    """
    return parse_lengths(read_regular(path, LARGEST_FILE, "lengths").decode(errors="replace"), str(path))


def parse_lengths(text: str, path: str) -> tuple[tuple[int, int], ...]:
    """Returns the pairs of such a file's text; `path` is what messages call it."""
    found: list[tuple[int, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or (number == 1 and tuple(re.split(r"[,;\s]+", line.strip())) == NAMES):
            continue
        pair = PAIR.fullmatch(line)
        if pair is None or not all(1 <= int(n) <= LONGEST for n in pair.groups()):
            allowed = "two whole numbers above 0, tokens of a prompt and of its answer: 2000 300"
            raise InputError(field=f"lengths: line {number}", value=line, allowed=allowed)
        if len(found) >= MOST_LENGTHS:
            raise InputError("too many lines", field="lengths", value=path, allowed=f"at most {MOST_LENGTHS:,}")
        found.append((int(pair[1]), int(pair[2])))
    if not found:
        raise InputError("no lengths in the file", field="lengths", value=path, fix="write lines such as 2000 300")
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median and the 95th percentile of seconds."""

    median: float
    p95: float


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What a request waits for between two pools: its prompt, its cache on the way, and room where it is decoded.

    `prefill` counts from the arrival. `sending` and `receiving` are the shares of the time in which the links of the
    devices that prefill, and of those that decode, are busy.
    """

    prefill: Spread
    transfer: Spread
    admission: Spread
    prefill_busy: float
    sending: float
    receiving: float
    prefill_cache_most: float
    prefill_sustained: bool | None
    transfer_sustained: bool | None


@dataclass(frozen=True, kw_only=True)
class Served:
    """How a workload is served, in the steady state: rates on all devices, and seconds of requests.

    `first_token` counts from a request's arrival, `per_token` is the time between tokens of an answer on average.
    `prefill_share` is the part of the busy time that prompts take. A rate is `sustained` if requests do not pile up;
    None if too few were simulated to say, of which about `enough` would do.
    """

    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    first_token: Spread
    per_token: Spread | None
    request: Spread
    sustained: bool | None
    busy: float
    prefill_share: float
    concurrency: float
    cache_used: float
    cache_most: float
    preemptions: int
    simulated: int
    enough: int | None = None
    returned: int = 0
    """Sequences that were brought back from host memory."""
    host_most: float | None = None
    """The most of the host memory for caches that was used."""
    pools: Pools | None = None
    """Where prompts are computed by other devices than answers; `busy` and the caches are then of those for answers."""

    def meets(self, latency: float | None, first_token: float | None) -> bool:
        """Returns whether the 95th percentiles are within the targets, and requests do not pile up."""
        slow = latency is not None and self.per_token is not None and self.per_token.p95 > latency
        late = first_token is not None and self.first_token.p95 > first_token
        return bool(self.sustained) and not slow and not late


def requests(workload: Workload, groups: int, saved: Callable[[int], float]) -> Iterator[Request]:
    """Yields the requests of one of `groups` alike; `saved` gives the bytes of shared tokens."""
    drawn = random.Random(workload.seed)
    now, rate = 0.0, None if workload.rate is None else workload.rate / groups
    number = 0
    while True:
        prompt, output = drawn.choice(workload.lengths)
        shared = workload.shared(prompt)
        if rate is not None:
            now += drawn.expovariate(rate) if workload.arrivals == "poisson" else 1 / rate
        yield Request(
            number=number,
            arrived=now,
            prompt=prompt,
            output=output,
            shared=shared,
            saved=saved(shared) if shared else 0.0,
        )
        number += 1


def simulate(roofline: Roofline, workload: Workload) -> Served | None:
    """Returns how the roofline's devices serve the workload, None if its longest sequence does not fit."""
    found = outcome(roofline, workload)
    return None if found is None else _served(found, roofline.capacity.layout.replicas, workload.rate)


def outcome(roofline: Roofline, workload: Workload) -> Outcome | None:
    """Returns what became of the requests of one of the groups that share the workload."""
    ready = prepared(roofline, workload, workload.longest, workload.drafts + 1)
    if ready is None:
        return None
    groups = roofline.capacity.layout.replicas
    users = None if workload.users is None else math.ceil(workload.users / groups)
    group = Group(
        ready.times,
        ready.room,
        requests(workload, groups, ready.bytes_of),
        users=users,
        closed=workload.rate is None,
        advance=workload.advance,
        drafting=1 + workload.drafts * workload.draft_cost,
        host=host_room(roofline, workload.longest),
    )
    return group.run(ready.curve, workload.count(users), workload.warm(users))


def host_room(roofline: Roofline, longest: int) -> HostRoom | None:
    """Returns the host memory of a group for caches of up to `longest` tokens, None without any.

    A copy's sequence takes what all its devices hold; each device brings its own share back at once with the others.
    """
    capacity = roofline.capacity
    if capacity.kv_host is None:
        return None
    layout, stages = capacity.layout, capacity.device.stages
    rate = roofline.conventions.host * roofline.reached.link

    def shares(tokens: int) -> tuple[float, float]:
        each = [capacity.per_user(stage, tokens) for stage in stages]
        whole = sum(nbytes * stage.stage.count for nbytes, stage in zip(each, stages, strict=True))
        return float(layout.tp * whole), max(each) / rate

    curve = Curve(shares, longest + 1)
    return HostRoom(
        nbytes=capacity.kv_host / layout.groups,
        stored=lambda tokens: curve.at(tokens)[0],
        seconds=lambda tokens: curve.at(tokens)[1],
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a group is simulated with: the times of its steps, and its room for caches, by tokens of a sequence."""

    times: StepTimes
    room: Room
    stored: Curve

    @property
    def curve(self) -> Curve:
        """A sequence's seconds and bytes by its past."""
        times, stored = self.times, self.stored
        return Curve(lambda past: (*times.decoding(past), stored.at(past + 1)[0]), stored.points[-1] - 1)

    def bytes_of(self, tokens: int) -> float:
        """Returns the bytes of cached tokens."""
        return self.stored.at(tokens)[0] - self.stored.at(0)[0]


def prepared(roofline: Roofline, workload: Workload, longest: int, each: int) -> Prepared | None:
    """Returns what a group computes with, `each` tokens of a sequence at once; None if the `longest` does not fit."""
    capacity = roofline.capacity
    stored = Curve(lambda tokens: (_stored(capacity, longest, tokens),), longest + 1)
    shared = max(workload.shared(prompt) for prompt, _ in workload.lengths)
    prefix = stored.at(shared)[0] - stored.at(0)[0]
    room = capacity.memory - capacity.fixed(capacity.tightest(longest), longest) - prefix
    if stored.at(longest)[0] - prefix > room:
        return None
    _require_few_chunks(workload, capacity.chunk, workload.count(workload.users))
    most = min(capacity.chunk * capacity.layout.pp // each, capacity.sequences or MOST_USERS)
    return Prepared(
        times=StepTimes(roofline, chunk=capacity.chunk, longest=longest, each=each),
        room=Room(nbytes=room, stored=lambda tokens: stored.at(tokens)[0], sequences=max(1, most)),
        stored=stored,
    )


def most_requests(workload: Workload, chunk: int) -> int:
    """Returns how many requests have few enough chunks to simulate."""
    return max(1, MOST_CHUNKS // _chunks(workload, chunk))


def _chunks(workload: Workload, chunk: int) -> int:
    """Returns the chunks of a prompt of the mean length."""
    return math.ceil(workload.mean[0] * (1 - workload.prefix_share) / chunk)


def _require_few_chunks(workload: Workload, chunk: int, count: int) -> None:
    """Raises InputError if prompts have so many chunks that the simulation would take minutes."""
    fewer = most_requests(workload, chunk)
    if count > fewer:
        chunks = count * _chunks(workload, chunk)
        problem = f"{count:,} such prompts have {chunks:,} chunks to simulate, more than {MOST_CHUNKS:,}"
        raise InputError(problem, field="requests", value=workload.requests, fix=f"give --requests {fewer}")


def _stored(capacity: Capacity, longest: int, tokens: int) -> float:
    """Returns the bytes of a sequence of `tokens`, in pages of which the last one is half full on average."""
    stage, block = capacity.tightest(longest), capacity.pages.block
    low = tokens // block * block
    before, after = capacity.per_user(stage, low), capacity.per_user(stage, low + block)
    share = (tokens - low) / block + (block - 1) / (2 * block)
    return before + share * (after - before) + capacity.scratch(stage)


def _served(found: Outcome, groups: int, asked: float | None) -> Served:
    end, counted = found.end, found.requests[found.warm :]
    begin = found.begin if found.begin.seconds < end.seconds else Tally()  # all may be served at one moment
    seconds, busy = end.seconds - begin.seconds, end.busy - begin.busy
    finished = end.finished - begin.finished
    slow = [(r.finished - r.first) / (r.output - 1) for r in counted if r.output > 1]
    whole = [r.finished - r.arrived for r in counted]
    host = found.host
    kept = KEPT if asked is None else kept_up(found, asked / groups)

    def rate(name: str) -> float:
        return groups * (getattr(end, name) - getattr(begin, name)) / seconds

    return Served(
        requests_per_second=rate("finished"),
        input_tokens_per_second=rate("inputs"),
        output_tokens_per_second=rate("outputs"),
        first_token=spread([r.first - r.arrived for r in counted]),
        per_token=spread(slow) if slow else None,
        request=spread(whole),
        sustained=kept.kept,
        enough=kept.enough,
        busy=busy / seconds,
        prefill_share=(end.prefilling - begin.prefilling) / busy,
        concurrency=groups * finished / seconds * sum(whole) / len(whole),
        cache_used=(end.cache - begin.cache) / busy / found.room,
        cache_most=found.most_cache / found.room,
        preemptions=found.preempted,
        simulated=len(found.requests),
        returned=0 if host is None else host.returned,
        host_most=None if host is None else host.most / host.nbytes,
    )


def kept_up(found: Outcome, rate: float) -> Verdict:
    """Returns whether a group that computes prompts and answers keeps up with so many requests/s."""
    requests = found.requests
    held = held_at_least(requests, found.limits, rate)
    return verdict(delays(requests, [r.first - r.arrived for r in requests], rate, held))


def delays(requests: Sequence[Request], waited: list[float], rate: float, held: float = 0.0) -> Delays:
    """Returns the delays of requests, which `waited` for their turn."""
    mean = sum(r.output for r in requests) / len(requests)
    paces = [
        (r.finished - r.arrived - a) / (r.output - 1) if r.output > 1 else 0.0
        for r, a in zip(requests, waited, strict=True)
    ]
    return Delays(
        rate=rate,
        arrived=[r.arrived for r in requests],
        waited=waited,
        whole=[a + (mean - 1) * pace for a, pace in zip(waited, paces, strict=True)],
        served=[r.finished - r.arrived for r in requests],
        held=held,
    )


def held_at_least(requests: Sequence[Request], room: Room, rate: float) -> float:
    """Returns the least fraction of the room that so many requests/s need at the pace of these (Little's law).

    More sequences at once are slower, not faster. Each holds at least the mean of its first and its last bytes: caches
    grow ever more slowly, if not evenly.
    """
    seconds = [r.finished - max(r.first, r.begun) if r.runs <= 2 else 0.0 for r in requests]  # others were preempted
    nbytes = [
        s * ((room.stored(r.prompt) + room.stored(r.prompt + r.output)) / 2 - r.saved)
        for s, r in zip(seconds, requests, strict=True)
    ]
    return rate * max(_at_least(seconds) / room.sequences, _at_least(nbytes) / room.nbytes)


def _at_least(values: Sequence[float]) -> float:
    """Returns the mean less two of its standard errors."""
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean - 2 * math.sqrt(spread / len(values))


def spread(values: list[float]) -> Spread:
    """Returns the median and the 95th percentile, interpolated between the nearest two."""
    values = sorted(values)

    def at(share: float) -> float:
        place = share * (len(values) - 1)
        low = int(place)
        return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])

    return Spread(median=at(0.5), p95=at(0.95))
