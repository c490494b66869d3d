"""`asbuilt diff`: where two checkpoints, or ours and what transformers makes of one, part on the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from asbuilt.cli.output import print_json, table
from asbuilt.errors import InputError

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
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.pass_context
def diff(
    ctx: click.Context, first: str, second: str | None, transformers: bool, text: str, tolerance: float, as_json: bool
) -> None:
    """Runs the checkpoints FIRST and SECOND on one text, and names the first path whose activations differ.

    Both are run in float32, with the same token ids. Exit code 1 where they differ by more than the tolerance.
    """
    from asbuilt.checkpoint.source import open_model

    if second is None and not transformers:
        raise InputError("missing", field="SECOND", fix="give another checkpoint, or --transformers")
    sources = open_model(first, weights=True), open_model(second or first, weights=True)
    found, at = (_against_transformers if transformers else _between)(sources, text, tolerance)
    if as_json:
        rows = [{"path": d.path or "logits", "relative": d.relative} for d in found]
        print_json({"same": at is None, "first": at and (at.path or "logits"), "rows": rows})
    else:
        start = 0 if at is None else found.index(at)
        rows = [(d.path or "logits", "other shape" if d.relative is None else f"{d.relative:.2e}") for d in found]
        verdict = f"the same within {tolerance:g}" if at is None else f"they part at {at.path or 'the logits'}"
        table(verdict, ("path", "relative difference"), rows[max(0, start - 2) :][:SHOWN] if at else rows[-1:])
    ctx.exit(0 if at is None else 1)


Found = tuple["list[Difference]", "Difference | None"]


def _between(sources: tuple[Source, Source], text: str, tolerance: float) -> Found:
    """Returns the differences of two checkpoints, and the first that is beyond the tolerance."""
    import torch

    from asbuilt.checkpoint.load import load
    from asbuilt.inspect import diff as compare

    ids = torch.tensor([_tokens(sources, text)])
    found = compare(load(sources[0], torch.float32), load(sources[1], torch.float32), ids)
    return found, next((d for d in found if d.beyond(tolerance)), None)


def _against_transformers(sources: tuple[Source, Source], text: str, tolerance: float) -> Found:
    """Returns the differences of ours from transformers' of the second, and where they part for good."""
    import torch

    from asbuilt.checkpoint.load import load
    from asbuilt.inspect import diff_transformers, parted

    ours, theirs = sources
    if theirs.kind != "folder" or theirs.path is None:
        raise InputError("transformers runs checkpoint folders", field="MODEL", value=theirs.name)
    ids = torch.tensor([_tokens(sources, text)])
    found = diff_transformers(load(ours, torch.float32), theirs.path, ours.family, ids)
    return found, parted(found, tolerance)


def _tokens(sources: tuple[Source, Source], text: str) -> list[int]:
    """Returns the text's ids by the first tokenizer there is, else ids that both vocabularies have."""
    n_vocab = min(source.spec.n_vocab for source in sources)
    if n_vocab == 0:
        raise InputError("reads images, and what is compared is a text", field="MODEL", value=sources[0].name)
    context = min(source.spec.max_positions for source in sources)
    tokenizer = next((t for source in sources if (t := source.tokenizer()) is not None), None)
    ids = [i * 7919 % n_vocab for i in range(32)] if tokenizer is None else tokenizer.encode(text)
    if not ids or max(ids) >= n_vocab:
        raise InputError("gives no tokens that both models know", field="text", value=text)
    return ids[:context]
