"""`asbuilt tokenizer train`: byte-level BPE from texts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.output import count, print_json, say, size

if TYPE_CHECKING:
    from asbuilt.text.sources import Piece

ROOM = 1 << 20  # bytes that must be free; a vocabulary of 100,000 takes 5 MB


@click.command()
@click.argument("texts", nargs=-1)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--vocab-size", type=int, required=True, help="Number of tokens, with the 256 bytes and special ones.")
@click.option("--pattern", default="gpt2", show_default=True, help="What no merge crosses: gpt2, cl100k, o200k, none.")
@click.option("--special", metavar="TOKEN", multiple=True, help="A control token; its text is not learned from.")
@click.option("--eos", metavar="TOKEN", help="The control token that ends a text.")
@click.option("--bos", metavar="TOKEN", help="The control token that begins a text.")
@click.option("--pad", metavar="TOKEN", help="The control token that fills rows.")
@click.option("--mask", metavar="TOKEN", help="The control token that hides another.")
@click.option(
    "--sentinels",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="So many tokens <extra_id_0>, <extra_id_1> ...",
)
@click.option("--min-count", type=int, default=2, show_default=True, help="Merge pairs that occur as often or more.")
@click.option("--files", metavar="GLOB", help="Which files of folders; by default .txt .md .rst .py .jsonl.")
@click.option("--skip-binary", is_flag=True, help="Leave out files of folders that are not UTF-8 text.")
@click.option("--field", default="text", show_default=True, help="The field of the text in lines of JSON (.jsonl).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a summary.")
def train(
    texts: tuple[str, ...],
    out: Path,
    vocab_size: int,
    pattern: str,
    special: tuple[str, ...],
    eos: str | None,
    bos: str | None,
    pad: str | None,
    mask: str | None,
    sentinels: int,
    min_count: int,
    files: str | None,
    skip_binary: bool,
    field: str,
    as_json: bool,
) -> None:
    """Train a byte-level BPE tokenizer on TEXTS and write it to the folder OUT, which asbuilt and transformers load.

    TEXTS are files, folders, .jsonl files with a text a line, or - for stdin. A vocabulary of 256 and the special
    tokens needs none. OUT must be new or empty; nothing is written unless the vocabulary is as large as asked.
    """
    from asbuilt.checkpoint.save import aside
    from asbuilt.cli.convert import Bar
    from asbuilt.errors import InputError
    from asbuilt.text import sources
    from asbuilt.text import train as training

    named = {"eos_token": eos, "bos_token": bos, "pad_token": pad, "mask_token": mask}
    roles = {role: token for role, token in named.items() if token is not None}
    extra = [training.SENTINEL.format(number) for number in range(sentinels)]
    read, skipped = _Counted(), list[InputError]()
    began = time.perf_counter()
    with aside(out, ROOM) as partial:
        names = sources.files(texts, files or "", skipped.append if skip_binary else None)
        made = training.train(
            (read(piece) for piece in sources.pieces(names, key=field, progress=Bar())),
            vocab_size,
            pattern=pattern,
            special=(*special, *extra),
            roles=roles,
            min_count=min_count,
        )
        made.save(partial)
    document = {
        "out": str(out),
        "vocab_size": made.n_vocab,
        "pattern": pattern,
        "special": {token.content: id_ for id_, token in made.special_tokens.items()},
        "merges": made.n_vocab - len(made.special_tokens) - training.BYTES,
        "files": len(names),
        "skipped": [error.field for error in skipped],
        "documents": read.documents,
        "bytes": read.nbytes,
        "seconds": time.perf_counter() - began,
    }
    print_json(document) if as_json else _print(document)


class _Counted:
    """Counts what is read."""

    def __init__(self) -> None:
        self.documents, self.nbytes = 0, 0

    def __call__(self, piece: Piece) -> str:
        """Returns the text of a piece."""
        self.documents += piece.ends
        self.nbytes += len(piece.text.encode())
        return piece.text


def _print(document: dict[str, Any]) -> None:
    read = f"{size(document['bytes'])} of text in {count(document['documents'])} documents"
    said = f"{count(document['merges'])} merges, {count(len(document['special']))} special tokens"
    if document["skipped"]:
        say(f"{count(len(document['skipped']))} files skipped, which are not UTF-8 text")
    say(f"{document['out']}: {count(document['vocab_size'])} tokens (256 bytes, {said}), learned from {read}")
