"""`asbuilt embed`: the similarity of sentences, from an encoder's embeddings."""

from __future__ import annotations

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, table

SHOWN = 40  # characters of each sentence that the table shows


@click.command()
@click.argument("model")
@click.argument("sentences", nargs=-1, required=True)
@click.option("--prompt-name", help="Prepend the folder's prompt of this name to each sentence: query, passage ...")
@click.option("--prompt", help="Prepend this text to each sentence; '' for none.")
@click.option("--vectors", is_flag=True, help="With --json: print the vectors too.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def embed(
    model: str,
    sentences: tuple[str, ...],
    prompt_name: str | None,
    prompt: str | None,
    vectors: bool,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Embed SENTENCES with the encoder MODEL and print their similarity: the dot products of their pooled vectors.

    Pooling and the prompt prepended to each sentence follow the folder's modules.json, unless another prompt is given.
    Without one, the pooled vector is the normalised mean over tokens, and the products are cosines from -1 to 1.
    """
    if prompt is not None and prompt_name is not None:
        raise click.UsageError("give --prompt or --prompt-name, not both")
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
    table("Similarity", ("", *(str(i + 1) for i in range(len(sentences))), "sentence"), rows)
