"""`--html FILE`: what a command prints, as one file for a browser, drawn as `asbuilt web` draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from asbuilt.cli.echo import command
from asbuilt.errors import InputError

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source
    from asbuilt.plan import ServePlan, TrainPlan
    from asbuilt.web.single import Case, Document

C = TypeVar("C", bound=Callable[..., Any])
# What a command prints and where, which is not asked of its document.
WAYS = ("--html", "--plot", "--explain", "--markdown", "--json")


def html_option(function: C) -> C:
    """Adds `--html FILE` as `html`."""
    said = "Write charts and tables as one file for a browser, which works offline."
    return click.option("--html", metavar="FILE", help=said)(function)


def check(html: str | None) -> None:
    """Raises InputError for a file that could not be written, before anything is computed."""
    if html is not None:
        from asbuilt.files import require_writable

        if not html:
            raise InputError(field="html", value=html, allowed="a file to write")
        require_writable(Path(html), "html")


def save(html: str, ctx: click.Context, cases: Sequence[Case]) -> None:
    """Writes the file."""
    from asbuilt.web import single

    single.save(Path(html), command(ctx, without=("--html",)), cases)


def printed(ctx: click.Context, data: dict[str, Any]) -> Document:
    """Returns the document that this command prints with --json."""
    from asbuilt.web.single import Document

    if "typed" in data:  # what that command is asked
        said = {name: text for name, text in data["typed"].items() if name not in WAYS}
        data = data | {"typed": said | {"--json": True}}
    return Document(data=data, command=command(ctx, without=WAYS, more=["--json"]))


def case(title: str, documents: Mapping[str, Document]) -> Case:
    """Returns documents that are drawn together."""
    from asbuilt.web.single import Case

    return Case(title=title, documents=documents)


def described(model: str, source: Source, allow_unread: Sequence[str], kv_dtype: str | None = None) -> Document:
    """Returns the document of `asbuilt describe`, of a model that another command opened."""
    import shlex

    from asbuilt.description import describe
    from asbuilt.web.single import Document

    said = ["asbuilt", "describe", model, *(["--kv-dtype", kv_dtype] if kv_dtype else [])]
    said += [word for key in allow_unread for word in ("--allow-unread", key)]
    data = describe(source, kv_dtype=kv_dtype).document()
    return Document(data=data, command=shlex.join([*said, "--json"]))


def ranks(plan: TrainPlan) -> Document:
    """Returns the memory of the ranks of a training plan."""
    from asbuilt.web import curves
    from asbuilt.web.single import Document

    return Document(data=curves.ranks(plan))


def served(
    ctx: click.Context,
    named: Sequence[tuple[str, Source]],
    plans: Sequence[ServePlan],
    documents: Sequence[dict[str, Any]],
    allow_unread: Sequence[str],
) -> list[Case]:
    """Returns a case for each plan, of the model that it is `named` by, and one of several plans beside each other."""
    from asbuilt.plan.serve import report, report_workload
    from asbuilt.web import curves
    from asbuilt.web.single import Case
    from asbuilt.web.single import Document as Made

    found = []
    for (model, source), plan, data in zip(named, plans, documents, strict=True):
        made = {
            "serve": printed(ctx, data),
            "curves": Made(data=curves.document(plan)),
            "describe": described(model, source, allow_unread, plan.capacity.kv_dtype),
        }
        found.append(case(plan.title, made))
    if len(plans) == 1:
        return found
    compared = [report.compare(plans), *([report_workload.compare(plans)] if plans[0].served else [])]
    return [Case(title=f"{len(plans)} plans", tables=compared), *found]
