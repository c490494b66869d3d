"""Points of the page's charts that no document carries: the roofline, and users against context."""

from __future__ import annotations

from typing import Any

from asbuilt.plan import ServePlan
from asbuilt.plan.serve import limits
from asbuilt.plan.serve.roofline import Run

SHORTEST = 1024
MOST_POINTS = 16


def document(plan: ServePlan) -> dict[str, Any]:
    """Returns the points as plain data."""
    return {"roofline": roofline(plan), "users": users(plan)}


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
