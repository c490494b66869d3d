"""`asbuilt diff`: where two checkpoints part when they read the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from asbuilt.cli.output import print_json, table
from asbuilt.errors import InputError

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source

TEXT = "An as-built drawing records what was really built."
SHOWN = 12


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--text", default=TEXT, show_default=True, help="What both read.")
@click.option(
    "--tolerance", default=1e-4, show_default=True, type=click.FloatRange(0), help="Relative difference allowed."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, text: str, tolerance: float, as_json: bool) -> None:
    """Runs the checkpoints FIRST and SECOND on one text, and names the first path whose activations differ.

    Both are run in float32, with the same token ids. Exit code 1 where they differ by more than the tolerance.
    """
    import torch

    from asbuilt.checkpoint.load import load
    from asbuilt.checkpoint.source import open_model
    from asbuilt.inspect import diff as compare

    sources = open_model(first, weights=True), open_model(second, weights=True)
    ids = torch.tensor([_tokens(sources, text)])
    found = compare(load(sources[0], torch.float32), load(sources[1], torch.float32), ids)
    parted = next((d for d in found if d.beyond(tolerance)), None)
    if as_json:
        rows = [{"path": d.path or "logits", "relative": d.relative} for d in found]
        print_json({"same": parted is None, "first": parted and (parted.path or "logits"), "rows": rows})
    else:
        start = 0 if parted is None else found.index(parted)
        rows = [(d.path or "logits", "other shape" if d.relative is None else f"{d.relative:.2e}") for d in found]
        verdict = f"the same within {tolerance:g}" if parted is None else f"they part at {parted.path or 'the logits'}"
        table(verdict, ("path", "relative difference"), rows[max(0, start - 2) :][:SHOWN] if parted else rows[-1:])
    ctx.exit(0 if parted is None else 1)


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
