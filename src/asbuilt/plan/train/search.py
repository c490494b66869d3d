"""Which layouts fit, ranked by speed, and what to change if a plan does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError
from asbuilt.plan.placement import divisors
from asbuilt.plan.suggestion import Suggestion
from asbuilt.plan.train.choices import OWN_CHECKPOINTING
from asbuilt.plan.train.options import Options
from asbuilt.plan.train.plan import Trial, attempt
from asbuilt.plan.train.stages import fullest
from asbuilt.plan.train.subject import Subject

# Ring attention over more ranks is not tried, nor tensor parallelism beyond a node.
MOST_CONTEXT = 16
SHOWN = 20
# What suggestions try.
CHUNKS, ADAPTER_RANK = 8, 16
MOST_GPUS_SUGGESTED = 4096
MOST_CHANGES = 5
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The layouts that fit, fastest first, and how many were tried."""

    trials: tuple[Trial, ...]
    tried: int
    fitting: int


def search(
    subject: Subject, machine: Machine, options: Options, most: int = SHOWN, batches: Sequence[int] | None = None
) -> Ranked:
    """Returns the `most` fastest layouts of the GPUs that fit.

    The tokens per step stay as in `options`: a layout with fewer replicas accumulates more. Each is tried with every
    micro-batch of `batches`, by default that of `options`, and uses the least checkpointing that fits, since more is
    never faster. Pairs are contrasted within a micro-batch, so that of `options` stays.
    """
    if subject.model is None:
        raise InputError(
            "needs a model: a number of parameters alone cannot be divided",
            field="search",
            fix="name a MODEL",
        )
    sequences = options.batch * options.accumulate * options.layout.dp
    found: list[Trial] = []
    tried = 0
    tries = (replace(options, batch=batch) for batch in (not subject.paired and batches) or (options.batch,))
    for changed in (changed for each in tries for changed in _layouts(subject, each, sequences)):
        for way in OWN_CHECKPOINTING if options.checkpointing in OWN_CHECKPOINTING else (options.checkpointing,):
            trial = _try(subject, machine, replace(changed, checkpointing=way))
            if trial is None:  # a schedule or a group that this layout does not allow
                break
            tried += 1
            if trial.fits:
                found.append(trial)
                break
    found.sort(key=_rank)
    return Ranked(trials=tuple(found[:most]), tried=tried, fitting=len(found))


def _rank(trial: Trial) -> tuple[float, int, int]:
    """Returns the sort key: fastest first; within 1%, fewer kinds of parallelism, then fewer bytes."""
    layout = trial.layout
    kinds = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep)) + (layout.zero > 0)
    return float(f"{trial.step.seconds:.3g}"), kinds, trial.fullest.total


def _layouts(subject: Subject, options: Options, sequences: int) -> Iterator[Options]:
    """Yields options for every layout that the model and the GPUs allow."""
    gpus = options.gpus
    two = subject.paired or (subject.model is not None and "source" in subject.model.reads)
    blocks = gpus if subject.model is None else 1 if two else subject.model.n_layers
    tensor = [tp for tp in divisors(gpus) if tp <= options.node and subject.divides(tp)]
    rings = subject.model is not None and not two
    context = [cp for cp in divisors(gpus) if cp <= MOST_CONTEXT and options.seq % cp == 0 and (rings or cp == 1)]
    for tp in tensor:
        for cp in context:
            for pp in divisors(gpus // tp):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest or pp > blocks or sequences % (dp * options.batch):
                    continue
                for ep in divisors(subject.experts):
                    if dp * cp % ep == 0:
                        # stage 1 sends as much as stage 0 and holds less
                        for zero in (1, 2, 3) if dp * cp > 1 else (0,):
                            yield replace(
                                options,
                                tp=tp,
                                pp=pp,
                                cp=cp,
                                ep=ep,
                                zero=zero,
                                accumulate=sequences // (dp * options.batch),
                            )


def suggest(subject: Subject, machine: Machine, trial: Trial) -> list[Suggestion]:
    """Returns changes that make the plan fit, best first, then those that do not suffice by themselves.

    The order: changes on the same GPUs first, among them those that do not alter training, and among these those with
    the least GPU time.
    """
    made = [(words, _try(subject, machine, changed), alters) for words, changed, alters in _changes(subject, trial)]
    tried = [(words, found, alters) for words, found, alters in made if found is not None and _less(found, trial)]
    same = [alters for _, found, alters in tried if found.fits and found.layout.gpus == trial.layout.gpus]
    if all(same):
        together = _pair(subject, machine, trial) or _together(subject, machine, trial)
        tried += [together] if together is not None else []
    tried.sort(key=lambda item: _order(trial, *item[1:]))
    return [_suggestion(words, found, trial) for words, found, _ in tried]


def _order(trial: Trial, found: Trial, alters: bool) -> tuple[bool, bool, bool, float]:
    cost = found.step.seconds * found.layout.gpus / found.step.tokens
    more = found.layout.gpus > trial.layout.gpus
    return not found.fits, more, alters, cost if found.fits else float(found.fullest.total)


def _less(found: Trial, trial: Trial) -> bool:
    return found.fullest.total < trial.fullest.total


def _try(subject: Subject, machine: Machine, options: Options) -> Trial | None:
    if subject.model is not None and not subject.divides(options.tp):
        return None  # without the message, which lists the degrees that do
    try:
        return attempt(subject, machine, options)
    except InputError:
        return None  # not possible with this model or these GPUs


def _changes(subject: Subject, trial: Trial) -> Iterator[tuple[str, Options, bool]]:
    """Yields (option text, options, whether it alters training) for every single change, and for more GPUs."""
    o = trial.options
    for words, fields, alters in _single(subject, o):
        yield words, replace(o, **fields), alters
    zero: dict[str, Any] = {} if o.zero or o.gpus > 1 else {"zero": 3}
    sparing: dict[str, Any] = {"zero": 3, "checkpointing": "full"}
    sparing |= {} if subject.paired else {"chunked_loss": max(CHUNKS, o.chunked_loss)}
    for fields in (zero, sparing) if subject.model is not None else (zero,):  # without a model there are no activations
        found = _gpus_needed(subject, trial, replace(o, **fields))
        if found is not None:
            said = "".join(
                f" --{name.replace('_', '-')} {value}" for name, value in fields.items() if value != getattr(o, name)
            )
            yield f"--gpus {found}{said}", replace(o, **fields, gpus=found), False


def _gpus_needed(subject: Subject, trial: Trial, options: Options) -> int | None:
    """Returns the fewest GPUs, in powers of two times the current ones, on which `options` fit."""
    gpus = 2 * options.gpus
    while gpus <= MOST_GPUS_SUGGESTED:
        found = fullest(subject.stages(replace(options, gpus=gpus)))
        if found.total + trial.reserve <= trial.memory:
            return gpus
        gpus *= 2
    return None


def _single(subject: Subject, o: Options) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yields (option text, fields, whether it alters training): pairs are contrasted within a micro-batch."""
    layout = o.layout
    for zero in range(o.zero + 1, 4) if layout.replicas > 1 else ():
        yield f"--zero {zero}", {"zero": zero}, False
    own = OWN_CHECKPOINTING
    for way in own[own.index(o.checkpointing) + 1 :] if o.checkpointing in own else ("full",):
        yield f"--checkpointing {way}", {"checkpointing": way}, False
    if o.chunked_loss == 1:
        yield f"--chunked-loss {CHUNKS}", {"chunked_loss": CHUNKS}, False
    if o.batch % 2 == 0:
        halved = {"batch": o.batch // 2, "accumulate": 2 * o.accumulate}
        yield f"--micro-batch {o.batch // 2} --accumulate {2 * o.accumulate}", halved, subject.paired
    for name in ("tp", "pp", "cp", "ep"):
        degree = 2 * getattr(o, name)
        if o.gpus % 2 == 0 and not (name == "tp" and degree > o.node):
            yield f"--{name} {degree}", {name: degree}, False
    if o.offload == "none":
        yield "--offload optimizer", {"offload": "optimizer"}, False
    if o.optimizer in ("adamw", "muon"):
        yield "--optimizer adamw-8bit", {"optimizer": "adamw-8bit"}, True
        yield "--optimizer adafactor", {"optimizer": "adafactor"}, True
    yield from _adapted(o)


def _adapted(o: Options) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yields adapters over frozen matrices, plain and in NF4, each also with full checkpointing (as in QLoRA)."""
    if o.qlora:
        return
    fields: dict[str, Any] = {} if o.adapters is not None else {"lora": ADAPTER_RANK}
    rank = "" if o.adapters is not None else f"--lora {ADAPTER_RANK}"
    for words, more in ((rank, {}), (f"{rank} --qlora".strip(), {"qlora": True})):
        if fields or more:
            yield words, fields | more, True
            if o.checkpointing != "full":
                yield f"{words} --checkpointing full", fields | more | {"checkpointing": "full"}, True


def _pair(subject: Subject, machine: Machine, trial: Trial) -> tuple[str, Trial, bool] | None:
    """Returns the cheapest two changes that fit without altering training; None if no two suffice."""
    single = [(words, fields) for words, fields, alters in _single(subject, trial.options) if not alters]
    made = [
        (f"{a} {b}", _try(subject, machine, replace(trial.options, **(one | other))))
        for (a, one), (b, other) in combinations(single, 2)
        if not one.keys() & other.keys()
    ]
    fitting = [(words, found, False) for words, found in made if found is not None and found.fits]
    return min(fitting, key=lambda item: _order(trial, *item[1:])) if fitting else None


def _together(subject: Subject, machine: Machine, trial: Trial) -> tuple[str, Trial, bool] | None:
    """Returns several changes that do not alter training: greedily the one that saves the most, until it fits."""
    words: list[str] = []
    now = trial
    for _ in range(MOST_CHANGES):
        choices = [
            (said, _try(subject, machine, replace(now.options, **f)))
            for said, f, alters in _single(subject, now.options)
            if not alters
        ]
        better = [(said, found) for said, found in choices if found is not None and _less(found, now)]
        if not better:
            return None
        said, now = min(better, key=lambda item: (not item[1].fits, item[1].fullest.total))
        words.append(said)
        if now.fits:
            return " ".join(_latest(words)), now, False
    return None


def _latest(words: list[str]) -> list[str]:
    """Returns the options with only the last of repeated ones."""
    kept: dict[str, str] = {}
    for said in words:
        parts = said.split(" --")
        for i, part in enumerate(parts):
            text = part if i == 0 else f"--{part}"
            kept[text.split()[0]] = text
    return list(kept.values())


def _suggestion(words: str, found: Trial, trial: Trial) -> Suggestion:
    now, before = found.fullest.total, trial.fullest.total
    left = found.memory - found.reserve - now
    verdict = "fits" if found.fits else f"still {-left / 1e9:,.1f} GB over"
    pace = found.step.seconds / found.step.tokens / (trial.step.seconds / trial.step.tokens)
    speed = f"{1 / pace:.2f}x the {found.step.unit}/s"
    effect = f"{now / 1e9:,.1f} GB per device instead of {before / 1e9:,.1f}: {verdict}; {speed}"
    return Suggestion(
        change=words,
        option=words,
        effect=effect,
        fits=found.fits,
        per_device_bytes=now,
        step_seconds=found.step.seconds,
    )
