"""`--html FILE`: the page as one file, opened from the disk in a headless browser."""

from __future__ import annotations

import json
import os
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from asbuilt.cli import echo
from asbuilt.cli.main import cli
from asbuilt.web import questions, single

pytest.importorskip("websockets")

import axe
import browser
from browser import Page

MODEL, GPU = "smollm2-135m", "l4"
HOSTILE = "</script><script>window.hit = 1</script><!--<script>"
SHOWN = "[...document.querySelectorAll('section button[aria-label^=\"JSON of {}\"]')][0].click()"


def run(*words: str, code: int = 0) -> str:
    made = CliRunner().invoke(cli, list(words))
    assert made.exit_code == code, made.output
    return made.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if browser.found() is None:
        pytest.skip("no Chromium here")
    with browser.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(page: Page, path: Path) -> None:
    """Opens the file; it must ask for nothing and say nothing."""
    page.call("Page.navigate", url="about:blank")
    page.requests.clear()
    page.faults.clear()
    page.open(path.as_uri())
    assert {address for address in page.requests if not address.startswith(("about:", "data:"))} == {path.as_uri()}
    assert page.faults == []


def said(page: Page, panel: str, code: int = 0) -> dict[str, Any]:
    """Returns the JSON behind a panel, which must be what the command above it prints."""
    page.run(SHOWN.format(panel))
    document = json.loads(page.run("document.querySelector('#json').textContent"))
    command = page.run("document.querySelector('#command').textContent")
    page.run("document.querySelector('#dialog').close()")
    if command:
        words = shlex.split(command)
        assert words[0] == "asbuilt"
        assert json.loads(run(*words[1:], code=code)) == document
    return document


def derivation(page: Page, figure: str) -> str:
    row = f"document.querySelector('[data-figure={json.dumps(figure)}]')"
    page.run(f"{row}.querySelector('button').click()")
    return page.run(f"{row}.nextElementSibling.textContent")


@pytest.mark.parametrize(
    ("words", "panels"),
    [
        (("describe", MODEL, "--seq", "SEQ"), {"The model"}),
        (
            ("plan", "serve", MODEL, "--gpu", GPU, "--context", "SEQ", "--kv-dtype", "fp8"),
            {"Memory of one device", "The model", "Roofline"},
        ),
        (("plan", "train", MODEL, "--gpu", GPU, "--gpus", "8", "--zero", "3"), {"Training plan", "The model"}),
        (("plan", "train", "--parameters", "8B", "--gpu", "h100-sxm", "--gpus", "8", "--zero", "3"), {"Training plan"}),
    ],
)
def test_its_documents_are_those_of_the_commands(
    page: Page, tmp_path: Path, words: tuple[str, ...], panels: set[str]
) -> None:
    words = tuple(str(random.randint(64, 4000)) if word == "SEQ" else word for word in words)
    printed = json.loads(run(*words, "--json"))
    run(*words, "--html", str(tmp_path / "x.html"))
    opened(page, tmp_path / "x.html")
    documents = [said(page, panel) for panel in panels]
    assert printed in documents
    assert sorted(os.listdir(tmp_path)) == ["x.html"]
    if words[0] == "describe":
        assert f"{printed['parameters']['total']:,} exactly" in derivation(page, "parameters")


def test_figures_are_those_of_its_documents(page: Page, tmp_path: Path) -> None:
    users = str(random.randint(2, 9))
    words = ("plan", "serve", MODEL, "--gpu", GPU, "--users", users, "--html", str(tmp_path / "x.html"), "--json")
    plan = json.loads(run(*words))
    opened(page, tmp_path / "x.html")
    for i, line in enumerate(plan["ladder"]):
        text = page.run(f"document.querySelectorAll('[data-figure^=memory-]')[{i}].querySelector('td').textContent")
        number, unit = text.split(" ")
        factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
        assert float(number.replace(",", "")) * factor == pytest.approx(line["bytes"], rel=6e-3)
        numbers = derivation(page, f"memory-{single_slug(line['line'])}")
        assert all(f"{n:,}" in numbers for n in line["numbers"].values() if isinstance(n, int))
    assert page.run("document.querySelector('[data-figure=users] td').textContent") == f"{plan['users']:,}"
    assert page.run("document.querySelectorAll('#form, input').length") == 0


def single_slug(name: str) -> str:
    return "-".join("".join(c if c.isalpha() else " " for c in name.lower()).split())


def test_what_a_number_of_parameters_leaves_out_is_said(page: Page, tmp_path: Path) -> None:
    words = ("plan", "train", "--parameters", "8B", "--gpu", "h100-sxm", "--gpus", "8", "--zero", "3", "--json")
    plan = json.loads(run(*words, "--html", str(tmp_path / "x.html")))
    opened(page, tmp_path / "x.html")
    text = page.run("document.querySelector('#panels').innerText")
    assert "What is counted fits" in text
    assert "one step, at least" in text
    assert plan["not_counted"]
    assert all(what in text for what in plan["not_counted"])


def test_a_table_of_several_plans_and_each(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "many.html"
    words = ("plan", "serve", MODEL, "gpt2", "--gpu", GPU, "h100-sxm")
    plans = json.loads(run(*words, "--json"))
    run(*words, "--html", str(file))
    opened(page, file)
    assert page.run("document.querySelectorAll('h2.case').length") == 1 + len(plans["plans"])
    page.run("window.found = [...document.querySelectorAll('[aria-label=\"JSON of Memory of one device\"]')]")
    for i, plan in enumerate(plans["plans"]):
        page.run(f"window.found[{i}].click()")
        assert json.loads(page.run("document.querySelector('#json').textContent")) == plan
        page.run("document.querySelector('#dialog').close()")


def test_what_was_measured(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from asbuilt.measure.report import Report, Row

    predicted = random.randint(10**6, 10**9)
    rows = [Row(figure="parameters", unit="", predicted=predicted, measured=predicted, tolerance=0.0)]
    rows.append(Row(figure="peak", unit="bytes", predicted=predicted, measured=2 * predicted, tolerance=0.03))
    rows.append(Row(figure="nothing", unit="bytes", predicted=0, measured=1, tolerance=0.03))
    machine = {"machine": {"processor": "one", "threads": 2}}
    report = Report(model=MODEL, dtype="fp32", machine=machine, rows=tuple(rows))
    monkeypatch.setattr("asbuilt.api.measure.measure", lambda *_, **__: report)
    run("measure", MODEL, "--html", str(tmp_path / "x.html"), code=1)
    opened(page, tmp_path / "x.html")
    document = said(page, "Predicted and measured", code=1)
    assert document == json.loads(json.dumps(report.document()).replace("Infinity", "null"))
    cells = "[...document.querySelectorAll('[data-figure^=measured-]')].map((one) => one.textContent)"
    good, bad, infinite = page.run(cells)
    assert "✓ exact" in good
    assert "+100%✗ not within 3%" in bad
    assert "–✗" in infinite
    assert f"measured {2 * predicted:,}" in derivation(page, "measured-peak")


def test_names_are_text(page: Page, tmp_path: Path) -> None:
    config = questions.answer("config", {"model": MODEL})["config"]
    folder = tmp_path / "<img src=x onerror=window.hit=1>&amp;<!--<script>"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": HOSTILE}}))
    run("plan", "train", str(folder), "--gpu", GPU, "--html", str(tmp_path / "x.html"))
    opened(page, tmp_path / "x.html")
    assert page.run("window.hit === undefined && document.querySelectorAll('img, iframe').length === 0")
    assert said(page, "Training plan")["published"] == HOSTILE
    assert "<img src=x onerror=window.hit=1>&amp;<!--<script>" in page.run("document.title")
    assert page.run("document.querySelectorAll('script:not([type])').length") == 0


def test_nothing_but_its_own_script_runs(page: Page, tmp_path: Path) -> None:
    text = single.document("asbuilt", [single.Case(title="one")])
    assert "http-equiv" in text
    broken = text.replace("<body>", "<body><script>window.hit = 1</script><img src='http://127.0.0.1:9/x'>")
    (tmp_path / "x.html").write_text(broken)
    page.open((tmp_path / "x.html").as_uri())
    assert page.run("window.hit === undefined")
    page.faults.clear()


@pytest.mark.parametrize("dark", [False, True])
def test_it_suits_a_telephone_and_everyone(page: Page, tmp_path: Path, dark: bool) -> None:
    words = ("plan", "serve", "gpt-oss-20b", "--gpu", GPU, "--input-tokens", "1k", "--output-tokens", "100")
    run(*words, "--rate", "1/s", "--price", "2", "--search", "--html", str(tmp_path / "x.html"))
    page.size(360, 740, dark=dark)
    opened(page, tmp_path / "x.html")
    assert page.run("document.querySelectorAll('[data-layout]').length") > 0
    assert page.run("[...document.querySelectorAll('.use')].filter((one) => one.getClientRects().length).length") == 0
    page.run("document.querySelectorAll('button.open').forEach((one) => one.click())")
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert axe.serious(page) == []
    page.size(1280)


@pytest.mark.parametrize("place", ["absent/x.html", ".", "", "pipe"])
def test_what_cannot_be_written_is_refused_first(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for words in (("describe", "nothing"), ("plan", "serve", "nothing", "--gpu", GPU), ("measure", "nothing")):
        made = CliRunner().invoke(cli, [*words, "--html", place])
        assert made.exit_code == 2
        assert "html: " in made.output
        assert "nothing" not in made.output
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.html").write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    run("describe", MODEL, "--html", str(tmp_path / "x.html"), code=2)
    assert os.listdir(tmp_path) == ["x.html"]
    assert (tmp_path / "x.html").read_text() == "before"


def test_a_command_is_typed_again() -> None:
    from asbuilt.cli.plan_train import train

    seq, price = random.randint(1, 4096), f"{random.random():.4f}"
    words = [MODEL, "--gpu", "h100-sxm,bf16=990T", "--seq", str(seq), "--price", price, "--no-master", "--search"]
    words += ["--targets", "q, v", "--chunked-loss", "--allow-unread", "a'b", "--allow-unread", "--c"]
    parent = click.Context(cli, info_name="asbuilt")
    first = train.make_context("train", list(words), parent=parent)
    again = shlex.split(echo.command(first))
    assert again[:2] == ["asbuilt", "train"]
    assert train.make_context("train", again[2:], parent=parent).params == first.params
    assert "--search" not in echo.command(first, without=["--search"])
