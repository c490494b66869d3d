"""`asbuilt plan serve` with a workload: documents, tables, prices, layouts, and one message for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from asbuilt.cli.plan import COMMANDS
from asbuilt.plan.serve.ask import serve
from asbuilt.plan.serve.workload import Workload

Run = Callable[..., Result]
WORDS = ("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm")
ASKED = ("--input-tokens", "2k", "--output-tokens", 300, "--rate", "300/min", "--requests", 400)


def test_the_document_has_the_workload(run: Run) -> None:
    found = run(*WORDS, *ASKED, "--price", "$2.50/h", "--json")
    assert found.exit_code == 0
    document = json.loads(found.stdout)
    workload = Workload(lengths=((2000, 300),), rate=5.0, requests=400)
    plan = serve("llama-3-8b", "h100-sxm", workload=workload, price=2.5)
    made = json.loads(json.dumps(plan.document()))
    assert document["workload"] == made["workload"]
    assert document["cost"] == made["cost"] | {"currency": "$"}
    assert document["typed"]["--rate"] == "300/min"
    assert document["context"] == 2300


def test_tables_and_verdicts(run: Run, tmp_path: Path) -> None:
    said = run(*WORDS, *ASKED, "--price", 2).stdout
    for words in ("Workload, simulated: 2,000 tokens in, 300 out", "95th percentile", "a million tokens of answers"):
        assert words in said
    late = run(*WORDS, *ASKED, "--first-token-target", "51ms", "--prompt", 100)
    assert late.exit_code == 1
    assert "95th percentile of the time to first token above the target" in late.stdout
    path = tmp_path / "lengths"
    path.write_text("1000 10\n200 20\n")
    drawn = run(*WORDS, "--lengths", str(path), "--users", 4, "--requests", 50)
    assert drawn.exit_code == 0
    assert "600 tokens in, 15 out on average of 2; 4 users" in drawn.stdout
    both = run(*WORDS, "l40s", *ASKED, "--price", 2, "--price", 1)
    assert "2 plans; expected times, simulated" in both.stdout


def test_search(run: Run) -> None:
    words = (*WORDS, *ASKED[:-4], "--rate", "20/s", "--requests", 60, "--search")
    found = json.loads(run(*words, "--price", 2, "--json").stdout)["layouts"]
    assert [one["hour"] for one in found] == [2.0 * one["gpus"] for one in found]
    assert run(*words).exit_code == 0
    assert found[0]["options"] in run(*words).stdout
    none = run(*words, "--gpus", 1)
    assert none.exit_code == 1
    assert "none of 1 devices" in none.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "5/s"), "rate: needs a workload"),
        (("--seed", 3), "seed: needs a workload"),
        (("--input-tokens", 5), "output-tokens: missing"),
        (("--input-tokens", 5, "--output-tokens", 5), "rate, users: a workload needs one of them"),
        ((*ASKED, "--lengths", "x"), "lengths: replaces"),
        (("--input-tokens", 5, "--output-tokens", 5, "--rate", 5), "rate: has no unit"),
        ((*ASKED, "--price", "free"), "price: must be"),
        ((*ASKED, "--price", 1, "--price", 2), "price: must be given once"),
        ((*ASKED, "--context", "1k"), "context: must be at least 2,300"),
        ((*ASKED, "--acceptance", 0.5), "acceptance, draft-cost: nothing is drafted"),
        (("--input-tokens", "1000k", "--output-tokens", 5, "--users", 1, "--requests", 10**6), "requests: 1,000,000"),
    ],
)
def test_refused(run: Run, words: tuple[object, ...], message: str) -> None:
    # a cache in which a million tokens fit
    found = run("plan", "serve", "smollm2-135m", "--gpu", "h200", *words)
    assert found.exit_code == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("text", ["5 -3", "a b", "", "1 2 3"])
def test_a_file_of_lengths_that_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(f"{text}\n")
    found = run(*WORDS, "--lengths", str(path), "--rate", "1/s")
    assert found.exit_code == 2
    assert "lengths" in found.stderr


def test_the_help_lists_the_commands_with_their_first_sentences(run: Run) -> None:
    said = " ".join(run("plan", "--help").stdout.split())
    for name, line in COMMANDS.items():
        assert line in said
        assert " ".join(run("plan", name, "--help").stdout.split()).find(line.rstrip(".")) > 0, name
