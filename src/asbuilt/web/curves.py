"""Points of the page's charts that no document carries: the roofline, users against context, speeds, memory by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.plan import ServePlan, TrainPlan
from asbuilt.plan.serve import formats, limits, money
from asbuilt.plan.serve.expected import LEVELS, Level
from asbuilt.plan.serve.roofline import Run
from asbuilt.plan.stage import every_stage
from asbuilt.plan.train.stages import Section

SHORTEST = 1024
MOST_POINTS = 16


def document(plan: ServePlan) -> dict[str, Any]:
    """Returns the points as plain data.

    `contexts` are those of the columns of the document's `by_format`, `decode` the point of its own batch.
    """
    contexts = list(formats.contexts(plan.capacity, plan.context)) if plan.by_format else []
    levels = {level: [_speed(plan, level, step.batch) for step in plan.sweep] for level in LEVELS}
    decode = None if plan.decode is None else _speed(plan, "middle", plan.decode.batch)
    return {
        "roofline": roofline(plan),
        "users": users(plan),
        "speeds": levels,
        "decode": decode,
        "contexts": contexts,
    }


def roofline(plan: ServePlan) -> dict[str, Any]:
    """Returns the two roofs, and where prefill and decode are below them: FLOPs per byte moved, and FLOP/s.

    A point's rate is its FLOPs over the theoretical minimum of its time, links included, so it is never above the roof.
    """
    (rate, precision), _ = plan.roofline.rates
    bandwidth = plan.roofline.bandwidth
    runs = [(f"prefill of {plan.prefill.prompt:,}", plan.prefill.run)]
    if plan.decode is not None:
        runs.append((f"decode step of {plan.decode.batch:,}", plan.decode.run))
    return {
        "bandwidth": bandwidth,
        "rate": rate,
        "precision": precision,
        "ridge": rate / bandwidth,
        "points": [_point(name, run) for name, run in runs],
    }


def _point(name: str, run: Run) -> dict[str, Any]:
    flops, moved = (run.times * sum(getattr(c, what) for c in run.components) for what in ("flops", "moved"))
    return {
        "name": name,
        "flops": flops,
        "moved": moved,
        "intensity": flops / moved if moved else None,
        "flops_per_second": flops / run.seconds if run.seconds else None,
        "bound": run.bound,
    }


def users(plan: ServePlan) -> list[dict[str, int]]:
    """Returns the users that are served within the targets at each context, from 1,024 tokens to the model's."""
    if plan.users is None:
        return []
    longest = max(plan.capacity.spec.max_positions, plan.context)
    contexts = {min(SHORTEST * 2**i, longest) for i in range(MOST_POINTS)} | {plan.context}
    return [{"context": c, "users": limits.most_users(plan.roofline, plan.asked.goal, c)} for c in sorted(contexts)]


def _speed(plan: ServePlan, level: Level, batch: int) -> dict[str, Any]:
    """Returns the speed that is expected of decode steps of a batch, and what a million tokens cost there.

    The cost is that of devices which do nothing else, None without a price.
    """
    seconds = plan.roofline.at(level).decode(batch, plan.context).seconds
    every, price = batch / seconds, plan.asked.price
    return {
        "batch": batch,
        "tokens_per_second": every,
        "tokens_per_second_per_user": 1 / seconds,
        "million_output": price and money.of_rates(price, plan.layout.gpus, every, every).million_output,
    }


def ranks(plan: TrainPlan) -> dict[str, Any]:
    """Returns the memory of a device of each pipeline stage: what it holds, and what is alive at its peak beside that.

    A plan's own stages are the distinct ones, of equal ones the first, with the most micro-batches in flight.
    """
    trial, pp = plan.trial, plan.trial.layout.pp
    one = trial.stages[0]
    every = [
        replace(one, section=Section(stage=stage, shares=one.shares)) for stage in every_stage(one.shares.blocks, pp)
    ]
    return {
        "memory": trial.memory,
        "usable": trial.memory - trial.reserve,
        "stages": [
            {
                "stage": stage.section.stage.number + 1,
                "ranks": trial.layout.gpus // pp,
                "in_flight": stage.in_flight,
                "state": stage.state.total,
                "gathered": stage.gathered + stage.scattered,
                "activations": stage.activations,
                "working": stage.outside + stage.temporary,
                "on_host": stage.on_host,
                "bytes": stage.total,
            }
            for stage in every
        ],
    }
