"""CPU seconds of plans, in one process: of one plan with its document, and of the whole catalogue on all machines.

Run as `python benchmarks/plan.py`. The budgets are 50 ms for one plan, 10 s for all of them, 2 s for 10,000 requests
of a workload.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress

from asbuilt import catalog
from asbuilt.catalog import machines
from asbuilt.errors import InputError
from asbuilt.plan.serve.ask import serve
from asbuilt.plan.serve.workload import Workload, simulate
from asbuilt.plan.train import report
from asbuilt.plan.train.plan import train

ONE, ALL, REQUESTS = 0.050, 10.0, 2.0


def cpu(work: object) -> float:
    began = time.process_time()
    work()  # type: ignore[operator]
    return time.process_time() - began


def first_plans() -> list[float]:
    """Plans a model for the first time: builds its spec, lays it out, plans it and writes the document."""
    return [cpu(lambda name=name: serve(catalog.find(name).spec(), "h100-sxm").document()) for name in catalog.names()]


def first_trainings() -> list[float]:
    """Plans the training of each model that can be planned for the first time, on 64 GPUs, with its suggestions."""
    found = []
    for name in catalog.names():
        with suppress(InputError):
            found.append(cpu(lambda name=name: report.document(train(name, "h100-sxm", gpus=64, zero=3))))
    return found


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


def simulations() -> list[float]:
    """Simulates 10,000 requests at three loads."""
    asked = [Workload(lengths=((2000, 300),), rate=rate, requests=10_000) for rate in (1.0, 5.0, 50.0)]
    at = serve("llama-3-8b", "h100-sxm", context=2300).roofline.at("middle")
    return [cpu(lambda workload=workload: simulate(at, workload)) for workload in asked]


def main() -> None:
    serve("gpt2", "t4").document()  # imports
    for first, what in ((first_plans(), "of serving"), (first_trainings(), "of training")):
        middle, most = (value * 1e3 for value in (statistics.median(first), max(first)))
        print(f"one plan {what}: median {middle:.1f} ms, longest {most:.1f} ms of CPU (at most {ONE * 1e3:.0f})")
    loads = ", ".join(f"{seconds:.2f}" for seconds in simulations())
    print(f"10,000 requests of a workload at 1, 5 and 50 requests/s: {loads} s of CPU (at most {REQUESTS:.0f})")
    for documents, what in ((False, "plans alone"), (True, "with limits, sweep, knee and suggestions")):
        plans, seconds = whole_catalogue(documents=documents)
        print(f"{plans:,} plans, all models on all machines, {what}: {seconds:.2f} s of CPU (at most {ALL:.0f})")


if __name__ == "__main__":
    main()
