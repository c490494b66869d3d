"""Pictures of plans: every figure drawn is the plan's, no two things look alike, and a file is whole or not there."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asbuilt import catalog, plots
from asbuilt.catalog import machines
from asbuilt.errors import InputError
from asbuilt.plan import serve
from asbuilt.plan.train.options import Options
from asbuilt.plan.train.plan import Subject, TrainPlan
from asbuilt.plan.train.plan import plan as train

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

HOSTILE = "a\x1b]0;owned\x07 $\\frac{$ <b>&amp; \u202e\n"
GB = 1e9


@pytest.fixture(scope="module")
def training() -> TrainPlan:
    """Tensor and expert parallel with FSDP and full checkpointing: more lines than there are colours."""
    spec = catalog.find("mixtral-8x7b").spec()
    options = Options(gpus=64, tp=2, ep=4, zero=3, seq=4096, batch=1, accumulate=8, checkpointing="full")
    return train(Subject(spec), machines.find("h100-sxm"), options)


@pytest.fixture(scope="module")
def serving() -> Any:  # noqa: ANN401
    return serve(catalog.find("llama-3-8b").spec(), machines.find("h100-sxm"), name="llama-3-8b", context=8192)


def axes(number: int) -> Any:  # noqa: ANN401
    return Figure().subplots(1, number, squeeze=False)[0]


def test_no_two_looks_are_alike() -> None:
    colours = [colour for colour, _ in plots.looks(24)]
    assert len({*colours}) == 24
    assert colours[:2] == ["#0072B2", "#E69F00"]  # as Okabe and Ito have them
    assert colours[8] == "#80B8D8"  # 0.5 x (0, 114, 178) + 0.5 x 255 = 127.5, 184.5, 216.5, halves to the even number
    assert colours[16] == "#00446B"  # 0.6 x (0, 114, 178) = 0, 68.4, 106.8


def test_the_bar_of_memory_is_the_ladder(training: TrainPlan) -> None:
    (one,) = axes(1)
    limit = training.trial.memory - training.trial.reserve
    plots._bar(one, training.ladder[:-1], limit, "limit", "title")
    heights = [line.value / GB for line in training.ladder[:-1]]
    assert [bar.get_height() for bar in one.patches] == pytest.approx(heights, rel=1e-12)
    assert sum(bar.get_height() for bar in one.patches) == pytest.approx(training.per_device_bytes / GB)
    bottoms = [bar.get_y() for bar in one.patches]
    assert bottoms == pytest.approx([sum(line.value for line in training.ladder[:i]) / GB for i in range(len(bottoms))])
    assert len({bar.get_facecolor() for bar in one.patches}) == len(one.patches) > 8
    (roof,) = one.lines
    assert roof.get_ydata()[0] == limit / GB
    labels = one.get_legend_handles_labels()[1]
    assert f"weights, {training.ladder[0].value / GB:,.1f} GB" in labels
    assert f"limit, {limit / GB:,.1f} GB" in labels


def test_the_bars_of_a_step(training: TrainPlan) -> None:
    (one,) = axes(1)
    plots._seconds(one, training)
    step = training.trial.step
    drawn = dict(
        zip([text.get_text() for text in one.get_yticklabels()], [bar.get_width() for bar in one.patches], strict=True)
    )
    assert drawn["one step"] == step.seconds
    assert {name: drawn[name] for name in step.communication if step.communication[name].bytes} == {
        name: traffic.seconds for name, traffic in step.communication.items() if traffic.bytes
    }
    assert len({bar.get_facecolor() for bar in one.patches}) == len(one.patches) >= 4
    assert one.get_title(loc="left") == f"one step of {64 // 2 * 8 * 4096:,} tokens"  # 32 replicas, 8 micro-batches


def test_time_by_batch_and_users_by_context(serving: Any) -> None:  # noqa: ANN401
    row = axes(3)
    plots._serving(row, serving)
    step, memory, compute, users = row[1].lines
    assert [*step.get_xdata()] == [point.batch for point in serving.sweep]
    assert [*step.get_ydata()] == [point.seconds_per_step * 1e3 for point in serving.sweep]
    assert [*memory.get_ydata()] == [point.run.memory_seconds * 1e3 for point in serving.sweep]
    assert [*compute.get_ydata()] == [point.run.compute_seconds * 1e3 for point in serving.sweep]
    assert users.get_xdata()[0] == serving.users
    held, here = row[2].lines
    assert ([*here.get_xdata()], [*here.get_ydata()]) == ([8192], [serving.users])
    by_context = dict(zip(held.get_xdata(), held.get_ydata(), strict=True))
    assert by_context[8192] == serving.users
    assert min(by_context) == 1
    assert max(by_context) == 8192
    first = row[0].patches[0]
    assert first.get_height() == serving.ladder[1].value / GB
    assert row[0].lines[0].get_ydata()[0] == serving.ladder[0].value / GB


def test_what_cannot_be_drawn_is_said() -> None:
    row = axes(3)
    none = serve(catalog.find("llama-3-70b").spec(), machines.find("t4"), name="x")
    plots._serving(row, none)
    assert [text.get_text() for text in row[2].texts] == ["no user fits at any context length"]
    encoder = serve(catalog.find("bert-base-uncased").spec(), machines.find("t4"), name="x")
    row = axes(3)
    plots._serving(row, encoder)
    assert [text.get_text() for text in row[1].texts] == ["nothing is decoded"]


@pytest.mark.parametrize("suffix", [".svg", ".PNG", ".pdf"])
def test_the_file_is_of_its_kind_and_alone(training: TrainPlan, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    plots.save_training(training, path)
    begins = {".svg": b"<?xml", ".PNG": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(begins)
    assert [*tmp_path.iterdir()] == [path]


def test_a_strangers_name_is_drawn_as_it_may_be_shown(training: TrainPlan, tmp_path: Path) -> None:
    """Neither mathematics, which would be a parse error, nor characters that XML forbids."""
    plots.save_training(replace(training, model=HOSTILE * 50), tmp_path / "x.svg")
    text = "".join(ElementTree.parse(tmp_path / "x.svg").getroot().itertext())
    assert r"a\x1b]0;owned\x07 $\frac{$ <b>&amp; \u202e\n" in re.sub(r"\s+", " ", text)
    assert len(text) < 10_000
    assert "memory without the reserve, 80.8 GB" in text  # 79.19 GiB less a twentieth


def test_a_matplotlibrc_says_nothing(training: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import rcParams

    plots.save_training(training, tmp_path / "a.svg")
    monkeypatch.setitem(rcParams, "figure.dpi", 31.0)
    monkeypatch.setitem(rcParams, "font.size", 31.0)
    plots.save_training(training, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert rcParams["font.size"] == 31.0


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="nothing here refuses to be written")
def test_what_cannot_be_written_is_one_message(
    training: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.svg").mkdir()
    with pytest.raises(InputError, match="plot: is a folder"):
        plots.save_training(training, tmp_path / "x.svg")
    old = tmp_path / "y.svg"
    old.write_text("old")

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left"):
        plots.save_training(training, old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.svg", "y.svg"]
    assert old.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "said"), [("x.gif", ".svg, .png or .pdf"), ("x", ".svg"), ("nowhere/x.svg", "no such folder")]
)
def test_files_that_are_no_pictures(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        plots.check(tmp_path / name)
