"""`asbuilt quantize`: writes a checkpoint as a GGUF file of blocks, and says what that saves and costs."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.convert import Bar
from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import count, print_json, say, size, table, warn
from asbuilt.cli.types import Tokens

if TYPE_CHECKING:
    from asbuilt.checkpoint.gguf_write import Summary
    from asbuilt.checkpoint.source import Source

LARGEST_TEXT = 1 << 26
NUMBER = re.compile(r"\.\d+\.")


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "format_", required=True, help="q8_0, q6_k, q4_k, q4_0, mxfp4, fp16 ..., or q4_k_m ...")
@click.option("--by", metavar="GLOB=FORMAT", multiple=True, help="Another format for weights whose path matches.")
@click.option("--text", type=click.Path(path_type=Path), help="Print the loss on this text before and after.")
@click.option("--tokens", type=Tokens(least=2), default=8192, show_default=True, help="At most so many of the text.")
@click.option("--max-shard-size", help="Split larger files, as llama.cpp names them: 4GB. By default one file.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def quantize(
    model: str,
    out: Path,
    format_: str,
    by: tuple[str, ...],
    text: Path | None,
    tokens: int,
    max_shard_size: str | None,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Round the weights of MODEL to nearest in blocks and write the GGUF file OUT.

    Vectors, norms, biases and routers stay in fp32, the head (or the token table of a tied model) in q6_k; rows that
    do not divide into blocks take the next format that holds them. --format q4_k_m and llama.cpp's other file types
    (q2_k_s q3_k_s q3_k_m q3_k_l q4_k_s q5_k_s q5_k_m ...) are the mixtures of formats that `describe --dtype` bills.
    --by 'blocks.*.ffn.*=q6_k' overrules the format of the weights whose paths match (those of `asbuilt describe`); the
    last rule that matches counts.
    """
    from asbuilt.catalog.quantities import parse_bytes
    from asbuilt.checkpoint.gguf_write import is_gguf, write_gguf
    from asbuilt.checkpoint.wanted import Formats, format_named
    from asbuilt.errors import InputError

    if not is_gguf(out):
        raise InputError("is no name of a GGUF file", field="OUT", value=str(out), fix="let it end in .gguf")
    formats = Formats(common=format_named(format_, "--format", mixtures=True), rules=tuple(_rule(said) for said in by))
    limit = float("inf") if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size")
    source = opened(model, allow_unread, weights=True)
    ids = None if text is None else _tokens(source, text, tokens)
    before = None if ids is None else _loss(source, ids)
    began = time.perf_counter()
    summary = write_gguf(source, out, formats, limit, Bar(), warn)
    document = _document(source.name, summary, time.perf_counter() - began)
    if ids is not None and before is not None:
        after = _loss(opened(str(summary.files[0]), ()), ids)
        document["loss"] = {"tokens": len(ids), "before": before, "after": after}
    if as_json:
        print_json(document)
    else:
        _print(document)


def _rule(said: str) -> tuple[str, str]:
    from asbuilt.checkpoint.wanted import format_named
    from asbuilt.errors import InputError

    glob, equals, format = said.rpartition("=")
    if not equals or not glob:
        raise InputError(field="by", value=said, allowed="GLOB=FORMAT: blocks.0.*=q8_0")
    return glob, format_named(format, "by")


def _tokens(source: Source, path: Path, most: int) -> list[int]:
    """Returns the first tokens of a text."""
    from asbuilt.errors import InputError
    from asbuilt.files import read_text

    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer, so a text has no loss", field="MODEL", value=source.name)
    # A token has at least a byte, so more characters than tokens are seldom needed; long words may take many.
    return tokenizer.encode(read_text(path, LARGEST_TEXT, "text")[: 64 * most])[:most]


def _loss(source: Source, ids: list[int]) -> float:
    from asbuilt.checkpoint.load import load
    from asbuilt.measure.loss import nats_per_token

    tokenizer = source.tokenizer()
    first = tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None
    return nats_per_token(load(source, dtype="float32"), ids, first)


def _document(name: str, summary: Summary, seconds: float) -> dict[str, Any]:
    files = {str(path): path.stat().st_size for path in summary.files}
    kinds = sorted(summary.before | summary.after, key=lambda kind: -summary.before[kind])
    return {
        "source": name,
        "files": files,
        "bytes": sum(files.values()),
        "kinds": {kind: {"before": summary.before[kind], "after": summary.after[kind]} for kind in kinds},
        "types": dict(summary.types),
        "weights": [
            {"paths": list(row.paths), "format": row.type.lower(), "bytes": row.nbytes, "error": row.error}
            for row in summary.rows
        ],
        "seconds": seconds,
        "loss": None,
    }


def _print(document: dict[str, Any]) -> None:
    kinds, loss = document["kinds"], document["loss"]
    whole = {when: sum(one[when] for one in kinds.values()) for when in ("before", "after")}
    rows = [
        (kind, size(one["before"]), size(one["after"]), f"{one['after'] / max(1, one['before']):.0%}")
        for kind, one in [*kinds.items(), ("total", whole)]
    ]
    table("Weights", ("kind", "before", "after", "share"), rows)
    _print_weights(document["weights"])
    say(f"tensors: {', '.join(f'{count(n)} {kind}' for kind, n in document['types'].items())}")
    if loss is not None:
        change = loss["after"] - loss["before"]
        say(f"loss: {loss['before']:.4f} nats per token before, {loss['after']:.4f} after ({change:+.4f})")
    for path, nbytes in document["files"].items():
        say(f"{path}: {size(nbytes)}")


def _print_weights(weights: list[dict[str, Any]]) -> None:
    """Prints what each weight became, those that differ by the numbers in their paths, as layers do, in one row."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in weights:
        path = ", ".join(NUMBER.sub(".*.", path.removesuffix(".weight")) for path in one["paths"])
        alike.setdefault((path, one["format"]), []).append(one)
    rows = [
        (path, format, count(len(some)), size(sum(one["bytes"] for one in some)), *_errors(some))
        for (path, format), some in alike.items()
    ]
    table("What each cost", ("path", "format", "count", "bytes", "error", "worst"), rows, drop=("count",))


def _errors(some: list[dict[str, Any]]) -> tuple[str, str]:
    """Returns the mean and the largest relative error; nothing where none changed."""
    errors = [one["error"] for one in some]
    return (f"{sum(errors) / len(errors):.2%}", f"{max(errors):.2%}") if any(errors) else ("", "")
