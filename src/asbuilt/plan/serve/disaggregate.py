"""Two pools of devices: one computes prompts, the other writes answers (Zhong et al. 2024, arXiv 2401.09670)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError, one_of
from asbuilt.plan.devices import unplanned
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.place import place
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.steptime import StepTimes
from asbuilt.plan.serve.transfer import TRANSFERS, Sent, Transfer, joined, sent
from asbuilt.plan.serve.workload import Workload
from asbuilt.spec import Model

DEGREES = ("tp", "pp", "ep", "chunk")
FORM = "a number of GPUs, and degrees: 16 or 16,tp=8,pp=1,ep=8,chunk=8192"
PART = re.compile(r"\s*([a-z]+)\s*=\s*([0-9]{1,9})\s*")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The devices of a pool, and what was asked of its layout; None is chosen by the plan."""

    gpus: int
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    chunk: int | None = None

    def plain(self) -> dict[str, int | None]:
        """Returns it as plain data."""
        return {name: getattr(self, name) for name in ("gpus", *DEGREES)}


def pool(text: str, field: str) -> Pool:
    """Returns the pool that an option names: 16,tp=8; raises InputError for anything else."""
    first, *rest = text.split(",")
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", first):
        raise InputError(field=field, value=text, allowed=FORM)
    degrees: dict[str, int] = {}
    for part in rest:
        found = PART.fullmatch(part)
        if found is None or found[1] not in DEGREES or found[1] in degrees:
            raise InputError(f"{part.strip() or 'nothing'} is no degree", field=field, value=text, allowed=FORM)
        degrees[found[1]] = int(found[2])
    return Pool(gpus=int(first), **degrees)


def asked(
    prefill: Pool | str | None,
    decode: Pool | str | None,
    transfer: str | None,
    *,
    spec: Model,
    machine: Machine,
    workload: Workload | None,
    others: Mapping[str, Any],
) -> tuple[Pool, Pool] | None:
    """Returns both pools, None without; raises InputError for one alone and beside `others` that contradict them."""
    if prefill is None or decode is None:
        _require_none({"prefill-gpus": prefill, "decode-gpus": decode}, transfer)
        return None
    if transfer is not None and transfer not in TRANSFERS:
        raise InputError(field="kv-transfer", value=transfer, allowed=one_of(TRANSFERS))
    for name, value in others.items():
        if value is not None:
            fix = "give degrees of each pool: --prefill-gpus 8,tp=4" if name in ("gpus", *DEGREES) else "leave it out"
            raise InputError("is not planned with two pools", field=name, value=value, fix=fix)
    if workload is not None and (workload.users is not None or workload.rate is None):
        raise InputError(
            "two pools are simulated with a rate alone", field="users", value=workload.users, fix="give --rate"
        )
    refused = {
        "slices of a GPU have no links": bool(machine.slice_of),
        "a model with an encoder is not planned so": "source" in spec.reads,
        "the model does not generate": any(figure == "decode" for _, _, figure, _ in unplanned(spec)),
    }
    for problem, holds in refused.items():
        if holds:
            raise InputError(problem, field="prefill-gpus", fix="plan it without pools")
    first, second = (
        pool(one, name) if isinstance(one, str) else one
        for name, one in (("prefill-gpus", prefill), ("decode-gpus", decode))
    )
    return first, second


def _require_none(given: Mapping[str, object], transfer: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            other = next(other for other in given if other != name)
            raise InputError("is one of two pools", field=name, value=str(value), fix=f"give --{other} too")
    if transfer is not None:
        raise InputError("nothing is sent", field="kv-transfer", value=transfer, fix="give --prefill-gpus too")


def placed(one: Pool, capacity: Capacity, field: str) -> Capacity:
    """Returns the capacity of a pool's devices; raises InputError naming the pool whose layout is not possible."""
    pp = 1 if one.pp is None and one.tp is not None else one.pp  # with tp alone, the rest are copies
    node = capacity.conventions.node
    try:
        layout = place(capacity.spec, gpus=one.gpus, tp=one.tp, pp=pp, ep=one.ep, node=node)
    except InputError as error:
        problem = f"{error.field}: {error.problem}" if error.problem else f"{error.field} = {error.value}"
        raise InputError(problem, field=field, value=error.value, allowed=error.allowed, fix=error.fix) from error
    chunk = capacity.chunk if one.chunk is None else one.chunk
    if not 1 <= chunk <= 10**9:
        raise InputError("chunk", field=field, value=chunk, allowed="a whole number from 1")
    given = replace(capacity.given, chunk=chunk if one.chunk is not None else capacity.given.chunk)
    rules = capacity.engine.rules(capacity.machine, layout, capacity.given.conventions)
    return replace(capacity, layout=layout, chunk=chunk, given=given, conventions=rules)


def apart(roofline: Roofline, pools: tuple[Pool, Pool], transfer: Transfer) -> Roofline:
    """Returns the roofline of the devices that decode, beside that of those that prefill."""
    first, second = (
        placed(one, roofline.capacity, field) for one, field in zip(pools, ("prefill-gpus", "decode-gpus"), strict=True)
    )
    return replace(roofline, capacity=second, prefiller=replace(roofline, capacity=first), transfer=transfer)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Requests/s that either pool serves at most; `ratio` devices that prefill for each that decodes make them equal.

    `users` sequences are decoded at once, after the mean of their lengths.
    """

    prefill: float
    decode: float
    users: int
    ratio: float

    @property
    def bound(self) -> str:
        """The pool that limits the rate."""
        return "prefill" if self.prefill < self.decode else "decode"


@dataclass(frozen=True, kw_only=True, eq=False)
class Disaggregated:
    """Both pools, as asked and as planned, for prompts of `prompt` tokens."""

    pools: tuple[Pool, Pool]
    roofline: Roofline
    prompt: int

    @property
    def prefiller(self) -> Roofline:
        """The roofline of the devices that prefill."""
        assert self.roofline.prefiller is not None
        return self.roofline.prefiller

    @property
    def transfer(self) -> Transfer:
        """Whether a cache is sent after its prompt or layer by layer."""
        return self.roofline.transfer

    @cached_property
    def crossing(self) -> Sent:
        """What crosses for one prompt."""
        return sent(self.prefiller.capacity, self.roofline.capacity, self.prompt)

    @cached_property
    def network(self) -> tuple[float, str]:
        """Bytes/s of one device between the pools, and its source."""
        return joined(self.prefiller.capacity, self.roofline.capacity)

    @property
    def gpus(self) -> int:
        """Devices of both pools."""
        return self.prefiller.capacity.layout.gpus + self.roofline.capacity.layout.gpus

    def balance(self, roofline: Roofline, workload: Workload, users: int) -> Balance:
        """Returns the balance at the roofline's level, where `users` of the longest sequences are decoded at once.

        A pool that prefills serves a prompt in its chunks' shares of steps that are full of such chunks; one that
        decodes serves `users` in as many steps as an answer has tokens after the first.
        """
        assert roofline.prefiller is not None
        prompt, answer = (max(1, round(mean)) for mean in workload.mean)
        shared = workload.shared(prompt)
        first, second = roofline.prefiller.capacity.layout, roofline.capacity.layout
        prefill = first.replicas / prefilling(roofline.prefiller, prompt, shared)
        steps = (answer - 1) / workload.advance * (1 + workload.drafts * workload.draft_cost)
        seconds = steps * decoding(roofline, users, prompt + answer // 2, workload.drafts + 1)
        decode = users / seconds if seconds else math.inf
        ratio = (decode / second.gpus) / (prefill / first.gpus)
        return Balance(prefill=prefill, decode=decode, users=users, ratio=ratio)


def prefilling(roofline: Roofline, prompt: int, shared: int = 0) -> float:
    """Returns the seconds of one group for each prompt, in steps that are full of prompts' chunks."""
    capacity = roofline.capacity
    times = StepTimes(roofline, chunk=capacity.chunk, longest=prompt)
    budget, seconds, idle = times.chunk * times.pp, 0.0, [0.0] * times.width
    for past in range(shared, prompt, times.chunk):
        tokens = min(times.chunk, prompt - past)
        many = budget / tokens
        full = tuple(many * value for value in times.prefill(tokens, past))
        seconds += times.seconds(0, idle, budget, full) / many
    return seconds


def decoding(roofline: Roofline, users: int, past: int, each: int) -> float:
    """Returns the seconds of a step of `users` sequences on all copies, which compute `each` tokens after `past`."""
    capacity = roofline.capacity
    many = math.ceil(users / capacity.layout.replicas)
    times = StepTimes(roofline, chunk=capacity.chunk, longest=past + 1, each=each)
    return times.seconds(many, [many * value for value in times.decoding(past)])
