"""The simulation of continuous batching: against closed forms, and a second one that walks every step."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from asbuilt import cost
from asbuilt.plan.serve.ask import serve
from asbuilt.plan.serve.plan import ServePlan
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.workload import Served, Workload, outcome, requests, simulate
from asbuilt.spec import Pass

SEED = random.SystemRandom().randrange(2**31)
# machines on which everything is bound by FLOPs, or by bytes
COMPUTING = "memory=200GB,bandwidth=10000TB/s,bf16=100T"
READING = "memory=200GB,bandwidth=1TB/s,bf16=100000T"


def planned(model: str, gpu: str, workload: Workload, **options: object) -> ServePlan:
    return serve(model, gpu, context=workload.longest, **options)  # type: ignore[arg-type]


def served(plan: ServePlan, workload: Workload) -> Served:
    found = simulate(plan.roofline.judged, workload)
    assert found is not None
    return found


@pytest.mark.parametrize(("model", "gpus"), [("llama-3-8b", 1), ("gpt-oss-20b", 1), ("deepseek-v3", 8)])
def test_one_user_takes_a_prefill_and_one_step_for_each_token(model: str, gpus: int) -> None:
    drawn = random.Random(SEED)
    workload = Workload(lengths=((drawn.randint(200, 6000), drawn.randint(50, 400)),), users=1, requests=20)
    plan, ((prompt, answer),) = planned(model, "h200", workload, gpus=gpus), workload.lengths
    at, found = plan.roofline.judged, served(plan, workload)
    steps = [at.decode(1, context).seconds for context in range(prompt + 1, prompt + answer)]
    first = at.prefill(prompt).seconds
    assert found.per_token is not None
    assert found.first_token.median == pytest.approx(first, rel=0.005), SEED
    assert found.per_token.median == pytest.approx(sum(steps) / len(steps), rel=0.005), SEED
    assert found.output_tokens_per_second == pytest.approx(answer / (first + sum(steps)), rel=0.005), SEED
    assert found.concurrency == pytest.approx(1, rel=0.01)


def test_a_saturated_compute_bound_machine_serves_its_rate_over_the_flops_of_a_request() -> None:
    drawn = random.Random(SEED)
    prompt, answer = drawn.randint(500, 3000), drawn.randint(20, 300)
    workload = Workload(lengths=((prompt, answer),), users=40, requests=400)
    plan = planned("llama-3-8b", COMPUTING, workload)
    flops = cost.flops(plan.capacity.spec, Pass(tokens=prompt, logits="last"))
    spent: list[tuple[float, float]] = [(flops.products, flops.scores_causal)]
    for past in (prompt, prompt + answer - 2):  # linear in the past
        step = cost.flops(plan.capacity.spec, Pass(tokens=1, past=past))
        spent.append((step.products * (answer - 1) / 2, step.scores_causal * (answer - 1) / 2))
    products, scores = (sum(each[i] for each in spent) for i in (0, 1))
    reached = plan.roofline.judged.reached
    seconds = float(products) / (100e12 * reached.compute) + float(scores) / (100e12 * reached.scores)
    assert served(plan, workload).requests_per_second == pytest.approx(1 / seconds, rel=0.02), SEED


def test_a_memory_bound_batch_reads_the_weights_once_and_every_cache() -> None:
    drawn = random.Random(SEED)
    users, answer = drawn.randint(5, 60), drawn.randint(500, 3000)
    workload = Workload(lengths=((1, answer),), users=users, requests=20 * users)
    plan = planned("llama-3-8b", READING, workload)
    reached = plan.roofline.judged.reached
    own = cost.cache(plan.capacity.spec, answer, "bf16").per_token
    moved = (plan.weight_bytes - 128256 * 4096 * 2) / reached.bandwidth + users * own * answer / 2 / reached.attention
    found = served(plan, workload)
    assert found.per_token is not None
    assert found.per_token.median == pytest.approx(moved / 1e12, rel=0.02), SEED
    assert found.output_tokens_per_second == pytest.approx(users * 1e12 / moved, rel=0.02), SEED


def test_one_slot_is_the_queue_with_poisson_arrivals_and_constant_service() -> None:
    """M/D/1: requests wait u D / 2 (1 - u) on average (Pollaczek and Khinchine)."""
    alone = Workload(lengths=((1000, 50),), users=1, requests=10)
    plan = planned("llama-3-8b", "h100-sxm", alone, max_num_seqs=1)
    service = served(plan, alone).request.median
    used = random.Random(SEED).uniform(0.2, 0.6)
    workload = replace(alone, users=None, rate=used / service, requests=10_000, seed=SEED)
    times = waits(plan.roofline.judged, workload)
    mean = sum(times) / len(times) - service
    assert mean == pytest.approx(used * service / (2 * (1 - used)), rel=0.12), (SEED, used)
    assert served(plan, workload).busy == pytest.approx(used, rel=0.05)


def waits(roofline: Roofline, workload: Workload) -> list[float]:
    """Seconds from arrival to the last token of every request."""
    found = outcome(roofline, workload)
    assert found is not None
    return [request.finished - request.arrived for request in found.requests]


class Walked:
    """A second simulation: every step by itself, every sequence's pass timed alone, every page counted."""

    def __init__(self, roofline: Roofline, workload: Workload) -> None:
        self.at, self.capacity, self.workload = roofline, roofline.capacity, workload
        self.stage = self.capacity.device.stages[0]
        self.room = self.capacity.memory - self.capacity.fixed(self.stage, workload.longest)
        self.preempted = 0

    def bytes_of(self, tokens: int) -> int:
        return self.capacity.per_user(self.stage, tokens) + self.capacity.scratch(self.stage)

    def step(self, passes: list[Pass]) -> float:
        rows = sum(run.tokens for run in passes)
        read: dict[str, float] = {}
        computed: dict[str, float] = {}
        for c in self.at.run(self.stage, Pass(tokens=1, batch=rows), 1).components:
            read[c.kind] = self.at.reading(c.weights, 0)
        for run in passes:
            for c in self.at.run(self.stage, run, 1).components:
                read[c.kind] = read.get(c.kind, 0) + self.at.reading(c.lookups, c.cache)
                computed[c.kind] = computed.get(c.kind, 0) + c.compute_seconds
        return sum(max(read.get(kind, 0), computed.get(kind, 0)) for kind in {*read, *computed})

    def run(self, count: int) -> list[tuple[float, float, float]]:
        """Returns arrival, first token and end of each request."""
        source = requests(self.workload, 1, lambda _: 0.0)
        pending = [next(source) for _ in range(8 * count)]
        waiting: list[list[int]] = []  # number, tokens to compute, tokens given
        active: list[list[int]] = []  # number, tokens to compute, computed, given
        told = {r.number: [r.arrived, math.inf, math.inf] for r in pending}
        now = 0.0
        while any(told[i][2] == math.inf for i in range(count)):
            while pending and pending[0].arrived <= now:
                r = pending.pop(0)
                waiting.append([r.number, r.prompt, 0, r.output])
            held = sum(self.bytes_of(a[1] if a[2] < a[1] else a[2] + 1) for a in active)
            while waiting and (not active or held + self.bytes_of(waiting[0][1]) <= self.room):
                number, whole, given, output = waiting.pop(0)
                active.append([number, whole, 0, given, output])
                held += self.bytes_of(whole)
            if not active:
                now = pending[0].arrived
                continue
            while held > self.room and len(active) > 1:
                number, whole, done, given, output = active.pop()
                held -= self.bytes_of(whole if done < whole else done + 1)
                waiting.insert(0, [number, whole if done < whole else done + 1, given, output])
                self.preempted += 1
            decoding = [a for a in active if a[2] >= a[1]]
            left, passes = self.capacity.chunk - len(decoding), [Pass(tokens=1, past=a[2]) for a in decoding]
            for a in active:
                if a[2] < a[1] and left:
                    tokens = min(left, a[1] - a[2])
                    passes.append(Pass(tokens=tokens, past=a[2], logits="last"))
                    left, a[2] = left - tokens, a[2] + tokens
                    if a[2] == a[1]:
                        a[3] += 1
                        told[a[0]][1] = min(told[a[0]][1], -1.0) if told[a[0]][1] == math.inf else told[a[0]][1]
            for a in decoding:
                a[2], a[3] = a[2] + 1, a[3] + 1
            now += self.step(passes)
            for a in [*active]:
                if told[a[0]][1] == -1.0:
                    told[a[0]][1] = now
                if a[3] >= a[4]:
                    told[a[0]][2] = now
                    active.remove(a)
        return [(a, b, c) for a, b, c in told.values()][:count]


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma-3-1b", "qwen3-30b-a3b"])
def test_equals_a_simulation_that_walks_every_step(model: str, *, tight: bool) -> None:
    drawn = random.Random(SEED)
    lengths = tuple((drawn.randint(1, 1500), drawn.randint(1, 120)) for _ in range(12))
    workload = Workload(lengths=lengths, rate=1e9 if tight else 60.0, requests=40, seed=SEED)
    options = {"chunk": 512, "conventions": {"utilisation": 1.0}}
    plan = planned(model, "memory=80GB,bandwidth=2TB/s,bf16=300T", workload, **options)
    if tight:  # room for about two and a half of the longest
        stage = plan.capacity.device.stages[0]
        each = plan.capacity.per_user(stage, workload.longest) + plan.capacity.logits
        room = int(plan.capacity.fixed(stage, workload.longest) + 2.5 * each)
        plan = planned(model, f"memory={room},bandwidth=2TB/s,bf16=300T", workload, **options)
    at = plan.roofline.judged
    walked = Walked(at, workload)
    told = walked.run(40)
    mean = sum(end - arrived for arrived, _, end in told) / 40
    whole = waits(at, workload)
    assert sum(whole) / 40 == pytest.approx(mean, rel=0.03 if tight or walked.preempted else 0.002), SEED


@pytest.mark.parametrize(("drafts", "acceptance"), [(0, 0.0), (3, 0.6)])
def test_every_token_is_counted_once(drafts: int, acceptance: float) -> None:
    drawn = random.Random(SEED)
    lengths = tuple((drawn.randint(1, 900), drawn.randint(1, 90)) for _ in range(9))
    workload = Workload(lengths=lengths, users=1, requests=30, drafts=drafts, acceptance=acceptance, seed=SEED)
    found = outcome(planned("smollm2-135m", "h100-sxm", workload).roofline.judged, workload)
    assert found is not None
    assert found.end.inputs == sum(request.prompt for request in found.requests)
    assert found.end.outputs == pytest.approx(sum(request.output for request in found.requests)), SEED
    assert found.end.finished == len(found.requests) == 30


def test_a_preempted_answer_is_computed_again_whole() -> None:
    """Of answers much longer than their prompts, two do not fit beside each other at their ends."""
    drawn = random.Random(SEED)
    lengths = tuple((drawn.randint(5, 20), drawn.randint(700, 900)) for _ in range(3))
    workload = Workload(lengths=lengths, rate=8.0, arrivals="even", requests=4, seed=SEED)
    options = {"chunk": 512, "conventions": {"utilisation": 1.0, "page": False}}
    plan = planned("smollm2-135m", "memory=80GB,bandwidth=2TB/s,bf16=3T", workload, **options)
    stage = plan.capacity.device.stages[0]
    each = plan.capacity.per_user(stage, workload.longest) + plan.capacity.logits
    room = int(plan.capacity.fixed(stage, workload.longest) + 1.1 * each)
    plan = planned("smollm2-135m", f"memory={room},bandwidth=2TB/s,bf16=3T", workload, **options)
    walked = Walked(plan.roofline.judged, workload)
    told = walked.run(4)
    assert walked.preempted
    found = outcome(plan.roofline.judged, workload)
    assert found is not None
    for (_, first, end), request in zip(told, found.requests, strict=True):
        assert (request.first, request.finished) == pytest.approx((first, end), rel=2e-3), SEED
