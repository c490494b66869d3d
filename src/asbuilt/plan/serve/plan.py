"""Serving plans: one call, one typed result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from asbuilt import cost
from asbuilt.catalog import Entry, find, machines
from asbuilt.catalog.machine import Machine
from asbuilt.catalog.slices import require_undivided
from asbuilt.errors import InputError
from asbuilt.plan import render
from asbuilt.plan.devices import unplanned
from asbuilt.plan.explain import explain
from asbuilt.plan.lines import Line
from asbuilt.plan.network import NODE, unlinked
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import Precision, cache_bytes
from asbuilt.plan.quantised import mixed, quantised
from asbuilt.plan.serve import commands, disaggregate, engines, formats, limits, money, report, report_workload
from asbuilt.plan.serve.adapters import adapters
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.conventions import MEANING, Conventions
from asbuilt.plan.serve.disaggregate import Balance, Disaggregated, Pool
from asbuilt.plan.serve.efficiency import Timed
from asbuilt.plan.serve.expected import LEVELS, MINIMUM, Level
from asbuilt.plan.serve.host_cache import HostCache, host_cache
from asbuilt.plan.serve.ladder import cached_tokens, counted, ladder
from asbuilt.plan.serve.offload import offload, processor
from asbuilt.plan.serve.pages import held_bytes
from asbuilt.plan.serve.place import place
from asbuilt.plan.serve.roofline import Bound, Roofline, Run
from asbuilt.plan.serve.search import Found, search
from asbuilt.plan.serve.tandem import simulate
from asbuilt.plan.serve.transfer import Transfer
from asbuilt.plan.serve.workload import Served, Workload
from asbuilt.plan.suggestion import Suggestion
from asbuilt.spec import Model
from asbuilt.spec.part import CacheFormat

LARGEST_CONTEXT = 10**9
LARGEST_USERS = limits.MOST_USERS
USUAL_CONTEXT = 8192
SWEEP = tuple(2**i for i in range(11))
# The conventions that affect the number of users, and those that affect speed.
OF_USERS, OF_SPEED = ("memory", "windows", "count", "kernel"), ("embedding", "flops", "scores")


# Another convention's answer is printed if it differs by more than this fraction.
MATTERS = 0.005


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """One prompt alone: the minimum seconds to the first token, and the bottleneck."""

    prompt: int
    seconds: float
    bound: Bound
    run: Run


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One step of `batch` sequences at the context: minimum seconds, maximum tokens/s, bottleneck, either roof."""

    batch: int
    seconds_per_step: float
    overlapped_seconds: float
    tokens_per_second: float
    tokens_per_second_per_user: float
    memory_tokens_per_second: float
    compute_tokens_per_second: float
    bound: Bound
    run: Run


@dataclass(frozen=True, kw_only=True)
class Caches:
    """Bytes of one sequence's cache on all devices of a copy: theoretical minimum, asbuilt's, a paged engine's."""

    minimum: int
    object: int
    paged: int


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The answer with another setting of one convention, if different."""

    switch: str
    value: str
    users: int
    tokens_per_second: float
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The validated question; `users` None means as many as fit."""

    name: str
    context: int
    users: int | None
    goal: limits.Goal
    workload: Workload | None = None
    price: money.Price | None = None
    gpus: int | None = None
    kv_host: float | None = None
    pools: tuple[Pool, Pool] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ServePlan:
    """A serving plan; `document` returns it as plain data, `tables` as tables, `explain` as a derivation.

    `users` are those that fit and are served within the targets, `users_that_fit` those that memory alone allows.
    `refused` lists (path, part, figure, reason) for what cannot be planned; those figures are None. Answers to further
    questions (limits, sweep, suggestions) are computed on first use.
    """

    asked: Asked
    roofline: Roofline
    fits: bool
    ladder: tuple[Line, ...]
    counted: tuple[Line, ...]
    weight_bytes: int
    kv_budget_bytes: int
    cache_tokens: int | None
    users: int | None
    users_that_fit: int | None
    prefill: Prefill
    decode: Decode | None
    targets: dict[str, bool]
    warnings: tuple[str, ...]
    refused: tuple[tuple[str, str, str, str], ...]
    served: dict[Level, Served | None] | None = None
    """How the workload is served, with low, middle and high efficiencies; None where its sequences do not fit."""
    host_cache: HostCache | None = None
    """The second cache, in host memory."""
    disaggregated: Disaggregated | None = None
    """Both pools, where prompts are computed by other devices; capacity, layout and users are those of the others."""

    @property
    def capacity(self) -> Capacity:
        """The capacity of the placement."""
        return self.roofline.capacity

    @property
    def machine(self) -> Machine:
        """The machine."""
        return self.capacity.machine

    @property
    def layout(self) -> Placement:
        """The placement of the model on devices."""
        return self.capacity.layout

    @property
    def precision(self) -> Precision:
        """The format of the weights."""
        return self.capacity.precision

    @property
    def conventions(self) -> Conventions:
        """The switches."""
        return self.capacity.conventions

    @property
    def context(self) -> int:
        """Tokens per sequence."""
        return self.asked.context

    @property
    def wanted(self) -> int:
        """The number of users asked for, 1 by default."""
        return self.asked.goal.users

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.layout.gpus if self.disaggregated is None else self.disaggregated.gpus

    @cached_property
    def balances(self) -> dict[Level, Balance] | None:
        """The balance of the pools by level; None with one pool, without a workload, and where nothing fits."""
        pools, workload = self.disaggregated, self.asked.workload
        if pools is None or workload is None or not self.users:
            return None
        return {level: pools.balance(self.roofline.at(level), workload, self.users) for level in LEVELS}

    @cached_property
    def largest_context(self) -> int | None:
        """The largest context, within the model's, at which the users fit within the targets."""
        if self.users is None:
            return None
        return limits.largest_context(self.roofline, self.asked.goal, self.capacity.spec.max_positions)

    @property
    def largest_batch(self) -> int | None:
        """The largest number of sequences that fit and are served within the targets."""
        return self.users

    @cached_property
    def smallest_count(self) -> int | None:
        """The smallest number of this machine, of those tried, on which the users fit within the targets."""
        if self.users is None or self.disaggregated is not None:
            return None
        return limits.smallest_count(self.roofline, self.asked.goal, self.context)

    @cached_property
    def layouts(self) -> tuple[Found, ...]:
        """The layouts of this machine that meet the goal, the one with the fewest devices first."""
        return () if self.users is None else search(self.roofline, self.asked.goal, self.context, gpus=self.asked.gpus)

    @cached_property
    def smallest_card(self) -> str | None:
        """The name of the card with the least memory that alone serves the users within the targets."""
        return None if self._card is None else self._card.name

    @cached_property
    def _card(self) -> Machine | None:
        if self.users is None or self.disaggregated is not None:
            return None
        return limits.smallest_card(self.roofline, self.asked.goal, self.context)

    @cached_property
    def caches(self) -> Caches | None:
        """The three cache numbers."""
        return None if self.users is None else _caches(self.capacity, self.context)

    @cached_property
    def expected(self) -> dict[Level, tuple[float, float | None]]:
        """Seconds to the first token and of a step, with low, middle and high efficiencies; the slowest first."""
        found: dict[Level, tuple[float, float | None]] = {}
        for level in LEVELS:
            at = self.roofline.at(level)
            step = None if self.decode is None else at.decode(self.decode.batch, self.context).seconds
            found[level] = at.first_token(self.prefill.prompt), step
        return found

    @cached_property
    def costs(self) -> dict[Level, money.Cost] | None:
        """What the devices cost by level of efficiency; None without a price, and where the workload does not fit.

        Without a workload the tokens are those of prompts alone and of full steps alone.
        """
        price, found = self.asked.price, {}
        if price is None:
            return None
        prefiller = self.roofline.prefiller or self.roofline
        inputs = prefiller.capacity.layout.copies * self.prefill.prompt
        for level, (_, step) in self.expected.items():
            served = None if self.served is None else self.served[level]
            if served is not None:
                found[level] = money.of_workload(price, self.gpus, served)
            elif self.served is None:
                outputs = None if step is None or self.decode is None else self.decode.batch / step
                read = inputs / prefiller.at(level).prefill(self.prefill.prompt).seconds
                pools = prefiller.capacity.layout.gpus, self.layout.gpus
                found[level] = money.of_rates(price, self.gpus, read, outputs, pools)
        return found or None

    @cached_property
    def by_format(self) -> tuple[formats.Row, ...]:
        """Users and memory by format of weights and cache."""
        return () if self.users is None else tuple(formats.rows(self.capacity, self.context))

    @cached_property
    def sweep(self) -> tuple[Decode, ...]:
        """Decode steps at growing batch sizes."""
        return () if self.users is None else tuple(_decode(self.roofline, batch, self.context) for batch in SWEEP)

    @cached_property
    def knee(self) -> int | None:
        """The smallest batch that is compute-bound, None if every batch is memory-bound."""
        return None if self.users is None else self.roofline.knee(self.context)

    @cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """What to change if the users do not fit within the targets, best first."""
        if self.users is None or self.fits:
            return ()
        goal, count = self.asked.goal, self.smallest_count
        return limits.suggest(self.roofline, goal, self.context, count=count, card=self._card)

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The answers with other conventions, if different."""
        return () if self.decode is None else _alternatives(self.roofline, self.asked, self.users or 0, self.decode)

    @property
    def command(self) -> str:
        """The command line that starts the engine with the plan's values, "" where there is none."""
        return commands.command(self)

    def document(self) -> dict[str, Any]:
        """Returns the plan as plain data, whose keys are never removed."""
        return report.document(self)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Every figure with its derivation, in logical order."""
        return (*self.ladder, *self.counted, *report.time_lines(self))

    def explain(self) -> str:
        """Returns every formula with its numbers."""
        return "\n".join(explain(self.lines))

    def tables(self) -> list[render.Table]:
        """Returns the plan as tables."""
        return report.tables(self)

    def markdown(self) -> str:
        """Returns the tables as Markdown."""
        return render.markdown(self.tables())

    def _repr_html_(self) -> str:
        return render.html(self.tables())

    @property
    def title(self) -> str:
        """The question in one line."""
        layout = self.layout
        pools = self.disaggregated
        if pools is not None:
            both = (pools.prefiller.capacity.layout, layout)
            said = (f"{one.gpus} (tp {one.tp}, pp {one.pp}, ep {one.ep})" for one in both)
            where = f"{self.machine.name}, {' to prefill and '.join(said)} to decode"
            return f"{self.asked.name} in {self.precision.name} on {where}, {self.context:,} tokens"
        many = f"{layout.gpus} x " if layout.gpus > 1 else ""
        how = f" (tp {layout.tp}, pp {layout.pp}, ep {layout.ep})" if layout.gpus > 1 else ""
        return (
            f"{self.asked.name} in {self.precision.name} on {many}{self.machine.name}{how}, "
            f"{self.context:,} tokens, cache in {self.capacity.kv_dtype}"
        )


def serve(
    model: Model | str,
    gpu: Machine | str,
    *,
    name: str | None = None,
    gpus: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    prefill_gpus: Pool | str | None = None,
    decode_gpus: Pool | str | None = None,
    kv_transfer: Transfer | None = None,
    context: int | None = None,
    prompt: int | None = None,
    chunk: int | None = None,
    engine: str = engines.IDEAL.name,
    max_num_seqs: int | None = None,
    gpu_layers: int | None = None,
    cpu_moe: int | None = None,
    cpu: Machine | str | None = None,
    kv_host: float | None = None,
    lora: int | None = None,
    lora_rank: int | None = None,
    lora_targets: tuple[str, ...] | None = None,
    users: int | None = None,
    dtype: str | Precision | None = None,
    kv_dtype: str | None = None,
    latency_target: float | None = None,
    first_token_target: float | None = None,
    workload: Workload | None = None,
    price: money.Price | float | None = None,
    any_vendor: bool = False,
    bandwidth_efficiency: float = 1.0,
    compute_efficiency: float = 1.0,
    timed: Timed | None = None,
    conventions: Conventions | Mapping[str, Any] | None = None,
) -> ServePlan:
    """Returns the plan of serving `model` on `gpu`; nothing is run.

    `model` is a description or a catalogue name, `gpu` a machine or a value of `--gpu`. `users` is the number of
    sequences, None for as many as fit; `context` is in tokens, by default 8,192 or the model's if shorter. `dtype` None
    means as published for a catalogue model, bf16 for a description. Targets are in seconds, and every answer honours
    them: users, largest batch and context, smallest card and count. `engine` is one of `plan.serve.engines.ENGINES`,
    whose utilisation, `chunk`, `max_num_seqs` and conventions apply where they are not given; a mapping of conventions
    changes only those, a `Conventions` all of them. A `workload` is simulated: context, prompt and users are then its
    own by default, and the targets hold for 95% of its requests. `gpu_layers` and `cpu_moe` keep layers and experts in
    host memory, where `cpu` computes them (`plan.serve.offload`); `lora` adapters of `lora_rank` are beside the model
    (`plan.serve.adapters`). `kv_host` bytes of host memory keep sequences that wait. With `prefill_gpus` and
    `decode_gpus` ("16,tp=8") prompts are computed by other devices than answers, and `kv_transfer` says how caches
    cross (`plan.serve.disaggregate`). `price` is that of one device for
    an hour. Other cards are of the machine's vendor unless `any_vendor`. Expected times agree with those `timed` on the
    machine, if no efficiencies are given. Raises InputError naming the invalid argument.
    """
    row = find(model) if isinstance(model, str) else None
    spec = find(model).spec() if isinstance(model, str) else model
    machine = machines.resolve(gpu) if isinstance(gpu, str) else gpu
    chosen = engines.find(engine)
    sizes = chosen.sizes(machine)
    said = conventions if isinstance(conventions, Mapping) else {} if conventions is None else conventions.given()
    given = engines.Given(chunk=chunk, sequences=max_num_seqs, conventions=said)
    sequences = sizes.sequences if max_num_seqs is None else max_num_seqs
    chunk = sizes.chunk if chunk is None else chunk
    if workload is not None:
        context, prompt, users = _asked_of(spec, workload, context, prompt, users)
    context = min(USUAL_CONTEXT, spec.max_positions) if context is None else context
    if "tokens" not in spec.reads and context != spec.max_positions:
        raise InputError(
            "the number of tokens of an image is fixed", field="context", value=context, allowed=str(spec.max_positions)
        )
    _require(context=(context, LARGEST_CONTEXT), chunk=(chunk, LARGEST_CONTEXT))
    _require(**{"max-num-seqs": (1 if sequences is None else sequences, LARGEST_USERS)})
    _require(prompt=(1 if prompt is None else prompt, context), users=(1 if users is None else users, LARGEST_USERS))
    if not decodes(spec):  # attention is bidirectional: there is no prefill in chunks
        chunk = max(chunk, context)
    _require_positive(latency_target=latency_target, first_token_target=first_token_target)
    _require_share(bandwidth_efficiency=bandwidth_efficiency, compute_efficiency=compute_efficiency)
    held = dtype if isinstance(dtype, Precision) else _precision(spec, dtype, row)
    kv = held.kv or held.activation if kv_dtype is None else cost.cache_name(kv_dtype)
    cache_bytes(kv)
    chosen.rules(machine, Placement(), said)  # refuses what is not allowed, before the placement reads it
    alone = {"gpus": gpus, "tp": tp, "pp": pp, "ep": ep, "ngl": gpu_layers, "n-cpu-moe": cpu_moe, "kv-host": kv_host}
    pools = disaggregate.asked(
        prefill_gpus, decode_gpus, kv_transfer, spec=spec, machine=machine, workload=workload, others=alone
    )
    if machine.slice_of:
        tp, pp, ep = (1 if degree is None else degree for degree in (tp, pp, ep))
        for degree, many in (("tp", tp), ("pp", pp), ("ep", ep)):
            require_undivided(machine, many, degree)
    layout = Placement()
    if pools is None:
        layout = place(spec, gpus=gpus, tp=tp, pp=pp, ep=ep, node=said.get("node", NODE))
    capacity = Capacity(
        spec=spec,
        machine=machine,
        layout=layout,
        precision=held,
        kv_dtype=kv,
        chunk=chunk,
        conventions=chosen.rules(machine, layout, said),
        engine=chosen,
        sequences=sequences,
        given=given,
        adapters=adapters(spec, lora, lora_rank, lora_targets, offloaded=gpu_layers is not None or cpu_moe is not None),
        offload=offload(
            spec,
            gpu_layers=gpu_layers,
            cpu_moe=cpu_moe,
            processor=processor(machines.resolve(cpu)) if isinstance(cpu, str) else cpu,
            machine=machine,
            engine=chosen,
            layout=layout,
            simulated=workload is not None,
        ),
    )
    roofline = Roofline(
        capacity=capacity, bandwidth_efficiency=bandwidth_efficiency, compute_efficiency=compute_efficiency
    )
    if timed is not None and not roofline.given:
        roofline = replace(roofline, timed=timed.reached(roofline))
    if pools is not None:
        roofline = disaggregate.apart(roofline, pools, kv_transfer or "after")
    goal = limits.Goal(
        users=users or 1,
        latency=latency_target,
        first_token=first_token_target,
        prompt=prompt,
        workload=workload,
        any_vendor=any_vendor,
    )
    paid = money.Price(amount=price) if isinstance(price, int | float) else price
    return _answer(
        roofline,
        Asked(
            name=name or spec.name,
            context=context,
            users=users,
            goal=goal,
            workload=workload,
            price=paid,
            gpus=gpus,
            kv_host=kv_host,
            pools=pools,
        ),
    )


def _asked_of(
    spec: Model, workload: Workload, context: int | None, prompt: int | None, users: int | None
) -> tuple[int, int, int | None]:
    """Returns context, prompt and users: those given, else the workload's."""
    if not decodes(spec):
        raise InputError("the model does not generate", field="workload", fix="plan it without one")
    if "source" in spec.reads:
        raise InputError("a model with an encoder cannot be simulated", field="workload", fix="plan it without one")
    longest = workload.longest
    if context is not None and context < longest:
        allowed = f"at least {longest:,}, the longest prompt and answer of the workload"
        raise InputError(field="context", value=context, allowed=allowed)
    if longest > LARGEST_CONTEXT:
        raise InputError(field="input-tokens + output-tokens", value=longest, allowed=f"at most {LARGEST_CONTEXT:,}")
    if users is not None and workload.users is not None and users != workload.users:
        raise InputError("the workload has another number", field="users", value=users, allowed=f"{workload.users}")
    prompt = round(workload.mean[0]) if prompt is None else prompt
    return context or longest, prompt, workload.users if users is None else users


def _precision(spec: Model, dtype: str | None, row: Entry | None) -> Precision:
    if dtype is None and row is not None and row.quantization is not None:
        return quantised(spec, row.quantization, row.dtype, row.family)
    return mixed(spec, dtype or "bf16", "" if row is None else row.family)


def _require(**bounds: tuple[int, int]) -> None:
    for field, (value, most) in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputError(field=field, value=value, allowed=f"a whole number from 1 to {most:,}")


def _require_positive(**values: float | None) -> None:
    for field, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(field=field, value=value, allowed="a time above 0")


def _require_share(**values: float) -> None:
    for field, value in values.items():
        if not 0 < value <= 1:
            raise InputError(field=field, value=value, allowed="above 0 and at most 1")


def decodes(spec: Model) -> bool:
    """Returns whether the model generates token by token, which requires a cache or state."""
    return not any(figure == "decode" for _, _, figure, _ in unplanned(spec))


def _answer(roofline: Roofline, asked: Asked) -> ServePlan:
    capacity, context, goal = roofline.capacity, asked.context, asked.goal
    tokens = decodes(capacity.spec)
    room = int(min(capacity.users(context), LARGEST_USERS)) if tokens else None
    most = limits.most_users(roofline, goal, context) if tokens else 0
    batch = asked.users or max(1, most)
    sampled = batch if tokens and (asked.users or most) else 0
    steps = ladder(capacity, context, math.ceil(sampled / (capacity.layout.replicas)))
    budget = int(steps[-1].value)
    prefill = _prefill(roofline.prefiller or roofline, goal.prompt_at(roofline, context))
    decode = _decode(roofline, batch, context) if tokens else None
    targets = _targets(goal, roofline, asked, batch if tokens else None)
    served = None if asked.workload is None else _served(roofline, asked.workload)
    if served is not None:
        targets |= _in_workload(served["middle"], goal)
    return ServePlan(
        asked=asked,
        roofline=roofline,
        fits=tokens and most >= goal.users and all(targets.values()),
        served=served,
        host_cache=None if asked.kv_host is None else host_cache(roofline, asked.kv_host, context),
        ladder=steps,
        counted=() if room is None else counted(capacity, context, budget, room),
        weight_bytes=capacity.weight_bytes(),
        kv_budget_bytes=max(0, budget),
        cache_tokens=cached_tokens(capacity, capacity.tightest(context), context, budget) if tokens else None,
        users=most if tokens else None,
        users_that_fit=room,
        prefill=prefill,
        decode=decode,
        targets=targets,
        warnings=tuple(_warnings(roofline, asked)),
        refused=unplanned(capacity.spec),
        disaggregated=asked.pools and Disaggregated(pools=asked.pools, roofline=roofline, prompt=prefill.prompt),
    )


def _served(roofline: Roofline, workload: Workload) -> dict[Level, Served | None]:
    """Returns how the workload is served at each level; minimum times, and those of given efficiencies, are one."""
    if roofline.judged.reached is MINIMUM:
        return dict.fromkeys(LEVELS, simulate(roofline.judged, workload))
    return {level: simulate(roofline.at(level), workload) for level in LEVELS}


def _in_workload(served: Served | None, goal: limits.Goal) -> dict[str, bool]:
    """Returns whether a workload's rate is kept up, and 95% of its requests are served within the targets."""
    met = {report_workload.RATE: served is not None and served.sustained}
    if goal.latency is not None and served is not None and served.per_token is not None:
        met["95th percentile of the time per token"] = served.per_token.p95 <= goal.latency
    if goal.first_token is not None and served is not None:
        met["95th percentile of the time to first token"] = served.first_token.p95 <= goal.first_token
    return met


def _prefill(roofline: Roofline, prompt: int) -> Prefill:
    run = roofline.prefill(prompt)
    return Prefill(prompt=prompt, seconds=run.seconds, bound=run.bound, run=run)


def _decode(roofline: Roofline, batch: int, context: int) -> Decode:
    run = roofline.decode(batch, context)
    seconds = run.seconds
    return Decode(
        batch=batch,
        seconds_per_step=seconds,
        overlapped_seconds=run.overlapped_seconds,
        tokens_per_second=batch / seconds,
        tokens_per_second_per_user=1 / seconds,
        memory_tokens_per_second=batch / run.memory_seconds,
        compute_tokens_per_second=batch / run.compute_seconds,
        bound=run.bound,
        run=run,
    )


def _targets(goal: limits.Goal, roofline: Roofline, asked: Asked, batch: int | None) -> dict[str, bool]:
    met, judged = {}, roofline.judged
    if goal.latency is not None and batch is not None:
        met["time per token"] = judged.decode(batch, asked.context).seconds <= goal.latency
    if goal.first_token is not None:
        met["time to first token"] = judged.first_token(goal.prompt_at(roofline, asked.context)) <= goal.first_token
    return met


def _caches(capacity: Capacity, context: int) -> Caches:
    """Returns the caches of the whole model: a cache that is replicated on devices counts once."""
    alone = replace(capacity, layout=Placement(), offload=None).device.stages[0]
    numbers, c = alone.folds.cache_numbers(context), capacity.conventions
    paged = held_bytes(alone, context, replace(capacity.pages, block=c.block_size), capacity.kv_bytes, capacity.width)
    own = capacity.kv_bytes if isinstance(capacity.kv_bytes, CacheFormat) else capacity.precision.width
    return Caches(
        minimum=math.ceil(numbers.nbytes(capacity.kv_bytes)),
        object=math.ceil(numbers.nbytes(own)),
        paged=math.ceil(paged),
    )


def _alternatives(roofline: Roofline, asked: Asked, users: int, decode: Decode) -> tuple[Alternative, ...]:
    now, found = roofline.conventions, []
    for switch, value, other in now.others((*OF_USERS, *OF_SPEED)):
        changed = roofline.changed(conventions=other)
        then, speed = users, decode.tokens_per_second
        if switch in OF_USERS or asked.goal.timed:
            then = limits.most_users(changed, asked.goal, asked.context)
        if switch in OF_SPEED:
            speed = decode.batch / changed.decode(decode.batch, asked.context).seconds
        if then != users or abs(speed / decode.tokens_per_second - 1) > MATTERS:
            found.append(
                Alternative(
                    switch=switch, value=value, users=then, tokens_per_second=speed, meaning=MEANING[switch][value]
                )
            )
    return tuple(found)


def _warnings(roofline: Roofline, asked: Asked) -> Iterator[str]:
    capacity = roofline.capacity
    if asked.context > capacity.spec.max_positions:
        yield (
            f"{asked.context:,} tokens exceed the model's context of {capacity.spec.max_positions:,}: "
            "the costs are right, but the model's output there is unreliable"
        )
    for (_, used), wanted in zip(
        roofline.rates, (capacity.precision.compute, capacity.precision.activation), strict=True
    ):
        if used != wanted:
            yield f"{capacity.machine.name} has no {wanted} rate: products run at its {used} rate"
    if capacity.layout.per_copy > 1 and capacity.machine.link is None:
        yield unlinked(capacity.machine)
    if not capacity.engine.describes(capacity.machine):
        known = " and ".join(capacity.engine.vendors)
        where = f"on {capacity.machine.name} it may differ"
        yield f"the memory that {capacity.engine.title} takes is known of {known} devices: {where}"
    if capacity.graphs > capacity.reserve_left(asked.context):
        yield (
            f"{capacity.engine.title} captures CUDA graphs of about {capacity.graphs / 2**30:.2f} GiB after "
            "allocating the cache, more than the utilisation leaves: lower it"
        )
    yield from _across_nodes(roofline)
    if roofline.prefiller is not None:
        yield from (f"prefill: {warning}" for warning in _warnings(roofline.prefiller, asked))


def _across_nodes(roofline: Roofline) -> Iterator[str]:
    layout, network = roofline.capacity.layout, roofline.network
    wide, speed = layout.wide, f"{network.between / 1e9:g} GB/s a device (--node, --network)"
    if not network.inside(wide, 1):
        yield f"{wide} devices share each layer across several nodes of {network.node}: the network has {speed}"
    elif not network.inside(layout.pp, wide):
        yield f"pipeline stages span several nodes of {network.node}: the network has {speed}"
