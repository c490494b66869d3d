"""Plots of plans (the memory ladder, the roofline by batch, users by context, the memory of training), and of runs.

The only module that needs matplotlib, which the `plots` extra installs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asbuilt.errors import InputError, one_of
from asbuilt.files import require_writable, write_whole
from asbuilt.shown import cut, line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from asbuilt.plan.lines import Line, Number
    from asbuilt.plan.serve.plan import ServePlan
    from asbuilt.plan.train.plan import TrainPlan

SUFFIXES = (".svg", ".png", ".pdf")
POINTS = 48
TITLE = 200  # characters of a title: names are untrusted
# Distinguishable with colour blindness (Okabe and Ito 2008); beyond eight, hatched.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def looks(number: int) -> list[tuple[str, str]]:
    """Returns `number` distinct pairs of colour and hatch: the plain colours, then lighter and darker hatched ones."""
    shades = [(1.0, 0), (0.5, 255), (0.6, 0)]  # share of the colour, and the grey that it is mixed with
    found = [
        (_mixed(colour, *shade), hatch)
        for shade, hatch in zip(shades, ("", "//", "xx"), strict=True)
        for colour in COLOURS
    ]
    assert number <= len(found)
    return found[:number]


def _mixed(colour: str, share: float, other: int) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(share * part + (1 - share) * other):02X}" for part in parts)


def check(path: Path) -> None:
    """Raises InputError for a file that could not be written: an unknown suffix, or a missing folder."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError("unknown image format", field="plot", value=str(path), allowed=one_of(SUFFIXES))
    require_writable(path, "plot")


def save(plans: list[ServePlan], path: Path) -> None:
    """Writes three plots for each plan, one plan per row, to `path`.

    Raises InputError as `check` does, and ModuleNotFoundError without matplotlib.
    """
    _save(path, len(plans), 3, lambda row, i: _serving(row, plans[i]))


def save_training(plan: TrainPlan, path: Path) -> None:
    """Writes the memory of the fullest device and the time of a step to `path`; raises as `save` does."""

    def draw(row: Sequence[Axes], _: int) -> None:
        memory, reserve = plan.trial.memory, plan.trial.reserve
        title = f"{plan.model} on {plan.trial.layout.gpus} x {plan.machine.name}, {plan.trial.layout.said}"
        _bar(row[0], plan.ladder[:-1], memory - reserve, "memory without the reserve", title)
        _seconds(row[1], plan)

    _save(path, 1, 2, draw)


def save_run(log: Path, path: Path) -> None:
    """Writes the losses and the learning rate of a run's log by step to `path`; raises as `save` does."""
    said = [json.loads(text) for text in log.read_text(encoding="utf-8").splitlines()]

    def draw(row: Sequence[Axes], _: int) -> None:
        steps = [one for one in said if "loss" in one]
        validated = [one for one in said if "validation" in one]
        row[0].plot([one["step"] for one in steps], [one["loss"] for one in steps], color=COLOURS[0], label="training")
        at, losses = [one["step"] for one in validated], [one["validation"] for one in validated]
        row[0].plot(at, losses, "o-", color=COLOURS[5], label="validation")
        row[0].set_ylabel("loss, nats per token")
        row[0].legend(fontsize="small", frameon=False)
        row[1].plot([one["step"] for one in steps], [one["lr"] for one in steps], color=COLOURS[2])
        row[1].set_ylabel("learning rate")
        for axes in row:
            axes.set_xlabel("steps")

    _save(path, 1, 2, draw)


def _save(path: Path, rows: int, columns: int, draw: Callable[[Sequence[Axes], int], None]) -> None:
    """Writes a grid of plots, each row drawn by `draw`."""
    check(path)
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure

    # The same plan gives the same bytes, so a plot in a repository changes only when its figures do. For that reason,
    # and because it could run LaTeX, a matplotlibrc in the current directory is ignored.
    with rc_context():
        rcdefaults()
        rcParams.update({"svg.hashsalt": "asbuilt", "svg.fonttype": "none"})
        figure = Figure(figsize=(5 * columns, 4.6 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for i, row in enumerate(grid):
            draw(row, i)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.lower().removeprefix("."), metadata=metadata)
    write_whole(path, picture.getvalue(), "plot")


def _serving(row: Sequence[Axes], plan: ServePlan) -> None:
    _bar(row[0], plan.ladder[1:], plan.ladder[0].value, "device memory", plan.title)
    _by_batch(row[1], plan)
    _by_context(row[2], plan)


def _bar(axes: Axes, lines: Sequence[Line], memory: Number, named: str, title: str) -> None:
    """Draws the memory of one device as one stacked bar."""
    bottom = 0.0
    for (colour, hatch), part in zip(looks(len(lines)), lines, strict=True):
        height = max(0.0, part.value / 1e9)
        label = f"{line(part.name)}, {height:,.1f} GB"
        axes.bar(0, height, bottom=bottom, color=colour, hatch=hatch, label=label, width=0.5)
        bottom += height
    axes.axhline(memory / 1e9, color="black", linewidth=1, linestyle="--", label=f"{named}, {memory / 1e9:,.1f} GB")
    axes.set_xlim(-0.5, 2.2)
    axes.set_xticks([])
    axes.set_ylabel("GB (10^9 bytes), one device")
    axes.legend(loc="center right", fontsize="small", frameon=False)
    shown = cut(line(title), TITLE).replace("$", r"\$")  # a bare $ starts math mode
    axes.set_title(shown, fontsize="small", loc="left", wrap=True)


def _seconds(axes: Axes, plan: TrainPlan) -> None:
    """Draws the seconds of a step by cause, overlapped communication included."""
    step = plan.trial.step
    parts = {name: seconds for name, seconds in step.breakdown.items() if seconds}
    parts |= {name: traffic.seconds for name, traffic in step.communication.items() if traffic.bytes}
    parts["one step"] = step.seconds
    for (colour, hatch), (name, seconds) in zip(looks(len(parts)), parts.items(), strict=True):
        axes.barh(name, seconds, color=colour, hatch=hatch)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"one step of {step.tokens:,} tokens", fontsize="small", loc="left")


def _by_batch(axes: Axes, plan: ServePlan) -> None:
    """Draws a step's time by batch, below its two roofs."""
    batches = [step.batch for step in plan.sweep]
    if not batches:
        return _nothing(axes, "nothing is decoded")
    axes.loglog(batches, [s.seconds_per_step * 1e3 for s in plan.sweep], color="black", label="step")
    axes.loglog(
        batches,
        [s.run.memory_seconds * 1e3 for s in plan.sweep],
        color=COLOURS[0],
        linestyle="--",
        label="bytes / bandwidth",
    )
    axes.loglog(
        batches,
        [s.run.compute_seconds * 1e3 for s in plan.sweep],
        color=COLOURS[5],
        linestyle=":",
        label="FLOPs / rate",
    )
    if plan.users:
        axes.axvline(
            plan.users,
            color=COLOURS[7],
            linewidth=1,
            label=f"{plan.users:,} users{' in time' if plan.targets else ' fit'}",
        )
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("milliseconds per step, lower bound")
    axes.legend(fontsize="small", frameon=False)
    return None


def _by_context(axes: Axes, plan: ServePlan) -> None:
    """Draws how many users fit by their context length."""
    most = max(plan.capacity.spec.max_positions, plan.context, 2)
    contexts = sorted({max(1, round(most ** (i / POINTS))) for i in range(POINTS + 1)} | {plan.context})
    users = [plan.capacity.users(context) for context in contexts] if plan.users is not None else []
    if not any(users):
        return _nothing(axes, "no user fits at any context length")
    axes.loglog(contexts, [count or float("nan") for count in users], color=COLOURS[0])
    if held := plan.users_that_fit:
        axes.plot([plan.context], [held], "o", color="black", label=f"{held:,} at {plan.context:,} tokens")
        axes.legend(fontsize="small", frameon=False)
    axes.set_xlabel("tokens per user")
    axes.set_ylabel("users")
    return None


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()
