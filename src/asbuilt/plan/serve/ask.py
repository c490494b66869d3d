"""The question that a serving plan answers: its arguments, checked, and the plan they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asbuilt import cost
from asbuilt.catalog import Entry, find, machines
from asbuilt.catalog.machine import Machine
from asbuilt.catalog.slices import require_undivided
from asbuilt.errors import InputError
from asbuilt.plan.devices import unplanned
from asbuilt.plan.network import NODE
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import Precision, cache_bytes
from asbuilt.plan.quantised import mixed, quantised
from asbuilt.plan.serve import answers, cautions, disaggregate, engines, limits, money, report_workload
from asbuilt.plan.serve.adapters import adapters
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.conventions import Conventions
from asbuilt.plan.serve.disaggregate import Disaggregated, Pool
from asbuilt.plan.serve.efficiency import Timed
from asbuilt.plan.serve.expected import LEVELS, MINIMUM, Level
from asbuilt.plan.serve.expert_loads import Experts, Loads, experts
from asbuilt.plan.serve.host_cache import host_cache
from asbuilt.plan.serve.ladder import cached_tokens, counted, ladder
from asbuilt.plan.serve.offload import offload, processor
from asbuilt.plan.serve.place import place
from asbuilt.plan.serve.plan import Asked, ServePlan
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.tandem import simulate
from asbuilt.plan.serve.transfer import Transfer
from asbuilt.plan.serve.workload import Served, Workload
from asbuilt.spec import Model

LARGEST_CONTEXT = 10**9
LARGEST_USERS = limits.MOST_USERS
USUAL_CONTEXT = 8192


def serve(
    model: Model | str,
    gpu: Machine | str,
    *,
    name: str | None = None,
    gpus: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    redundant_experts: int | None = None,
    expert_loads: Loads | None = None,
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
    cross (`plan.serve.disaggregate`). `redundant_experts` replicas are spread with the routed experts, for the loads in
    `expert_loads` (`plan.serve.expert_loads`). `price` is that of one device for
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
    alone |= {"redundant-experts": redundant_experts, "expert-loads": expert_loads and "given"}
    pools = disaggregate.asked(
        prefill_gpus, decode_gpus, kv_transfer, spec=spec, machine=machine, workload=workload, others=alone
    )
    if machine.slice_of:
        tp, pp, ep = (1 if degree is None else degree for degree in (tp, pp, ep))
        for degree, many in (("tp", tp), ("pp", pp), ("ep", ep)):
            require_undivided(machine, many, degree)
    layout = Placement()
    if pools is None:
        node = said.get("node", NODE)
        layout = place(spec, gpus=gpus, tp=tp, pp=pp, ep=ep, node=node, redundant=redundant_experts)
    replicas = experts(spec, layout, expert_loads)
    capacity = Capacity(
        spec=spec,
        machine=machine,
        layout=layout,
        precision=held,
        kv_dtype=kv,
        chunk=chunk,
        conventions=chosen.rules(machine, layout, said),
        engine=chosen,
        kv_host=kv_host,
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
        replicas,
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


def _answer(roofline: Roofline, asked: Asked, replicas: Experts | None) -> ServePlan:
    capacity, context, goal = roofline.capacity, asked.context, asked.goal
    tokens = decodes(capacity.spec)
    room = int(min(capacity.users(context), LARGEST_USERS)) if tokens else None
    most = limits.most_users(roofline, goal, context) if tokens else 0
    batch = asked.users or max(1, most)
    sampled = batch if tokens and (asked.users or most) else 0
    steps = ladder(capacity, context, math.ceil(sampled / (capacity.layout.replicas)))
    budget = int(steps[-1].value)
    prefill = answers.prefill(roofline.prefiller or roofline, goal.prompt_at(roofline, context))
    decode = answers.decode(roofline, batch, context) if tokens else None
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
        experts=replicas,
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
        warnings=tuple(cautions.warnings(roofline, context)),
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
    met = {report_workload.RATE: served is not None and bool(served.sustained)}
    if goal.latency is not None and served is not None and served.per_token is not None:
        met["95th percentile of the time per token"] = served.per_token.p95 <= goal.latency
    if goal.first_token is not None and served is not None:
        met["95th percentile of the time to first token"] = served.first_token.p95 <= goal.first_token
    return met


def _targets(goal: limits.Goal, roofline: Roofline, asked: Asked, batch: int | None) -> dict[str, bool]:
    met, judged = {}, roofline.judged
    if goal.latency is not None and batch is not None:
        met["time per token"] = judged.decode(batch, asked.context).seconds <= goal.latency
    if goal.first_token is not None:
        met["time to first token"] = judged.first_token(goal.prompt_at(roofline, asked.context)) <= goal.first_token
    return met
