"""At the end of a run one line per family, how many comparisons and the worst of them, and the seed they came from."""

from __future__ import annotations

import os
import random
from dataclasses import asdict
from typing import Any

import harness
import pytest
import transformers
from cases import CASES
from ggml import compared, reference


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that asks for `case` and `variant` on every config of every family, or of those that decode."""
    if "variant" in metafunc.fixturenames:
        decodes = metafunc.definition.get_closest_marker("decodes") is not None
        cases = [case for case in CASES.values() if case.kind.decodes or not decodes]
        pairs = [(case, variant) for case in cases for variant in case.configs]
        metafunc.parametrize(("case", "variant"), pairs, ids=[f"{case.family}-{v}" for case, v in pairs])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the mutations of one variant of each family, drawn, to a run under CI: they take most of its time."""
    if not os.environ.get("CI"):
        return
    variants = {case.family: sorted(case.configs) for case in CASES.values()}
    kept = {family: random.Random(f"{harness.SEED} {family}").choice(names) for family, names in variants.items()}
    left_out = [item for item in items if item.path.name == "test_mutations.py" and _variant(item, kept) is False]
    config.hook.pytest_deselected(items=left_out)
    gone = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in gone]


def _variant(item: pytest.Item, kept: dict[str, str]) -> bool | None:
    """Returns whether a test of a case is of the family's variant that was drawn; None for another test."""
    call = getattr(item, "callspec", None)
    if call is None or "variant" not in call.params:
        return None
    return kept[call.params["case"].family] == call.params["variant"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands its results to the one that prints the table."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["llama.cpp"] = [asdict(result) for result in compared.RESULTS]
        output["parity"] = [(r.family, r.label, asdict(r.difference)) for r in harness.RESULTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401  a class of the plugin's own
    """Takes the results of another process."""
    for result in getattr(node, "workeroutput", {}).get("llama.cpp", []):
        compared.RESULTS.append(compared.Result(**result))
    for family, label, difference in getattr(node, "workeroutput", {}).get("parity", []):
        harness.RESULTS.append(harness.Result(family=family, label=label, difference=harness.Difference(**difference)))


def _llama_cpp_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not compared.RESULTS:
        return
    terminalreporter.section(f"log-probabilities beside llama.cpp (xllamacpp {reference.installed()})")
    terminalreporter.write_line(f"{'architecture':<22}{'comparisons':>12}{'worst':>10}{'our gelu':>10}  greedy tokens")
    for r in compared.RESULTS:
        own = f"{r.plain:>10.1e}" if r.plain != r.worst else " " * 10
        greedy = "equal" if r.greedy else "different"
        terminalreporter.write_line(f"{r.name:<22}{r.comparisons:>12}{r.worst:>10.1e}{own}  {greedy}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _llama_cpp_summary(terminalreporter)
    by_family: dict[str, list[harness.Result]] = {}
    for result in harness.RESULTS:
        by_family.setdefault(result.family, []).append(result)
    if not by_family:
        return
    terminalreporter.section(f"parity with transformers {transformers.__version__}, allowed {harness.TOLERANCE:g}")
    terminalreporter.write_line(f"{'family':<16}{'comparisons':>12}{'worst':>10}  where")
    for family, results in by_family.items():
        worst = max(results, key=lambda result: result.difference.worst)
        found = worst.difference
        line = f"{family:<16}{len(results):>12}{found.worst:>10.1e}  {found.where}, {worst.label}"
        terminalreporter.write_line(line, red=found.first is not None)
    terminalreporter.write_line(f"PARITY_SEED={harness.SEED} draws the same again")
