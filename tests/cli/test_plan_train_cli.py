"""`asbuilt plan train`: exit codes, one JSON document, and the message for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]
LLAMA = ("plan", "train", "llama-3-8b", "--gpu", "h100-sxm")


def test_what_does_not_fit(run: Run) -> None:
    result = run(*LLAMA, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["fits"] is False
    assert found["suggestions"][0]["fits"]


def test_what_fits(run: Run) -> None:
    result = run(*LLAMA, "--gpus", 8, "--zero", 3, "--checkpointing", "full", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["fits"] is True
    assert found["suggestions"] == []
    assert found["layout"] == {"dp": 8, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "zero": 3, "hsdp": None}


def test_parameters_in_place_of_a_model(run: Run) -> None:
    for number in ("7.5e9", "7.5B"):
        found = json.loads(
            run(
                "plan", "train", "--parameters", number, "--gpu", "a100-80gb", "--gpus", 64, "--zero", 3, "--json"
            ).stdout
        )
        assert found["state_bytes"]["total"] == 1_875_000_000


def test_a_folder(run: Run, checkpoint: Path) -> None:
    result = run("plan", "train", checkpoint, "--gpu", "h100-sxm", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["options"]["seq"] == 64


def test_search(run: Run) -> None:
    result = run(*LLAMA, "--gpus", 8, "--search", "--json")
    assert result.exit_code == 0
    layouts = json.loads(result.stdout)["search"]["layouts"]
    best = layouts[0]
    words = best["options"].split()
    again = run(*LLAMA, *words, "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["per_device_bytes"] == best["per_device_bytes"]
    assert "seconds per step" in run(*LLAMA, "--gpus", 8, "--search").stdout
    assert run(*LLAMA, "--search").exit_code == 1


@pytest.mark.parametrize("way", [(), ("--markdown",), ("--explain",), ("--chunked-loss",), ("--chunked-loss", "4")])
def test_printed(run: Run, way: tuple[str, ...]) -> None:
    result = run(
        *LLAMA,
        "--gpus",
        16,
        "--tp",
        2,
        "--pp",
        2,
        "--zero",
        1,
        "--accumulate",
        8,
        "--price",
        2,
        "--tokens",
        "15T",
        *way,
    )
    assert result.exit_code == 0, result.output
    assert "master weights" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "3", "--tp", "3"), ("tp", "1, 2, 4, 8")),
        (("--gpus", "7", "--pp", "2"), ("gpus", "multiple of 2")),
        (("--optimizer", "adam"), ("optimizer", "adamw")),
        (("--zero", "7"), ("zero", "0, 1, 2 or 3")),
        (("--lora", "8", "--targets", "query"), ("targets", "q, k, v")),
        (("--tokens", "many"), ("tokens",)),
        (("--network", "fast"), ("network",)),
        (("--parameters", "7e9"), ("MODEL", "--parameters")),
    ],
    ids=str,
)
def test_wrong_input(run: Run, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    result = run(*LLAMA, *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert all(word in result.stderr for word in said)


def test_unknown_gpu_and_no_model(run: Run) -> None:
    unknown = run("plan", "train", "llama-3-8b", "--gpu", "h1000")
    assert unknown.exit_code == 2
    assert "h100" in unknown.stderr
    assert run("plan", "train", "--gpu", "h100-sxm").exit_code == 2


def test_beyond_the_context_is_a_warning(run: Run) -> None:
    result = run("plan", "train", "gpt2", "--gpu", "h100-sxm", "--seq", 4096, "--json")
    assert result.exit_code == 0
    assert "exceeds the context" in result.stderr


def test_a_machine_by_numbers_or_file(run: Run, tmp_path: Path) -> None:
    numbers = run("plan", "train", "gpt2", "--gpu", "memory=80GB,bandwidth=2TB/s,bf16=312T,link=300GB/s", "--json")
    assert numbers.exit_code == 0
    file = tmp_path / "mine.toml"
    file.write_text('memory = "1GB"\nbandwidth = "2TB/s"\nbf16 = "312T"\n')
    assert run("plan", "train", "gpt2", "--gpu", file, "--json").exit_code == 1


def test_a_picture(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = (*LLAMA, "--gpus", 16, "--tp", 2, "--zero", 3, "--checkpointing", "full", "--plot")
    assert run(*words, tmp_path / "a.svg").exit_code == run(*words, tmp_path / "b.svg").exit_code == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    ladder = json.loads(run(*words[:-1], "--json").stdout)["ladder"]
    assert all(f"{step['line']}, {step['bytes'] / 1e9:,.1f} GB" in drawn for step in ladder)
    refused = run(*words, tmp_path / "a.txt")
    assert (refused.exit_code, refused.stdout) == (2, "")


def options(run: Run, *words: object) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)["options"]


def test_options_reach_the_plan(run: Run) -> None:
    found = options(
        run,
        *LLAMA,
        "--chunked-loss",
        "--lora",
        8,
        "--targets",
        "q, v",
        "--tokens",
        "15T",
        "--network",
        "400Gb/s",
        "--host",
        "10GB/s",
        "--seq",
        "8K",
    )
    assert found["chunked_loss"] == 8  # where no number is said
    assert found["targets"] == ["q", "v"]
    assert (found["tokens"], found["network"], found["host"], found["seq"]) == (15e12, 50e9, 10e9, 8192)
    plain = options(run, *LLAMA)
    assert (plain["targets"], plain["tokens"], plain["chunked_loss"]) == (None, None, 1)


@pytest.mark.parametrize("number", ["7.5e9", "7.5B", "7.5b", "7.5G", "0.0075T"])
def test_parameters_as_they_are_said(run: Run, number: str) -> None:
    words = ("plan", "train", "--parameters", number, "--gpu", "a100-80gb", "--json")
    found = json.loads(run(*words).stdout)
    assert found["parameters"]["total"] == 7_500_000_000
    assert found["options"]["seq"] == 4096
    assert json.loads(run(*words, "--seq", 100).stdout)["options"]["seq"] == 100
    assert found["defaults"] == {}
    assert "search" not in found


def test_whose_word_is_wrong(run: Run) -> None:
    for name, value in (("tokens", "many"), ("network", "fast"), ("host", "slow")):
        assert run(*LLAMA, f"--{name}", value).stderr.startswith(f"Error: {name}: ")
    refused = run("plan", "train", "--parameters", "many", "--gpu", "t4")
    assert refused.stderr.startswith("Error: parameters: ")
    assert run("plan", "train", "--gpu", "t4").stderr.startswith("Error: MODEL: missing")
    assert run(*LLAMA, "--parameters", "7B").stderr.startswith("Error: MODEL: MODEL and --parameters are both given")


def test_a_whole_context_is_not_beyond_it(run: Run) -> None:
    for seq, said in ((1024, ""), (1025, "warning: --seq 1025 exceeds the context length of 1024 tokens\n")):
        assert run("plan", "train", "gpt2", "--gpu", "h100-sxm", "--seq", seq).stderr == said


def test_ways_of_printing(run: Run) -> None:
    """Tables, Markdown, or formulas line by line; a search is a table of its own, and has no formulas."""
    words = ("plan", "train", "gpt2", "--gpu", "h100-sxm", "--gpus", 2)
    plain, marked, explained = (run(*words, *way).stdout for way in ((), ("--markdown",), ("--explain",)))
    first = plain.splitlines()[1]
    assert f"### {first}" in marked.splitlines()
    assert "| --- |" in marked
    assert "    = parameters × bytes each" in explained.splitlines()
    assert "| --- |" not in plain + explained
    assert "    = parameters" not in plain + marked
    for text in (plain, marked, explained):
        assert r"\n" not in text
        assert "seconds per step" not in text
    searched = run(*words, "--search").stdout
    assert " layouts fit; " in searched.splitlines()[1]
    assert first not in searched
    assert run(*words, "--search", "--explain").stdout.splitlines()[:-1] == searched.splitlines()[:-1]
    assert "| options |" in run(*words, "--search", "--markdown").stdout
    document = json.loads(run(*words, "--search", "--json").stdout)
    assert document["search"]["layouts"]


def test_what_two_commands_named_alike_has_two_names(run: Run) -> None:
    """And each command still takes its own older spelling."""
    serving = ("--memory-utilisation", "0.8", "--reserve-size", "2GB", "--users", "3")
    older = ("--utilisation", "0.8", "--reserve", "2GB", "--batch", "3")
    asked = ("plan", "serve", "gpt2", "--gpu", "t4", "--json")
    documents = [json.loads(run(*asked, *words).stdout) for words in (serving, older)]
    typed = [document.pop("typed") for document in documents]
    assert documents[0] == documents[1]
    assert [(*typed[i],)[3:] for i in (0, 1)] == [serving[::2], older[::2]]
    training = ("--mfu", "0.4", "--reserve-share", "0.1", "--micro-batch", "2")
    older = ("--utilisation", "0.4", "--reserve", "0.1", "--batch", "2")
    asked = ("plan", "train", "gpt2", "--gpu", "h100-sxm", "--json")
    documents = [json.loads(run(*asked, *words).stdout) for words in (training, older)]
    assert documents[0].pop("typed") != documents[1].pop("typed")
    assert documents[0] == documents[1]
    assert "per_device_bytes" in documents[0]
    assert "--mfu, --utilisation" in run("plan", "train", "--help").stdout
