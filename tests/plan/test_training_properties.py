"""What must never grow: bytes of a device with more GPUs, ZeRO and checkpointing; and schedules, played through."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import strategies
from formulas import every_section
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from asbuilt import cost
from asbuilt.catalog import machines
from asbuilt.errors import InputError
from asbuilt.plan import Options, Subject
from asbuilt.plan.network import ring
from asbuilt.plan.placement import divisors
from asbuilt.plan.train.choices import OFFLOADS, OWN_CHECKPOINTING
from asbuilt.plan.train.optimizers import OPTIMIZERS
from asbuilt.plan.train.plan import Trial, attempt
from asbuilt.plan.train.stages import StageMemory
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    LanguageModel,
    Model,
    Parallel,
    Pass,
    PerLayerEmbedding,
    PerLayerInput,
    RMSNorm,
    TiedHead,
    TokenEmbedding,
)

H100 = machines.find("h100-sxm")
MODELS = strategies.specs(max_blocks=2) | strategies.translators()


@st.composite
def jobs(draw: DrawFn) -> tuple[Subject, Options]:
    """A drawn model, and any options that it allows."""
    spec = draw(MODELS)
    subject = Subject(spec)
    seq = 2 * draw(st.integers(1, 12))
    tp, whole = draw(st.sampled_from((1, 1, 2, 3))), "source" in spec.reads
    cp, pp = (1, 1) if whole else (draw(st.sampled_from((1, 2))), draw(st.integers(1, spec.n_layers)))
    ep = draw(st.sampled_from(divisors(subject.experts)))
    options = Options(
        gpus=tp * cp * pp * ep * draw(st.integers(1, 4)),
        batch=draw(st.integers(1, 3)),
        seq=seq,
        accumulate=draw(st.integers(1, 5)),
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        dtype=draw(st.sampled_from(("bf16", "fp32"))),
        master=draw(st.booleans()),
        zero=draw(st.integers(0, 3)),
        tp=tp,
        pp=pp,
        ep=ep,
        cp=cp,
        sequence_parallel=draw(st.booleans()),
        checkpointing=draw(st.sampled_from(OWN_CHECKPOINTING)),
        chunked_loss=draw(st.integers(1, 4)),
        offload=draw(st.sampled_from(OFFLOADS)),
        lora=draw(st.none() | st.integers(1, 3)),
        qlora=draw(st.booleans()),
    )
    try:
        subject.shares(options)
    except InputError:
        assume(False)  # heads or vocabulary that cannot be divided
    return subject, options


def tried(job: tuple[Subject, Options], **changes: Any) -> Trial:  # noqa: ANN401
    return attempt(job[0], H100, replace(job[1], **changes))


def total(job: tuple[Subject, Options], **changes: Any) -> int:  # noqa: ANN401
    return tried(job, **changes).fullest.total


@given(jobs(), st.integers(2, 5))
@settings(max_examples=20)
def test_more_gpus_are_never_more_bytes_per_device(job: tuple[Subject, Options], times: int) -> None:
    more = times * job[1].gpus
    if job[1].zero < 3:
        assert total(job, gpus=more) <= total(job)
    pairs = zip(tried(job, gpus=more).stages, tried(job).stages, strict=True)
    assert all(divided.state.total <= one.state.total for divided, one in pairs)


@given(jobs())
@settings(max_examples=20)
def test_a_higher_zero_stage_is_never_more(job: tuple[Subject, Options]) -> None:
    """Of state; with what is gathered and scattered, which may exceed that of a few small blocks, up to ZeRO-2."""
    trials = [tried(job, zero=zero) for zero in range(4)]
    held = [one.fullest.total for one in trials[:3]]
    assert held == sorted(held, reverse=True)
    for same in zip(*(one.stages for one in trials), strict=True):  # the fullest need not be the same one
        states = [one.state.total for one in same]
        assert states == sorted(states, reverse=True)


@given(jobs())
@settings(max_examples=20)
def test_more_checkpointing_is_never_more(job: tuple[Subject, Options]) -> None:
    kept = [tried(job, checkpointing=way, pp=1, gpus=job[1].gpus).fullest.activations for way in OWN_CHECKPOINTING]
    assert kept == sorted(kept, reverse=True)


@given(jobs(), st.integers(1, 4))
@settings(max_examples=20)
def test_a_larger_batch_is_never_less(job: tuple[Subject, Options], more: int) -> None:
    assert total(job, batch=job[1].batch + more) >= total(job)
    assert total(job, accumulate=job[1].accumulate + more) >= total(job)


@given(jobs())
@settings(max_examples=20)
def test_what_saves_never_costs(job: tuple[Subject, Options]) -> None:
    plain = {"lora": None, "qlora": False, "offload": "none", "optimizer": "adamw"}
    for changes in (
        {"offload": "optimizer"},
        {"offload": "activations"},
        {"offload": "all"},
        {"optimizer": "sgd-momentum"},
        {"optimizer": "muon"},
    ):
        assert total(job, **(plain | changes)) <= total(job, **plain)


@given(jobs())
@settings(max_examples=20)
def test_the_time_of_a_step_is_its_parts(job: tuple[Subject, Options]) -> None:
    step = tried(job, kernel_efficiency=0.57).step
    assert step.seconds >= job[1].accumulate * step.compute_seconds > 0
    faster = tried(job, kernel_efficiency=0.285).step
    assert faster.compute_seconds == 2 * step.compute_seconds  # 0.285 is half of 0.57
    expected = tried(job).step
    assert sum(expected.computing.values()) == expected.compute_seconds > 0
    for each in (step, expected):
        assert sum(each.breakdown.values()) == each.seconds
    for name, degree in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp"), ("expert", "ep")):
        assert step.communication[name].bytes == 0 or getattr(job[1], degree) > 1


def scaled_before_saved() -> Model:
    """A first block that saves the stream only as scaled, so that the per-layer embedding alone saves what it reads."""
    both = Parallel(
        attention=Attention(d_model=2, n_heads=1, n_kv_heads=1, d_head=1),
        ffn=MLP(d_model=2, d_ff=1, activation="relu"),
        input_scales=(0.6, 0.6),
    )
    vector = PerLayerInput(d_model=2, d=1, activation="relu")
    return LanguageModel(
        embedding=TokenEmbedding(n_vocab=2, d_model=2),
        per_layer=PerLayerEmbedding(n_vocab=1, n_layers=1, d=1, d_model=2, norm=RMSNorm(d=1)),
        blocks=(Block(branches=(Branch(name="both", body=both), Branch(name="vector", body=vector))),),
        head=TiedHead(d_model=2, n_vocab=2),
        max_positions=64,
    )


@given(MODELS, st.integers(2, 12), st.integers(1, 3))
@example(scaled_before_saved(), 2, 1)
@settings(max_examples=20)
def test_one_device_has_what_the_bill_says(spec: Model, tokens: int, batch: int) -> None:
    subject, run = Subject(spec), Pass(tokens=tokens, batch=batch)
    bill = cost.saved(spec, run)
    for way, kept in zip(OWN_CHECKPOINTING, (bill.all, bill.selective, bill.checkpointed), strict=True):
        found = attempt(subject, H100, Options(seq=tokens, batch=batch, checkpointing=way))
        assert found.fullest.activations + found.fullest.outside == kept
    assert attempt(subject, H100, Options(seq=tokens, batch=batch)).step.flops == cost.flops(spec, run).training_causal
    assert attempt(subject, H100, Options(seq=tokens)).fullest.state.weights == cost.weight_bytes(spec, "bf16")
    assert subject.total == cost.total_parameters(spec)
    assert subject.active == cost.active_parameters(spec)


def one_f_one_b(stages: int, micro: int) -> tuple[list[int], Fraction]:
    """Plays 1F1B through: the most micro-batches that each stage keeps, and the share of time it idles.

    Forward takes one unit and backward two. A stage warms up with as many forward passes as there are stages after it,
    then takes a backward pass whenever one is ready.
    """
    ready: dict[tuple[str, int, int], int] = {}
    clocks, kept, most = [0] * stages, [0] * stages, [0] * stages
    order = []
    for s in range(stages):
        warm = min(micro, stages - s - 1)
        work = [("f", i) for i in range(warm)]
        for i in range(micro - warm):
            work += [("f", warm + i), ("b", i)]
        work += [("b", i) for i in range(micro - warm, micro)]
        order.append(work)
    done = [0] * stages
    while any(done[s] < 2 * micro for s in range(stages)):
        for s in range(stages):
            while done[s] < 2 * micro:
                kind, i = order[s][done[s]]
                before = (kind, s - 1, i) if kind == "f" else (kind, s + 1, i)
                outermost = s == 0 if kind == "f" else s == stages - 1
                if not outermost and before not in ready:
                    break
                start = max(clocks[s], 0 if outermost else ready[before])
                clocks[s] = ready[kind, s, i] = start + (1 if kind == "f" else 2)
                kept[s] += 1 if kind == "f" else -1
                most[s] = max(most[s], kept[s])
                done[s] += 1
    length = max(clocks)
    return most, Fraction(length - 3 * micro, length)


@given(st.integers(1, 6), st.integers(1, 10))
def test_pipeline_is_1f1b_played_through(stages: int, micro: int) -> None:
    most, idle = one_f_one_b(stages, micro)
    subject = Subject(parameters=1e6)
    options = Options(gpus=stages, pp=stages, accumulate=micro)
    trial = attempt(subject, H100, options)
    every = every_section(subject.shares(options), stages)
    assert [StageMemory(section=s, layout=options.layout, job=options.job(1)).in_flight for s in every] == most
    assert abs(trial.step.bubble - float(idle)) < 1e-12


@given(st.integers(2, 9), st.integers(1, 50))
def test_a_ring_sends_n_minus_1_of_n(ranks: int, each: int) -> None:
    """An all-gather passed on piece by piece: every rank sends what it has just received, until all have all."""
    held = [{rank} for rank in range(ranks)]
    passing, sent = list(range(ranks)), 0
    while any(len(pieces) < ranks for pieces in held):
        passing = [passing[rank - 1] for rank in range(ranks)]
        sent += each
        for rank in range(ranks):
            held[rank].add(passing[rank])
    assert sent == round(ring(ranks) * ranks * each)
