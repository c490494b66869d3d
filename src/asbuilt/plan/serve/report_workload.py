"""How a serving plan says what a workload gets and costs, and its users and memory by format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asbuilt.plan.render import Cell, Table
from asbuilt.plan.serve import formats, report_pools
from asbuilt.plan.serve.expected import LEVELS
from asbuilt.shown import number, time

if TYPE_CHECKING:
    from asbuilt.plan.serve.money import Cost
    from asbuilt.plan.serve.plan import ServePlan
    from asbuilt.plan.serve.workload import Served, Workload

# Of a plan's targets, the one that is no time.
RATE = "the workload's rate"


def plain(plan: ServePlan) -> dict[str, Any] | None:
    """Returns the workload and how it is served at each level, None without one."""
    asked = plan.asked.workload
    if asked is None or plan.served is None:
        return None
    levels = {level: None if found is None else asdict(found) for level, found in plan.served.items()}
    return {"asked": asked.plain(), **levels}


def costs_plain(plan: ServePlan) -> dict[str, Any] | None:
    """Returns the cost at each level, None without a price."""
    if plan.costs is None or plan.asked.price is None:
        return None
    return {"currency": plan.asked.price.currency} | {level: asdict(cost) for level, cost in plan.costs.items()}


def served(plan: ServePlan) -> Table:
    """Returns what the workload gets; no rows without one."""
    asked = plan.asked.workload
    if asked is None or plan.served is None:
        return Table("", (), [])
    title = f"Workload, simulated: {said(asked)}"
    if any(found is None for found in plan.served.values()):
        longest = f"a sequence of {asked.longest:,} tokens does not fit in the cache"
        return Table(title, ("", "answer"), [("not served", longest)])
    low, middle, high = (found for level in LEVELS if (found := plan.served[level]) is not None)
    rows: list[tuple[Cell, ...]] = [
        _row("requests/s", low, middle, high, lambda s: number(s.requests_per_second, 4)),
        _row("tokens/s of answers", low, middle, high, lambda s: number(s.output_tokens_per_second, 4)),
        _row("tokens/s of prompts", low, middle, high, lambda s: number(s.input_tokens_per_second, 4)),
        _row("time to first token, median", low, middle, high, lambda s: time(s.first_token.median)),
        _row("time to first token, 95th percentile", low, middle, high, lambda s: time(s.first_token.p95)),
        _row("time per token, median", low, middle, high, lambda s: time(s.per_token.median) if s.per_token else "-"),
        _row(
            "time per token, 95th percentile",
            low,
            middle,
            high,
            lambda s: time(s.per_token.p95) if s.per_token else "-",
        ),
        _row("whole request, median", low, middle, high, lambda s: time(s.request.median)),
        _row("whole request, 95th percentile", low, middle, high, lambda s: time(s.request.p95)),
        _row("requests at once", low, middle, high, lambda s: number(s.concurrency, 3)),
        _row("cache used, mean and most", low, middle, high, lambda s: f"{s.cache_used:.0%}, {s.cache_most:.0%}"),
        _row("busy", low, middle, high, lambda s: f"{s.busy:.0%}"),
        _row("preemptions", low, middle, high, lambda s: f"{s.preemptions:,}"),
        *(
            [_row("brought back from the host", low, middle, high, lambda s: f"{s.returned:,}, {s.host_most:.0%} used")]
            if plan.host_cache is not None
            else []
        ),
        _row("the rate is kept up", low, middle, high, kept_up),
    ]
    rows += [_row(name, low, middle, high, shown) for name, shown in report_pools.served(plan)]
    return Table(title, ("", "expected", "fast", "slow"), rows)


def kept_up(served: Served) -> str:
    """Returns whether the rate is kept up, as far as the simulated requests can tell."""
    return {True: "yes", False: "no", None: "too few requests to tell"}[served.sustained]


def piled_up(plan: ServePlan) -> str:
    """Returns why a workload's rate is not kept up, or that this is not known."""
    found = None if plan.served is None else plan.served["middle"]
    if found is None:
        return "the longest request does not fit"
    if found.sustained is None:
        are = "request is" if found.simulated == 1 else "requests are"
        many = f"{found.simulated:,} {are} too few to tell whether the rate is kept up"
        return f"{many}: --requests {found.enough} would do"
    return "requests arrive faster than they are served"


def assumed(plan: ServePlan) -> list[tuple[Cell, ...]]:
    """Returns what a simulation assumes, nothing without one."""
    asked = plan.asked.workload
    if asked is None:
        return []
    said = "steps decode every sequence and fill the chunk with the oldest prompts; the newest sequence is preempted; "
    said += "the first tenth of the requests, or every user's first, is not counted"
    drafted = f"drafting takes {asked.draft_cost:g} of a step a token, and steps give the expected tokens"
    found: list[tuple[Cell, ...]] = [("workload", said, "--requests, --seed, --chunk, --max-num-seqs")]
    return [*found, ("drafts", drafted, "--draft-cost")] if asked.drafts else found


def compare(plans: Sequence[ServePlan]) -> Table:
    """Returns one row per plan: what the workload gets and costs with the middle efficiencies."""
    columns = (
        "model",
        "machine",
        "devices",
        "kept up",
        "first token, 95th",
        "per token, 95th",
        "tokens/s",
        "million out",
    )
    title = (
        f"{len(plans)} plans; expected times, simulated: {said(asked)}" if (asked := plans[0].asked.workload) else ""
    )
    return Table(title, columns, [_compared(plan) for plan in plans], drop=("devices", "kept up", "tokens/s"))


def _compared(plan: ServePlan) -> tuple[Cell, ...]:
    who: tuple[Cell, ...] = plan.asked.name, plan.machine.name, plan.layout.gpus
    found = None if plan.served is None else plan.served["middle"]
    if found is None:
        return (*who, "does not fit", "-", "-", "-", "-")
    cost = None if plan.costs is None else plan.costs["middle"].million_output
    return (
        *who,
        {True: "yes", False: "no", None: "?"}[found.sustained],
        time(found.first_token.p95),
        time(found.per_token.p95) if found.per_token else "-",
        number(found.output_tokens_per_second, 4),
        "-" if cost is None else number(float(cost), 3),
    )


def _row(name: str, low: Served, middle: Served, high: Served, shown: Any) -> tuple[Cell, ...]:  # noqa: ANN401
    return name, shown(middle), shown(high), shown(low)


def said(workload: Workload) -> str:
    """Returns the workload in one line."""
    prompt, answer = workload.mean
    many = len(workload.lengths)
    lengths = f"{number(prompt, 5)} tokens in, {number(answer, 5)} out"
    lengths += f" on average of {many:,}" if many > 1 else ""
    how = f"{workload.users:,} users" if workload.users is not None else ""
    if workload.rate is not None:
        how = f"{number(workload.rate, 4)} requests/s ({workload.arrivals})" + (f", at most {how}" if how else "")
    found = [lengths, how]
    if workload.prefix_share:
        found.append(f"{workload.prefix_share:.0%} of prompts shared")
    if workload.drafts:
        found.append(f"{workload.drafts} drafted, {workload.acceptance:g} accepted")
    return "; ".join([*found, f"seed {workload.seed}"])


def costs(plan: ServePlan) -> Table:
    """Returns the cost; no rows without a price."""
    price, found = plan.asked.price, plan.costs
    if price is None or found is None:
        return Table("", (), [])
    unit = f" {price.currency}" if price.currency else ""
    of = "prompts and answers share the hours by time" if plan.served else "prompts alone, and full steps alone"
    rows: list[tuple[Cell, ...]] = [
        _paid(name, found, attribute)
        for name, attribute in (
            ("one hour of all devices", "hour"),
            ("a million tokens of prompts", "million_input"),
            ("a million tokens of answers", "million_output"),
            ("a million tokens of both", "million_tokens"),
        )
        if getattr(found["middle"], attribute) is not None
    ]
    return Table(f"Cost{unit}: {of}", ("", "expected", "fast", "slow"), rows)


def _paid(name: str, found: dict[Any, Cost], attribute: str) -> tuple[Cell, ...]:
    values = (getattr(found.get(level), attribute, None) for level in ("middle", "high", "low"))
    return name, *("-" if value is None else number(float(value), 3) for value in values)


def layouts(plan: ServePlan) -> list[dict[str, Any]]:
    """Returns the layouts that meet the goal, the cheapest first."""
    price = plan.asked.price
    return [
        {
            "options": one.options,
            "gpus": one.layout.gpus,
            "copies": one.layout.copies,
            "tp": one.layout.tp,
            "pp": one.layout.pp,
            "ep": one.layout.ep,
            "redundant_experts": one.layout.redundant,
            "tokens_per_second": one.tokens_per_second,
            "hour": None if price is None else price.amount * one.layout.gpus,
        }
        for one in plan.layouts
    ]


def found(plan: ServePlan) -> Table:
    """Returns the layouts that meet the goal."""
    goal = plan.asked.goal
    what = f"{goal.users:,} user{'s' * (goal.users > 1)} of {plan.context:,} tokens"
    if plan.asked.workload is not None:
        what = said(plan.asked.workload)
    within = " within the targets" if goal.timed else ""
    title = f"Layouts of {plan.machine.name} that serve {plan.asked.name}{within}: {what}; the cheapest first"
    rows: list[tuple[Cell, ...]] = [
        (
            one["options"],
            one["gpus"],
            one["copies"],
            "-" if one["hour"] is None else number(float(one["hour"]), 4),
            number(float(one["tokens_per_second"]), 4),
        )
        for one in layouts(plan)
    ]
    columns = ("layout", "devices", "copies", "an hour", "expected tokens/s of the batch")
    return Table(title, columns, rows or [(f"none of {plan.asked.gpus or 'up to 256'} devices", "-", "-", "-", "-")])


def by_format(plan: ServePlan) -> list[Table]:
    """Returns users, and the cache of one, by format and context."""
    found = plan.by_format
    if not found:
        return []
    columns = formats.contexts(plan.capacity, plan.context)
    heads = tuple(f"{n:,}" for n in columns)
    rows = [(r.weights, r.cache, f"{r.weight_bytes / 1e9:,.2f}", *(f"{n:,}" for n in r.users)) for r in found]
    seen = {row.cache: row for row in reversed(found)}
    caches = [(kv, *(f"{n / 1e9:,.3f}" for n in row.user_bytes)) for kv, row in reversed(seen.items())]
    where = "" if plan.layout.gpus == 1 else f" on {plan.layout.gpus} devices"
    return [
        Table(f"Users{where} by format and context", ("weights", "cache", "GB a device", *heads), rows),
        Table("Cache of one user, GB a device", ("cache", *heads), caches),
    ]
