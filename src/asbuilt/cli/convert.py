"""`asbuilt convert`: writes a checkpoint folder or GGUF file as a folder that transformers loads, or as a GGUF file."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import count, print_json, say, size, warn
from asbuilt.cli.streams import draw


@click.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", help="fp32, bf16, fp16, for .gguf also q8_0, q4_k_m ...; as stored (in a folder unpacked).")
@click.option("--max-shard-size", help="Split larger checkpoints: 5GB for a folder, for .gguf none unless it is said.")
@click.option("--adapter", metavar="FOLDER", help="Merge the LoRA adapters in this folder, in PEFT's layout.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document that lists what was written.")
def convert(
    source: str,
    out: Path,
    dtype: str | None,
    max_shard_size: str | None,
    adapter: str | None,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Convert SOURCE, a .gguf file or checkpoint folder, to OUT: a Hugging Face folder, or a GGUF file if it ends so.

    OUT appears only when it is complete: an interrupted conversion leaves nothing behind.
    """
    from asbuilt.catalog.quantities import parse_bytes
    from asbuilt.checkpoint import convert as conversion
    from asbuilt.checkpoint.gguf_write import is_gguf
    from asbuilt.checkpoint.wanted import format_named
    from asbuilt.dtypes import torch_name

    limit = None if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size")
    named = functools.partial(format_named, mixtures=True) if is_gguf(out) else torch_name
    stored = dtype and named(dtype, "--dtype")
    model = opened(source, allow_unread, weights=True)
    began = time.perf_counter()
    files = conversion.convert(model, out, stored, limit, Bar(), warn, adapter)
    document = _written(model.name, out, files, time.perf_counter() - began)
    if as_json:
        print_json(document)
    else:
        say(f"{out}: {size(document['bytes'])} in {count(len(document['files']))} files")


def _written(name: str, out: Path, paths: list[Path], seconds: float) -> dict[str, Any]:
    files = {path.name: path.stat().st_size for path in paths}
    return {"source": name, "out": str(out), "files": files, "bytes": sum(files.values()), "seconds": seconds}


class Bar:
    """A progress bar on stderr, drawn only if stderr is a terminal."""

    def __init__(self) -> None:
        self._drawn = -1

    def __call__(self, done: int, whole: int) -> None:
        """Draws `done` of `whole` bytes, if the percentage has changed."""
        percent = 100 * done // max(1, whole)
        if percent > self._drawn and sys.stderr.isatty():
            self._drawn = percent
            draw(sys.stderr, f"\r{percent:3d}% of {size(whole)}" + "\n" * (done >= whole))
