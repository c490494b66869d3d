"""`asbuilt diff`: where two checkpoints, or ours and what transformers makes of one, part on the same text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from asbuilt.cli.opening import allow_unread_option, opened_all
from asbuilt.cli.output import print_json, table, warn
from asbuilt.errors import InputError
from asbuilt.shown import number

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source
    from asbuilt.inspect import Difference

TEXT = "An as-built drawing records what was really built."
SHOWN = 12


@click.command()
@click.argument("first")
@click.argument("second", required=False)
@click.option("--transformers", is_flag=True, help="Let transformers run SECOND, or FIRST itself; a checkpoint folder.")
@click.option("--text", default=TEXT, show_default=True, help="What both read.")
@click.option(
    "--tolerance", default=1e-4, show_default=True, type=click.FloatRange(0), help="Relative difference allowed."
)
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.pass_context
def diff(
    ctx: click.Context,
    first: str,
    second: str | None,
    transformers: bool,
    text: str,
    tolerance: float,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Runs the checkpoints FIRST and SECOND on one text, and names the first path whose activations differ.

    Both are run in float32, with the same token ids. Exit code 1 where they differ by more than the tolerance.
    """
    if second is None and not transformers:
        raise InputError("missing", field="SECOND", fix="give another checkpoint, or --transformers")
    if math.isnan(tolerance):
        raise InputError("not a number", field="tolerance", value=tolerance, allowed="a number from 0")
    sources = opened_all((first, second or first), allow_unread, weights=True)
    given = ctx.get_parameter_source("text") is not ParameterSource.DEFAULT
    ids, read = _tokens(sources, text, given=given)
    found, at = (_against_transformers if transformers else _between)(sources, ids, tolerance)
    unread = ["vision"] if any(source.spec.vision is not None for source in sources) else []
    if as_json:
        rows = [{"path": d.path or "logits", "relative": d.relative} for d in found]
        print_json(
            {"same": at is None, "first": at and (at.path or "logits"), "rows": rows, "read": read, "unread": unread}
        )
    else:
        start = 0 if at is None else found.index(at)
        rows = [
            (d.path or "logits", "other shape" if d.relative is None else number(float(d.relative), 3)) for d in found
        ]
        verdict = f"the same within {number(tolerance, 6)}" if at is None else f"they part at {at.path or 'the logits'}"
        table(
            f"{verdict}; {len(found):,} paths compared",
            ("path", "relative difference"),
            rows[max(0, start - 2) :][:SHOWN] if at else rows[-1:],
        )
        warn(f"read: {read}" + ("; no image, so nothing below vision was compared" if unread else ""))
    ctx.exit(0 if at is None else 1)


def _require_room(sources: list[Source]) -> None:
    """Raises InputError where the two models, which are there at once, do not fit into memory."""
    from asbuilt.checkpoint.load import Contents
    from asbuilt.checkpoint.room import require_room

    needed = sum(Contents(source).needs("float32") for source in sources)
    names = " and ".join(dict.fromkeys(source.name for source in sources))
    require_room(needed, names, what="to run both in float32", fix="`asbuilt describe` needs none")


Found = tuple["list[Difference]", "Difference | None"]


def _between(sources: list[Source], tokens: list[int], tolerance: float) -> Found:
    """Returns the differences of two checkpoints, and the first that is beyond the tolerance."""
    import torch

    from asbuilt.checkpoint.load import load
    from asbuilt.inspect import diff as compare

    _require_room(sources)
    found = compare(load(sources[0], torch.float32), load(sources[1], torch.float32), torch.tensor([tokens]))
    return found, next((d for d in found if d.beyond(tolerance)), None)


def _against_transformers(sources: list[Source], tokens: list[int], tolerance: float) -> Found:
    """Returns the differences of ours from transformers' of the second, and where they part for good."""
    import torch

    from asbuilt.checkpoint.load import load
    from asbuilt.inspect import diff_transformers, first_divergence
    from asbuilt.spec import Contrast

    ours, theirs = sources
    if theirs.kind != "folder" or theirs.path is None:
        raise InputError("transformers runs checkpoint folders", field="MODEL", value=theirs.name)
    if isinstance(theirs.spec.vision, Contrast):
        raise InputError("reads images beside texts, and what is compared is a text", field="MODEL", value=theirs.name)
    _require_room(sources)
    if theirs is not ours:
        load(theirs, torch.float32)  # says by name what is wrong with its tensors
    found = diff_transformers(load(ours, torch.float32), theirs.path, ours.family, torch.tensor([tokens]))
    return found, first_divergence(found, tolerance)


def _tokens(sources: list[Source], text: str, *, given: bool) -> tuple[list[int], str]:
    """Returns the text's ids by the first tokenizer there is, else ids that both know; and what was read."""
    for source in sources:
        if source.spec.n_vocab == 0:
            raise InputError("reads images, and what is compared is a text", field="MODEL", value=source.name)
    n_vocab = min(source.spec.n_vocab for source in sources)
    context = min(source.spec.max_positions for source in sources)
    tokenizer = next((t for source in sources if (t := source.tokenizer()) is not None), None)
    if tokenizer is None:
        if given:
            raise InputError("neither model has a tokenizer", field="text", value=text, fix="leave it out: fixed ids")
        ids = [i * 7919 % n_vocab for i in range(32)][:context]
        return ids, f"{len(ids)} fixed token ids, for there is no tokenizer"
    ids = tokenizer.encode(text)
    if not ids or max(ids) >= n_vocab:
        raise InputError("gives no tokens that both models know", field="text", value=text)
    return ids[:context], f"the text's first {len(ids[:context])} tokens of {len(ids)}"
