"""`asbuilt quantize`: writes a checkpoint as a GGUF file of blocks, and says what that saves and costs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.convert import Bar
from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import count, print_json, say, size, table, warn
from asbuilt.cli.types import Tokens

if TYPE_CHECKING:
    from torch import Tensor

    from asbuilt.checkpoint.gguf_write import Summary
    from asbuilt.checkpoint.source import Source

LARGEST_TEXT = 1 << 26
NUMBER = re.compile(r"\.\d+\.")


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format", "format_", required=True, help="q8_0, q4_k, q4_0, q4_k_m ... of a .gguf; fp8, int8, int4, nvfp4, mxfp4."
)
@click.option("--by", metavar="GLOB=FORMAT", multiple=True, help="Another format for weights whose path matches.")
@click.option("--text", type=click.Path(path_type=Path), help="Print the loss on this text before and after.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Weigh errors by what maps read of this text.")
@click.option("--imatrix", type=click.Path(path_type=Path), help="Weigh errors by llama.cpp's importance matrix.")
@click.option("--save-imatrix", type=click.Path(path_type=Path), help="Write what --calibration found as such a file.")
@click.option("--tokens", type=Tokens(least=2), default=8192, show_default=True, help="At most so many of each text.")
@click.option("--max-shard-size", help="Split larger files: 4GB. By default one .gguf, or 5 GB each.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def quantize(
    model: str,
    out: Path,
    format_: str,
    by: tuple[str, ...],
    text: Path | None,
    calibration: Path | None,
    imatrix: Path | None,
    save_imatrix: Path | None,
    tokens: int,
    max_shard_size: str | None,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Round the weights of MODEL and write OUT: a GGUF file of blocks if it ends in .gguf, else a checkpoint folder.

    In a GGUF file vectors, norms, biases and routers stay in fp32, the head (or the token table of a tied model) in
    q6_k; rows that do not divide into blocks take the next format that holds them. --format q4_k_m and llama.cpp's
    other file types (q2_k_s q3_k_s q3_k_m q3_k_l q4_k_s q5_k_s q5_k_m ...) are the mixtures of formats that `describe
    --dtype` bills. --by 'blocks.*.ffn.*=q6_k' overrules the format of the weights whose paths match (those of `asbuilt
    describe`); the last rule that matches counts.

    In a folder the matrices of linear maps are in fp8 (a scale for 128 x 128 numbers, or the square of 64 or 32 that
    divides all), int8 (one per row), int4 (one per group of a row), nvfp4 or mxfp4, as transformers and engines read
    them; --by 'blocks.0.*=keep' leaves weights as they are.

    --calibration weighs the errors of each weight by the mean square of the input that it is multiplied by while the
    model reads the first three quarters of a text; the loss before and after is of the last quarter, unless there is a
    --text.
    """
    from asbuilt.errors import InputError

    write = _writer(out, format_, by, max_shard_size)
    if calibration is not None and imatrix is not None:
        raise InputError("goes without --calibration", field="--imatrix", value=str(imatrix))
    if save_imatrix is not None and calibration is None:
        raise InputError("needs --calibration", field="--save-imatrix", value=str(save_imatrix))
    source = opened(model, allow_unread, weights=True)
    read, held_out = (None, None) if calibration is None else _halves(source, calibration, tokens)
    ids = held_out if text is None else _tokens(source, text, tokens)
    before = None if ids is None else _loss(source, ids)
    weighs = _importance(source, read, imatrix, save_imatrix)
    began = time.perf_counter()
    summary = write(source, weighs)
    document = _document(source.name, summary, time.perf_counter() - began)
    document["calibration"] = None if read is None else {"tokens": len(read), "weights": len(weighs)}
    if ids is not None and before is not None:
        after = _loss(opened(str(out if out.is_dir() else summary.files[0]), ()), ids)
        document["loss"] = {"tokens": len(ids), "before": before, "after": after}
    if as_json:
        print_json(document)
    else:
        _print(document)


def _writer(
    out: Path, format: str, by: tuple[str, ...], max_shard_size: str | None
) -> Callable[[Source, dict[str, Tensor]], Summary]:
    """Returns what writes a model, given the importance of its maps' inputs; checks the options first."""
    from asbuilt.catalog.quantities import parse_bytes
    from asbuilt.checkpoint import pack
    from asbuilt.checkpoint.gguf_write import is_gguf, write_gguf
    from asbuilt.checkpoint.save import MAX_SHARD_BYTES
    from asbuilt.checkpoint.wanted import Formats, format_named

    limit = None if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size")
    if is_gguf(out):
        rules = tuple((glob, format_named(said, "by")) for glob, said in map(_rule, by))
        formats = Formats(common=format_named(format, "--format", mixtures=True), rules=rules)
        most = float("inf") if limit is None else limit
        return lambda source, weighs: write_gguf(source, out, formats, most, Bar(), warn, weighs)
    common, kept = pack.folder_format(format, "--format"), [_kept(one) for one in by]
    most = MAX_SHARD_BYTES if limit is None else limit
    return lambda source, weighs: pack.write_packed(
        source, out, common, kept=kept, importance=weighs, max_shard_bytes=most, progress=Bar()
    )


def _rule(said: str) -> tuple[str, str]:
    from asbuilt.errors import InputError

    glob, equals, format = said.rpartition("=")
    if not equals or not glob:
        raise InputError(field="by", value=said, allowed="GLOB=FORMAT: blocks.0.*=q8_0")
    return glob, format


def _kept(said: str) -> str:
    from asbuilt.errors import InputError

    glob, format = _rule(said)
    if format != "keep":
        allowed = "GLOB=keep, as the matrices of a folder are in one format"
        raise InputError(field="by", value=said, allowed=allowed, fix="write a GGUF file, whose formats may differ")
    return glob


def _tokens(source: Source, path: Path, most: int) -> list[int]:
    """Returns the first tokens of a text."""
    from asbuilt.errors import InputError
    from asbuilt.files import read_text

    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer, so a text has no loss", field="MODEL", value=source.name)
    # A token has at least a byte, so more characters than tokens are seldom needed; long words may take many.
    return tokenizer.encode(read_text(path, LARGEST_TEXT, "text")[: 64 * most])[:most]


def _halves(source: Source, path: Path, most: int) -> tuple[list[int], list[int]]:
    """Returns the first tokens of the first three quarters of a text, and of its last quarter."""
    from asbuilt.errors import InputError
    from asbuilt.files import read_text

    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer, so it reads no text", field="MODEL", value=source.name)
    text = read_text(path, LARGEST_TEXT, "text")
    at = len(text) * 3 // 4
    first, last = (tokenizer.encode(part[: 64 * most])[:most] for part in (text[:at], text[at:]))
    for part in (first, last):
        if len(part) < 2:
            raise InputError("too short", field="calibration", value=len(part), allowed="at least 2 tokens a quarter")
    return first, last


def _importance(source: Source, ids: list[int] | None, imatrix: Path | None, save: Path | None) -> dict[str, Tensor]:
    """Returns the mean squares of maps' inputs: as a file has them, or on tokens, or none."""
    from asbuilt.checkpoint.imatrix import read_imatrix, write_imatrix

    if imatrix is not None:
        return read_imatrix(imatrix, source)
    if ids is None:
        return {}
    from asbuilt.checkpoint.load import load
    from asbuilt.measure.importance import importance

    found = importance(load(source, dtype="float32"), ids, _begin(source))
    if save is not None:
        write_imatrix(save, source, found, "calibration", len(ids))
    return found


def _begin(source: Source) -> int | None:
    """Returns the token that a text begins with, if any."""
    tokenizer = source.tokenizer()
    return tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None


def _loss(source: Source, ids: list[int]) -> float:
    from asbuilt.checkpoint.load import load
    from asbuilt.measure.loss import nats_per_token

    return nats_per_token(load(source, dtype="float32"), ids, _begin(source))


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
            {
                "paths": list(row.paths),
                "format": row.type.lower(),
                "bytes": row.nbytes,
                "error": row.error,
                "output_error": row.output_error,
            }
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
    if document["calibration"] is not None:
        read = document["calibration"]
        say(f"errors of {count(read['weights'])} weights weighed by their inputs on {count(read['tokens'])} tokens")
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
        (path, format, count(len(some)), size(sum(one["bytes"] for one in some)), *_errors(some), _outputs(some))
        for (path, format), some in alike.items()
    ]
    table(
        "What each cost",
        ("path", "format", "count", "bytes", "error", "worst", "of outputs"),
        rows,
        drop=("count", "of outputs"),
    )


def _errors(some: list[dict[str, Any]]) -> tuple[str, str]:
    """Returns the mean and the largest relative error; nothing where none changed."""
    errors = [one["error"] for one in some]
    return (f"{sum(errors) / len(errors):.2%}", f"{max(errors):.2%}") if any(errors) else ("", "")


def _outputs(some: list[dict[str, Any]]) -> str:
    """Returns the mean relative error of the outputs; nothing where it is not known or none changed."""
    errors = [one["output_error"] for one in some if one["output_error"]]
    return f"{sum(errors) / len(errors):.2%}" if errors else ""
