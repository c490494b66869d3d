"""What must grow grows, and what must not does not: contexts, users, devices, precisions and machines, all drawn."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import specs

from asbuilt import catalog
from asbuilt.catalog.machine import Machine
from asbuilt.plan import Conventions, ServePlan, serve
from asbuilt.plan.devices import degrees
from asbuilt.plan.serve.limits import largest
from asbuilt.spec import Model

NAMES = st.sampled_from(("llama-3-8b", "gemma-3-4b", "mixtral-8x7b", "mistral-7b-v0.1", "gpt2", "qwen3-30b-a3b"))
MACHINES = st.builds(
    Machine,
    name=st.just("drawn"),
    memory_gb=st.floats(1, 300),
    bandwidth=st.floats(1e10, 1e13),
    rates=st.fixed_dictionaries({"fp32": st.floats(1e11, 1e13), "bf16": st.floats(1e13, 1e15)}),
)
CONTEXTS = st.integers(1, 200_000)
Question = tuple[Model, Machine, dict[str, Any]]
CONVENTIONS = st.builds(
    Conventions,
    utilisation=st.floats(0.1, 1),
    page=st.booleans(),
    block_size=st.sampled_from((1, 7, 16, 256)),
    windows=st.sampled_from(("held", "full")),
    count=st.sampled_from(("floor", "nearest")),
    embedding=st.sampled_from(("lookup", "read")),
    scores=st.sampled_from(("causal", "full")),
)
# each in the list is no wider than the one before it
WEIGHTS = ("fp32", "bf16", "int8:16", "fp8:16", "int4:16", "int4:128", "int4")
CACHES = ("fp32", "bf16", "fp8", "int4")


@cache
def model(name: str) -> Model:
    return catalog.find(name).spec()


def room(plan: ServePlan) -> int:
    assert plan.users is not None
    return plan.users


def step(plan: ServePlan) -> float:
    assert plan.decode is not None
    return plan.decode.seconds_per_step


def ask(spec: Model, machine: Machine, asked: dict[str, Any], **more: Any) -> ServePlan:  # noqa: ANN401
    """The question with some of it asked otherwise."""
    return serve(spec, machine, **{**asked, **more})


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """A published model, a drawn machine and a drawn question."""
    asked = {"context": draw(CONTEXTS), "conventions": draw(CONVENTIONS), "chunk": draw(st.sampled_from((64, 2048)))}
    return model(draw(NAMES)), draw(MACHINES), asked


@given(questions(), CONTEXTS)
def test_more_context_is_never_more_users_nor_less_time(question: Question, other: int) -> None:
    spec, machine, asked = question
    short, long = sorted((asked["context"], other))
    chunk = min(asked["chunk"], short)
    a, b = (ask(spec, machine, asked, chunk=chunk, context=context, users=3) for context in (short, long))
    assert room(a) >= room(b)
    assert step(a) <= step(b)
    assert a.kv_budget_bytes == b.kv_budget_bytes
    assert a.weight_bytes == b.weight_bytes


@given(questions(), st.integers(1, 5000), st.integers(1, 5000))
def test_more_users_never_take_less_time(question: Question, one: int, other: int) -> None:
    spec, machine, asked = question
    few, many = sorted((one, other))
    a, b = (ask(spec, machine, asked, users=users) for users in (few, many))
    assert step(a) <= step(b)
    assert a.fits >= b.fits
    assert a.largest_context is not None
    assert b.largest_context is not None
    assert a.largest_context >= b.largest_context


@given(questions(), st.data())
def test_more_devices_are_never_more_bytes_each(question: Question, data: st.DataObject) -> None:
    spec, machine, asked = question
    tp = data.draw(st.sampled_from([d for d in degrees(spec, 32) if spec.shard(d)]))
    pp = data.draw(st.integers(1, 6))
    one, many = ask(spec, machine, asked), ask(spec, machine, asked, tp=tp, pp=pp)
    assert many.weight_bytes <= one.weight_bytes + (spec.embedding.holds()["weight"].size * 2 if pp > 1 else 0)
    cached = [{line.name: line.value for line in plan.counted}["cache per user"] for plan in (one, many)]
    assert cached[1] <= cached[0]
    assert many.layout.gpus == tp * pp
    if pp == 1:
        assert many.weight_bytes <= one.weight_bytes
        assert room(many) >= room(one)


@given(questions(), st.integers(1, 8))
def test_copies_multiply_users(question: Question, copies: int) -> None:
    spec, machine, asked = question
    one, many = ask(spec, machine, asked), ask(spec, machine, asked, gpus=copies, tp=1, pp=1)
    assert room(many) == copies * room(one)
    assert many.weight_bytes == one.weight_bytes


@given(questions(), st.integers(0, len(WEIGHTS) - 2), st.integers(0, len(CACHES) - 2))
def test_lower_precision_is_never_more_bytes(question: Question, i: int, j: int) -> None:
    spec, machine, asked = question
    wide, narrow = (ask(spec, machine, asked, dtype=WEIGHTS[k], kv_dtype="bf16") for k in (i, i + 1))
    assert narrow.weight_bytes <= wide.weight_bytes
    assert room(narrow) >= room(wide)
    wide, narrow = (ask(spec, machine, asked, kv_dtype=CACHES[k]) for k in (j, j + 1))
    assert room(narrow) >= room(wide)
    assert wide.caches is not None
    assert narrow.caches is not None
    assert narrow.caches.minimum <= wide.caches.minimum
    assert narrow.caches.object == wide.caches.object  # which is kept as activations are


@given(questions(), st.floats(1, 10))
def test_a_better_machine_is_never_worse(question: Question, factor: float) -> None:
    spec, machine, asked = question
    now = ask(spec, machine, asked, users=5)
    roomier = ask(spec, replace(machine, memory_gb=machine.memory_gb * factor), asked, users=5)
    wider = ask(spec, replace(machine, bandwidth=machine.bandwidth * factor), asked, users=5)
    rates = {precision: rate * factor for precision, rate in machine.rates.items()}
    faster = ask(spec, replace(machine, rates=rates), asked, users=5)
    assert room(roomier) >= room(now)
    assert step(roomier) == step(now)
    for better in (wider, faster):
        assert step(better) <= step(now)
        assert better.prefill.seconds <= now.prefill.seconds
        assert room(better) == room(now)


@given(questions(), st.floats(0.1, 1))
def test_keeping_more_back_is_never_more_users(question: Question, utilisation: float) -> None:
    spec, machine, asked = question
    less, more = sorted((asked["conventions"].utilisation, utilisation))
    held = [replace(asked["conventions"], utilisation=u) for u in (less, more)]
    plans = [ask(spec, machine, asked, conventions=c) for c in held]
    assert room(plans[0]) <= room(plans[1])
    unpaged = replace(asked["conventions"], page=False)
    assert room(ask(spec, machine, asked, conventions=unpaged)) >= room(ask(spec, machine, asked))


@given(questions(), st.integers(1, 50))
def test_limits_are_where_it_turns(question: Question, users: int) -> None:
    spec, machine, asked = question
    asked = {**asked, "chunk": 1}  # which is as long as in any context
    plan = ask(spec, machine, asked, users=users)
    most = plan.largest_context
    assert most is not None
    if most:
        assert ask(spec, machine, asked, context=most, users=users).fits
    if most < spec.max_positions:
        assert not ask(spec, machine, asked, context=most + 1, users=users).fits
    fitting = room(plan)
    assume(0 < fitting < 10**6)
    assert ask(spec, machine, asked, users=fitting).fits
    assert not ask(spec, machine, asked, users=fitting + 1).fits


@given(questions())
def test_a_step_is_no_shorter_than_either_roof(question: Question) -> None:
    spec, machine, asked = question
    plan = ask(spec, machine, asked, users=4)
    assert plan.decode is not None
    for run in (plan.decode.run, plan.prefill.run):
        assert max(run.memory_seconds, run.compute_seconds) == run.overlapped_seconds <= run.seconds * (1 + 1e-12)
        assert run.seconds <= (run.memory_seconds + run.compute_seconds) * (1 + 1e-12)
    if plan.knee is not None and plan.knee > 1:
        before = plan.roofline.decode(plan.knee - 1, plan.context)
        assert before.compute_seconds < before.memory_seconds


@given(specs(), MACHINES, st.integers(1, 64))
def test_any_drawn_model_is_planned(spec: Model, machine: Machine, context: int) -> None:
    """Nothing but the declarations is asked of a model; what remembers nothing is refused."""
    plan = serve(spec, machine, context=context)
    assert plan.document()["model"] == spec.name
    assert plan.tables()
    assert (plan.users is None) == bool(plan.refused)
    if plan.users is not None:
        assert plan.fits == (plan.users >= 1)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_largest_that_holds(most: int, limit: int) -> None:
    assert largest(lambda n: n <= limit, most) == min(most, limit)
