"""`asbuilt embed`: how alike sentences are, by the vectors that an encoder makes of them."""

from __future__ import annotations

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, table

SHOWN = 40  # characters of a sentence in the table


@click.command()
@click.argument("model")
@click.argument("sentences", nargs=-1, required=True)
@click.option("--prompt-name", help="Read the sentences behind the folder's prompt of this name: query, passage ...")
@click.option("--prompt", help="Read the sentences behind this text; '' for none.")
@click.option("--vectors", is_flag=True, help="With --json: the vectors too.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def embed(
    model: str,
    sentences: tuple[str, ...],
    prompt_name: str | None,
    prompt: str | None,
    vectors: bool,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Reads SENTENCES with the encoder MODEL, and prints how alike they are: products of their pooled vectors.

    Pooling is what the folder's modules.json says, otherwise the normalised mean over tokens, whose products are
    cosines from -1 to 1. So is the prompt that goes in front of each sentence, unless another is asked for.
    """
    if prompt is not None and prompt_name is not None:
        raise click.UsageError("--prompt or --prompt-name, not both")
    if vectors and not as_json:
        raise click.UsageError("--vectors needs --json")
    from asbuilt.generate.embed import embed as make
    from asbuilt.generate.pooling import read_pooling

    source = opened(model, allow_unread, weights=True)
    pooling = read_pooling(source.path, source.spec.d_model)
    made = make(source, sentences, pooling=pooling, prompt=prompt, prompt_name=prompt_name)
    likeness = made @ made.T
    if as_json:
        document = {
            "model": source.name,
            "dimensions": made.shape[1],
            "pooling": pooling.how,
            "normalised": pooling.normalise,
            "prompt": pooling.prompt(prompt_name) if prompt is None else prompt,
            "sentences": list(sentences),
            "similarities": likeness.tolist(),
        }
        print_json(document | ({"vectors": made.tolist()} if vectors else {}))
        return
    rows = [
        (i + 1, *(f"{x:.3f}" for x in row), text[:SHOWN])
        for i, (row, text) in enumerate(zip(likeness.tolist(), sentences, strict=True))
    ]
    table("How alike", ("", *(str(i + 1) for i in range(len(sentences))), "sentence"), rows)
