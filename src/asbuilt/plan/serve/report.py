"""A serving plan as plain data and as tables, and the lines that derive its times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asbuilt.plan.lines import Line
from asbuilt.plan.render import Cell, Table
from asbuilt.plan.serve import commands, expert_loads, host_cache
from asbuilt.plan.serve import report_offload as offloads
from asbuilt.plan.serve import report_pools as pools
from asbuilt.plan.serve import report_workload as workloads
from asbuilt.plan.serve.conventions import MEANING, TIMES
from asbuilt.plan.serve.expected import LEVELS, SOURCES, machine_class
from asbuilt.shown import number, size, time
from asbuilt.spec.part import CacheFormat

if TYPE_CHECKING:
    from asbuilt.plan.serve.answers import Decode
    from asbuilt.plan.serve.plan import ServePlan
    from asbuilt.plan.serve.roofline import Run


def document(plan: ServePlan) -> dict[str, Any]:
    """Returns the plan as plain data."""
    return {
        "model": plan.asked.name,
        "machine": plan.machine.name,
        "layout": _layout(plan),
        "disaggregated": pools.plain(plan),
        "offload": offloads.plain(plan),
        "lora": _lora(plan),
        "experts": expert_loads.plain(plan),
        "kv_host": host_cache.plain(plan),
        "engine": _engine(plan),
        "dtype": plan.precision.name,
        "kv_dtype": plan.capacity.kv_dtype,
        "context": plan.context,
        "fits": plan.fits if plan.users is not None else None,
        "ladder": [_ladder_line(line) for line in plan.ladder],
        "weight_bytes": plan.weight_bytes,
        "kv_budget_bytes": plan.kv_budget_bytes,
        "cache_tokens": plan.cache_tokens,
        "users": plan.users,
        "users_that_fit": plan.users_that_fit,
        "largest_context": plan.largest_context,
        "largest_batch": plan.largest_batch,
        "smallest_count": plan.smallest_count,
        "smallest_card": plan.smallest_card,
        "cache_bytes": None if plan.caches is None else asdict(plan.caches),
        "components": _components_of((plan.decode or plan.prefill).run),
        "prefill": {"prompt": plan.prefill.prompt, "seconds": plan.prefill.seconds, "bound": plan.prefill.bound}
        | _run(plan.prefill.run),
        "decode": None if plan.decode is None else _decode(plan.decode) | _run(plan.decode.run),
        "expected": _expected(plan),
        "sweep": [_decode(step) for step in plan.sweep],
        "knee": plan.knee,
        "targets": plan.targets,
        "suggestions": [s.plain("change", "option", "fits", "users", "effect") for s in plan.suggestions],
        "conventions": plan.conventions.plain(),
        "asked": _asked(plan),
        "figures": _figures(plan),
        "version": _version(),
        "workload": workloads.plain(plan),
        "cost": workloads.costs_plain(plan),
        "by_format": [asdict(row) for row in plan.by_format],
        "alternatives": [asdict(alternative) for alternative in plan.alternatives],
        "efficiency": {"bandwidth": plan.roofline.bandwidth_efficiency, "compute": plan.roofline.compute_efficiency},
        "warnings": list(plan.warnings),
        "refused": [dict(zip(("path", "part", "figure", "reason"), row, strict=True)) for row in plan.refused],
    }


def _asked(plan: ServePlan) -> dict[str, Any]:
    """Returns everything that was asked, None for what was left to the plan."""
    asked, given, goal = plan.asked, plan.capacity.given, plan.asked.goal
    return {
        "users": asked.users,
        "gpus": asked.gpus,
        "prompt": goal.prompt,
        "latency_target": goal.latency,
        "first_token_target": goal.first_token,
        "any_vendor": goal.any_vendor,
        "chunk": given.chunk,
        "max_num_seqs": given.sequences,
        "price": None if asked.price is None else asdict(asked.price),
        **pools.asked(plan),
    }


def _version() -> str:
    """Returns the version of the package, "" where it is not installed."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version("asbuilt")
    except metadata.PackageNotFoundError:
        return ""


def _figures(plan: ServePlan) -> dict[str, Any]:
    """Returns the machine's figures, and the memory that the plan counts with."""
    return asdict(plan.machine) | {"rates": dict(plan.machine.rates), "memory_bytes": plan.capacity.memory}


def _engine(plan: ServePlan) -> dict[str, Any]:
    """Returns the engine, its values for this machine, and the command that starts it with those of the plan."""
    engine, c = plan.capacity.engine, plan.capacity
    return {
        "name": engine.name,
        "title": engine.title,
        "source": engine.source,
        "chunk": c.chunk,
        "max_num_seqs": c.sequences,
        "graphs_bytes": c.graphs,
        "command": plan.command,
        "command_leaves_out": commands.unsaid(plan),
        "constants": dict(engine.sources),
    }


def _expected(plan: ServePlan) -> dict[str, Any]:
    """Returns the expected times by level of efficiency, with the efficiencies and their sources."""
    found: dict[str, Any] = {}
    for level, (first, step) in plan.expected.items():
        each = {"prefill_seconds": first, "seconds_per_step": step, "tokens_per_second": None}
        if step is not None and plan.decode is not None:
            each["tokens_per_second"] = plan.decode.batch / step
        found[level] = each | {"efficiencies": plan.roofline.at(level).reached.plain()}
    assumed = not plan.roofline.given and plan.roofline.timed is None
    return found | {"judged_by": plan.conventions.targets, "sources": SOURCES if assumed else {}}


def _lora(plan: ServePlan) -> dict[str, Any] | None:
    """Returns the adapters beside the model and their bytes on the fullest device, None without any."""
    held, capacity = plan.capacity.adapters, plan.capacity
    if held is None:
        return None
    nbytes = max(map(capacity.all_adapters, capacity.device.stages))
    return {"adapters": held.count, "rank": held.rank, "targets": held.targets, "bytes": nbytes}


def _layout(plan: ServePlan) -> dict[str, int]:
    """Returns the degrees; `replicas` are copies of the whole model."""
    names = ("gpus", "tp", "pp", "ep")
    more = {"replicas": plan.layout.copies, "redundant_experts": plan.layout.redundant}
    return {name: getattr(plan.layout, name) for name in names} | more


def _ladder_line(line: Line) -> dict[str, Any]:
    return {
        "line": line.name,
        "bytes": line.value,
        "formula": line.symbols,
        "numbers": dict(line.numbers),
        "source": line.source,
        "note": line.note,
    }


def _components_of(run: Run) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in asdict(c).items() if name != "binding"}
        | {"moved": c.moved, "flops": c.flops, "flops_per_token": c.flops / run.rows, "bound": c.bound}
        for c in run.components
    ]


def _run(run: Run) -> dict[str, Any]:
    """Returns the breakdown of a pass of `rows` tokens, which a step runs `times` times."""
    return {
        "memory_seconds": run.memory_seconds,
        "compute_seconds": run.compute_seconds,
        "link_seconds": run.link_seconds,
        "rows": run.rows,
        "times": run.times,
    }


def _decode(step: Decode) -> dict[str, Any]:
    names = (
        "batch",
        "seconds_per_step",
        "overlapped_seconds",
        "tokens_per_second",
        "tokens_per_second_per_user",
        "memory_tokens_per_second",
        "compute_tokens_per_second",
        "bound",
    )
    return {name: getattr(step, name) for name in names}


def tables(plan: ServePlan) -> list[Table]:
    """Returns the answer first, then its derivation."""
    found = [
        _answer(plan),
        *pools.tables(plan),
        workloads.served(plan),
        workloads.costs(plan),
        suggestions(plan),
        *workloads.by_format(plan),
        _command(plan),
        _ladder(plan),
        offloads.in_host(plan),
        host_cache.table(plan),
        expert_loads.table(plan),
        _components(plan),
        _times(plan),
        _sweep(plan),
        _caches(plan),
        _alternatives(plan),
        _assumed(plan),
        notes(plan),
    ]
    return [table for table in found if table.rows]


def _verdict(plan: ServePlan) -> str:
    """Returns "not asked" for a model that does not generate, since it has no users to fit."""
    return "not applicable: it does not generate" if plan.users is None else "yes" if plan.fits else "no"


def _answer(plan: ServePlan) -> Table:
    wanted, within = plan.wanted, " within the targets" if plan.asked.goal.timed else ""
    rows: list[tuple[Cell, ...]] = [("fits", _verdict(plan) + _missed(plan))]
    if plan.users is not None:
        rows += [
            (f"users at {plan.context:,} tokens{within}", _users(plan)),
            ("tokens in the cache", f"{plan.cache_tokens:,}"),
            (f"largest context for {wanted:,} user{'s' * (wanted > 1)}{within}", _most(plan)),
            (f"largest batch{within}", f"{plan.largest_batch:,}"),
        ]
    if plan.users is not None and plan.disaggregated is None:
        fewest = "none of the counts tried" if plan.smallest_count is None else f"{plan.smallest_count:,}"
        rows += [
            (f"smallest single card{within}", plan.smallest_card or "none in the catalogue"),
            (f"fewest {plan.machine.name}{within}", fewest),
        ]
    rows.append((f"expected time to first token, prompt of {plan.prefill.prompt:,}", _range(plan, 0)))
    if plan.decode is not None:
        low, middle, high = (plan.decode.batch / (plan.expected[level][1] or 1) for level in LEVELS)
        rows += [
            (f"expected time per token, batch {plan.decode.batch:,}", _range(plan, 1)),
            ("expected tokens/s", f"{number(middle, 4)} ({number(low, 4)} to {number(high, 4)})"),
        ]
    if plan.disaggregated is None:
        rows.append((f"minimum time to first token, prompt of {plan.prefill.prompt:,}", _time(plan.prefill)))
    if plan.decode is not None:
        rows += [
            (f"minimum time per token, batch {plan.decode.batch:,}", _time(plan.decode)),
            (
                "maximum tokens/s, total and per user",
                f"{number(plan.decode.tokens_per_second, 4)}, {number(plan.decode.tokens_per_second_per_user, 4)}",
            ),
        ]
    return Table(plan.title, ("", "answer"), rows)


def _range(plan: ServePlan, which: int) -> str:
    """Returns the middle of the expected times and the fastest and slowest."""
    slow, middle, fast = (plan.expected[level][which] or 0 for level in LEVELS)
    return f"{time(middle)} ({time(fast)} to {time(slow)})"


def _users(plan: ServePlan) -> str:
    return f"{plan.users:,}" + (f" of {plan.users_that_fit:,} that fit" if plan.users != plan.users_that_fit else "")


def _most(plan: ServePlan) -> str:
    most = plan.roofline.capacity.spec.max_positions
    return f"{plan.largest_context:,}" + (" (the model's maximum)" if plan.largest_context == most else "")


def _missed(plan: ServePlan) -> str:
    missed = [name for name, met in plan.targets.items() if not met]
    times = [name for name in missed if name != workloads.RATE]
    said = [f"{' and '.join(times)} above the target"] if times else []
    said += [workloads.piled_up(plan)] if len(times) < len(missed) else []
    return f": {'; '.join(said)}" if said else ""


def _time(timed: Any) -> str:  # noqa: ANN401
    seconds = getattr(timed, "seconds_per_step", None) or timed.seconds
    return f"{time(seconds)}, {timed.bound}-bound"


def _ladder(plan: ServePlan) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for i, line in enumerate(plan.ladder):
        last = i == len(plan.ladder) - 1
        sign = "" if i == 0 else "= " if last else "− "
        rows.append(
            (sign + line.name, int(line.value), size(line.value), "; ".join(filter(None, (line.source, line.note))))
        )
    for line in plan.counted:
        value = size(line.value) if line.unit == "bytes" else line.unit
        rows.append((line.name, int(line.value), value, "; ".join(filter(None, (line.symbols, line.note)))))
    return Table("Memory of one device", ("line", "value", "", "from"), rows, drop=("from",))


def _command(plan: ServePlan) -> Table:
    """Returns the command that starts the engine; no rows where there is none."""
    rows = [(plan.command,)] if plan.command else []
    rows += [(f"it does not say: {what}",) for what in commands.unsaid(plan)]
    return Table(f"To start {plan.capacity.engine.title} with these values", ("command",), rows)


def _components(plan: ServePlan) -> Table:
    timed = plan.decode or plan.prefill
    run, what = timed.run, f"one prefill of {plan.prefill.prompt:,} tokens"
    if plan.decode is not None:
        many = f", {run.times} per step" if run.times > 1 else ""
        what = f"one decode pass of {run.rows:,} sequences at {plan.context:,} tokens{many}"
    rows: list[tuple[Cell, ...]] = [
        (c.name, c.stored, c.weights + c.lookups, c.cache, round(c.flops / run.rows), time(c.seconds), c.bound)
        for c in run.components
    ]
    sums = [sum(int(row[i]) for row in rows) for i in range(1, 5)]
    rows.append(("total, with links" if run.link_seconds else "total", *sums, time(run.seconds), timed.bound))
    columns = (
        "component",
        "bytes stored",
        "weight bytes moved",
        "cache bytes moved",
        "FLOPs per token",
        "minimum time",
        "bound",
    )
    return Table(
        f"Bytes, FLOPs and time on one device in {what}",
        columns,
        rows,
        drop=("bytes stored", "FLOPs per token", "cache bytes moved"),
    )


def _times(plan: ServePlan) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, timed in (("prefill", plan.prefill), ("decode step", plan.decode)):
        if timed is not None:
            run = timed.run
            roofs = (
                time(run.memory_seconds),
                time(run.compute_seconds),
                time(run.link_seconds) if run.link_seconds else "",
            )
            rows.append((name, *roofs, time(run.seconds), time(run.overlapped_seconds), timed.bound))
    columns = ("", "bytes / bandwidth", "FLOPs / rate", "links", "sum of components", "fully overlapped", "bound")
    (rate, precision), _ = plan.roofline.rates
    where = f"{number(plan.roofline.bandwidth / 1e9, 6)} GB/s, {number(rate / 1e12, 6)} TFLOP/s in {precision}"
    title = f"Theoretical minimum of the time, at {where}"
    return Table(title, columns, rows, drop=("fully overlapped", "links"))


def _sweep(plan: ServePlan) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            s.batch,
            time(s.seconds_per_step),
            time(s.run.memory_seconds),
            time(s.run.compute_seconds),
            number(s.tokens_per_second, 4),
            number(s.tokens_per_second_per_user, 4),
            s.bound,
            "yes" if s.batch <= (plan.users_that_fit or 0) else "no",
        )
        for s in plan.sweep
    ]
    knee = "memory-bound at every batch size" if plan.knee is None else f"compute-bound from {plan.knee:,} (the knee)"
    columns = ("batch", "minimum step time", "bytes", "FLOPs", "maximum tokens/s", "per user", "bound", "fits")
    return Table(f"Decode by batch: {knee}", columns, rows, drop=("FLOPs", "bytes"))


def _caches(plan: ServePlan) -> Table:
    if plan.caches is None:
        return Table("", (), [])
    c, block, kv = plan.caches, plan.conventions.block_size, plan.capacity.kv_dtype
    scaled = isinstance(plan.capacity.kv_bytes, CacheFormat)
    own = f"in {kv}" if scaled else f"in {plan.precision.activation}, its dtype"
    rows: list[tuple[Cell, ...]] = [
        (
            "theoretical minimum",
            c.minimum,
            size(c.minimum),
            f"in {kv}; sliding-window layers cache only their window",
        ),
        ("asbuilt's cache", c.object, size(c.object), own),
        ("a paged engine", c.paged, size(c.paged), f"in {kv}, pages of {block} tokens"),
    ]
    return Table(f"Cache of one sequence of {plan.context:,} tokens, whole model", ("", "bytes", "size", "how"), rows)


def suggestions(plan: ServePlan) -> Table:
    """Returns what to change; no rows if the users fit."""
    rows: list[tuple[Cell, ...]] = [
        (s.change, s.option, "fits" if s.fits else "insufficient", s.effect) for s in plan.suggestions
    ]
    return Table("What to change, best first", ("change", "option", "", "effect"), rows)


def _alternatives(plan: ServePlan) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (f"--{a.switch} {a.value}", f"{a.users:,}", number(a.tokens_per_second, 4), a.meaning)
        for a in plan.alternatives
    ]
    title = "Conventions that matter here, and the answers with others"
    return Table(title, ("convention", "users", "tokens/s", "meaning"), rows)


def _assumed(plan: ServePlan) -> Table:
    """Returns the assumptions, each with the option that changes it."""
    c, capacity = plan.conventions, plan.capacity
    rows: list[tuple[Cell, ...]] = [
        ("minimum times", TIMES, "--bandwidth-efficiency, --compute-efficiency"),
        ("expected times", _assumption(plan), "--bandwidth-efficiency, --compute-efficiency, --efficiency"),
        ("targets", MEANING["targets"][c.targets], "--targets"),
        (
            "memory",
            f"{MEANING['memory'][c.memory]}; {c.utilisation:g} of it is used",
            "--memory, --memory-utilisation",
        ),
        *workloads.assumed(plan),
        *offloads.assumed(plan),
        *pools.assumed(plan),
        ("engine", f"{capacity.engine.title}; {_at_once(plan)}", "--engine, --max-num-seqs"),
        ("attention", MEANING["kernel"][c.kernel], "--kernel"),
        ("prefill", f"{capacity.chunk:,} tokens at once", "--chunk"),
        (
            "several nodes",
            f"{c.node} devices per node; {c.network / 1e9:g} GB/s per device between nodes",
            "--node, --network",
        ),
    ]
    return Table("Assumptions", ("", "assumption", "option"), rows)


def _assumption(plan: ServePlan) -> str:
    """Returns what the expected times assume."""
    reached = plan.roofline.at("middle").reached
    if plan.roofline.given:
        return "the efficiencies that were given or measured"
    said = ", ".join(f"{value:.3g} of {name}" for name, value in reached.plain().items())
    if plan.roofline.timed is not None:
        return f"layers of the native kernels, timed on this machine: {said}"
    return f"{said} on a {machine_class(plan.machine)} machine, in the middle; the range has low and high ones"


def _at_once(plan: ServePlan) -> str:
    most = plan.capacity.sequences
    return "as many sequences as fit" if most is None else f"at most {most:,} sequences at once"


def notes(plan: ServePlan) -> Table:
    """Returns warnings and refusals."""
    rows: list[tuple[Cell, ...]] = [("warning", warning) for warning in plan.warnings]
    rows += [(f"refused: {figure}", f"{path or 'model'} ({part}): {why}") for path, part, figure, why in plan.refused]
    return Table("Notes", ("", ""), rows)


def compare(plans: Sequence[ServePlan]) -> Table:
    """Returns one row per plan."""
    columns = (
        "model",
        "machine",
        "layout",
        "fits",
        "weights per device, GB",
        "users",
        "largest context",
        "first token",
        "batch",
        "time per token",
        "tokens/s",
        "per user",
        "bound",
    )
    less = ("bound", "layout", "batch", "largest context", "weights per device, GB", "first token", "tokens/s")
    title = f"{len(plans)} plans; times are theoretical minima"
    return Table(title, columns, [_compared(plan) for plan in plans], drop=less)


def _compared(plan: ServePlan) -> tuple[Cell, ...]:
    layout, step = plan.layout, plan.decode
    how = f"{layout.gpus} (tp {layout.tp}, pp {layout.pp}, ep {layout.ep})" if layout.gpus > 1 else "1"
    first = (
        plan.asked.name,
        plan.machine.name,
        how,
        _verdict(plan),
        f"{plan.weight_bytes / 1e9:,.2f}",
        _or_dash(plan.users),
        _or_dash(plan.largest_context),
        time(plan.prefill.seconds),
    )
    if step is None:
        return (*first, "-", "-", "-", "-", plan.prefill.bound)
    return (
        *first,
        f"{step.batch:,}",
        time(step.seconds_per_step),
        number(step.tokens_per_second, 4),
        number(step.tokens_per_second_per_user, 4),
        step.bound,
    )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def time_lines(plan: ServePlan) -> Iterator[Line]:
    """Yields the lines of prefill and decode: each component, the total, and tokens/s."""
    yield from _run_lines(plan, f"prefill of {plan.prefill.prompt:,}", plan.prefill.run)
    if plan.decode is not None:
        step = plan.decode
        name = f"decode step of {step.batch:,}"
        yield from _run_lines(plan, name, step.run)
        yield Line(
            name="tokens/s",
            value=step.tokens_per_second,
            unit="tokens/s",
            formula="{batch} / {time of a step}",
            numbers={"batch": step.batch, "time of a step": step.seconds_per_step},
            note="theoretical maximum",
        )


def _run_lines(plan: ServePlan, name: str, run: Run) -> Iterator[Line]:
    parts = {}
    for c in run.components:
        if not c.seconds:
            continue
        at = plan.roofline.host if c.where == "host" else plan.roofline
        assert at is not None
        (rate, _), (score_rate, _) = at.rates
        numbers = {
            "bytes": c.moved,
            "bandwidth": at.bandwidth,
            "product FLOPs": c.products,
            "rate": rate,
            "score FLOPs": c.scores,
            "score rate": score_rate,
        }
        formula = "max({bytes} / {bandwidth}, {product FLOPs} / {rate} + {score FLOPs} / {score rate})"
        note = f"{c.bound}-bound"
        if c.seconds > max(c.memory_seconds, c.compute_seconds) * (
            1 + 1e-12
        ):  # some chunks are memory-bound, others compute-bound
            formula = "{bytes} / {bandwidth} + {product FLOPs} / {rate} + {score FLOPs} / {score rate}"
            numbers |= zip(("bytes", "product FLOPs", "score FLOPs"), c.binding, strict=True)
            note = "bytes of the memory-bound chunks, FLOPs of the others"
        yield Line(
            name=f"{name}: {c.name}",
            value=c.seconds,
            unit="seconds",
            numbers=numbers,
            source=f"bandwidth and rates: {at.capacity.machine.source}",
            formula=formula,
            note=note,
        )
        parts[c.name] = c.seconds
    formula = "{times} × (" + " + ".join(f"{{{kind}}}" for kind in parts) + ") + {links}"
    yield Line(
        name=name,
        value=run.seconds,
        unit="seconds",
        formula=formula,
        numbers={"times": run.times, **parts, "links": run.link_seconds},
        note="theoretical minimum",
    )
