"""`asbuilt embed`: how alike sentences are, by the vectors that an encoder makes of them."""

from __future__ import annotations

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, table

SHOWN = 40  # characters of a sentence in the table


@click.command()
@click.argument("model")
@click.argument("sentences", nargs=-1, required=True)
@click.option("--vectors", is_flag=True, help="With --json: the vectors too.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def embed(model: str, sentences: tuple[str, ...], vectors: bool, allow_unread: tuple[str, ...], as_json: bool) -> None:
    """Reads SENTENCES with the encoder MODEL, and prints how alike they are: products of their pooled vectors.

    Pooling is what the folder's modules.json says, otherwise the normalised mean over tokens, whose products are
    cosines from -1 to 1.
    """
    if vectors and not as_json:
        raise click.UsageError("--vectors needs --json")
    from asbuilt.generate.embed import embed as make
    from asbuilt.generate.embed import read_pooling

    source = opened(model, allow_unread, weights=True)
    made = make(source, sentences)
    likeness = made @ made.T
    if as_json:
        pooling = read_pooling(source.path)
        document = {
            "model": source.name,
            "dimensions": made.shape[1],
            "pooling": pooling.how,
            "normalised": pooling.normalise,
            "sentences": list(sentences),
            "similarities": likeness.tolist(),
        }
        print_json(document | ({"vectors": made.tolist()} if vectors else {}))
        return
    rows = [(i + 1, *(f"{x:.3f}" for x in row), text[:SHOWN]) for i, (row, text) in
            enumerate(zip(likeness.tolist(), sentences, strict=True))]  # fmt: skip
    table("How alike", ("", *(str(i + 1) for i in range(len(sentences))), "sentence"), rows)
