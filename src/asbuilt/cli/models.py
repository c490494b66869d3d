"""`asbuilt models`: the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.output import print_json, table

if TYPE_CHECKING:
    from asbuilt.catalog import Entry

CACHE_DTYPE = "bf16"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def models(as_json: bool) -> None:
    """List the models that are known by name: size, cache, context length and source of each."""
    from asbuilt import catalog

    rows = [_row(catalog.find(name)) for name in catalog.names()]
    if as_json:
        print_json({"models": rows, "cache_dtype": CACHE_DTYPE})
        return
    keys = ("name", "family", "parameters", "cache_bytes_per_token", "context", "source")
    columns = ("name", "family", "parameters", f"cache bytes per token, {CACHE_DTYPE}", "context", "source")
    table("Catalogue", columns, [[row[key] for key in keys] for row in rows], drop=("source", "family"))


def _row(entry: Entry) -> dict[str, Any]:
    from asbuilt import cost

    spec = entry.spec()
    return {
        "name": entry.name,
        "family": entry.family,
        "parameters": cost.total_parameters(spec),
        "cache_bytes_per_token": cost.cache(spec, spec.max_positions, CACHE_DTYPE).per_token,
        "context": spec.max_positions,
        "dtype": entry.dtype,
        "source": entry.source,
    }
