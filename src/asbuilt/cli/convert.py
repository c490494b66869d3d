"""`asbuilt convert`: a checkpoint folder or GGUF file to a folder that transformers loads."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import count, print_json, say, size
from asbuilt.cli.streams import draw


@click.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", help="fp32, bf16, fp16; as stored unless given, fp32 for quantised weights.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Weights beyond this go into several files.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document saying what was written.")
def convert(
    source: str, out: Path, dtype: str | None, max_shard_size: str, allow_unread: tuple[str, ...], as_json: bool
) -> None:
    """Writes SOURCE, a .gguf file or checkpoint folder, as a Hugging Face folder OUT with safetensors.

    OUT appears when it is whole: an interrupted conversion leaves nothing.
    """
    from asbuilt.catalog.quantities import parse_bytes
    from asbuilt.checkpoint import convert as conversion
    from asbuilt.dtypes import torch_name

    limit, stored = parse_bytes(max_shard_size, "--max-shard-size"), dtype and torch_name(dtype, "--dtype")
    model = opened(source, allow_unread, weights=True)
    began = time.perf_counter()
    conversion.convert(model, out, stored, limit, Bar())
    document = _written(model.name, out, time.perf_counter() - began)
    if as_json:
        print_json(document)
    else:
        say(f"{out}: {size(document['bytes'])} in {count(len(document['files']))} files")


def _written(name: str, out: Path, seconds: float) -> dict[str, Any]:
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    return {"source": name, "out": str(out), "files": files, "bytes": sum(files.values()), "seconds": seconds}


class Bar:
    """One line on a terminal's stderr that says how far it is; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._drawn = -1

    def __call__(self, done: int, whole: int) -> None:
        """Draws `done` of `whole` bytes, where that is another percent."""
        percent = 100 * done // max(1, whole)
        if percent > self._drawn and sys.stderr.isatty():
            self._drawn = percent
            draw(sys.stderr, f"\r{percent:3d}% of {size(whole)}" + "\n" * (done >= whole))
