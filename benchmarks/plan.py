"""CPU seconds of plans, in one process: of one plan with its document, and of the whole catalogue on all machines.

Run as `python benchmarks/plan.py`. The budgets are 50 ms for one plan and 10 s for all of them.
"""

from __future__ import annotations

import statistics
import time

from asbuilt import catalog
from asbuilt.catalog import machines
from asbuilt.plan.serve.plan import serve

ONE, ALL = 0.050, 10.0


def cpu(work: object) -> float:
    began = time.process_time()
    work()  # type: ignore[operator]
    return time.process_time() - began


def first_plans() -> list[float]:
    """Plans a model for the first time: builds its spec, lays it out, plans it and writes the document."""
    return [cpu(lambda name=name: serve(catalog.find(name).spec(), "h100-sxm").document()) for name in catalog.names()]


def whole_catalogue(*, documents: bool) -> tuple[int, float]:
    """Plans every model on every machine, with or without the whole document."""
    plans, began = 0, time.process_time()
    for name in catalog.names():
        spec = catalog.find(name).spec()
        for machine in machines.names():
            plan = serve(spec, machine)
            if documents:
                plan.document()
            plans += 1
    return plans, time.process_time() - began


def main() -> None:
    serve("gpt2", "t4").document()  # imports
    first = first_plans()
    print(
        f"one plan: median {statistics.median(first) * 1e3:.1f} ms, longest {max(first) * 1e3:.1f} ms of CPU "
        f"(at most {ONE * 1e3:.0f})"
    )
    for documents, what in ((False, "plans alone"), (True, "with limits, sweep, knee and suggestions")):
        plans, seconds = whole_catalogue(documents=documents)
        print(f"{plans:,} plans, all models on all machines, {what}: {seconds:.2f} s of CPU (at most {ALL:.0f})")


if __name__ == "__main__":
    main()
