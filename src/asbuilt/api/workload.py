"""A workload and prices as `asbuilt plan serve` and the page are asked for them: options by name, texts with units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asbuilt.catalog.quantities import parse_per_time, parse_price
from asbuilt.errors import InputError
from asbuilt.plan.serve.money import Price
from asbuilt.plan.serve.workload import Workload, read_lengths

# Options that mean nothing without a workload.
OF_WORKLOAD = ("rate", "arrivals", "prefix_share", "speculate", "acceptance", "draft_cost", "requests", "seed")


def workload(options: dict[str, Any]) -> Workload | None:
    """Takes the options of a workload out of `options` and returns it, None if none was asked for.

    `lengths` is a file's path, or its pairs.
    Raises InputError for an option without lengths, and for lengths that are given twice or in part.
    """
    said = {name: options.pop(name, None) for name in (*OF_WORKLOAD, "input_tokens", "output_tokens", "lengths")}
    asked = ("input_tokens", "output_tokens", "lengths")
    if all(said[name] is None for name in asked):
        for name in OF_WORKLOAD:
            if said[name] is not None:
                fix = "give --input-tokens and --output-tokens, or --lengths"
                raise InputError("needs a workload", field=name.replace("_", "-"), value=said[name], fix=fix)
        return None
    given = {name: value for name, value in said.items() if value is not None and name not in asked}
    if "speculate" in given:
        given["drafts"] = given.pop("speculate")
    if "rate" in given:
        given["rate"] = parse_per_time(given["rate"], "rate")
    return Workload(lengths=_lengths(said), users=options.get("users"), **given)


def _lengths(said: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    pair = said["input_tokens"], said["output_tokens"]
    if said["lengths"] is not None:
        if pair != (None, None):
            raise InputError("replaces --input-tokens and --output-tokens", field="lengths", fix="give one of them")
        given = said["lengths"]
        return given if isinstance(given, tuple) else read_lengths(Path(given))
    for name, value in zip(("input-tokens", "output-tokens"), pair, strict=True):
        if value is None:
            raise InputError("missing", field=name, fix="give both, or --lengths FILE")
    return (pair,)


def prices(given: Sequence[str], machines: int) -> list[Price | None]:
    """Returns the price on each machine; raises InputError unless there is one price, or one for each machine."""
    if not given:
        return [None] * machines
    if len(given) not in (1, machines):
        raise InputError(field="price", value=len(given), allowed="given once, or once for each --gpu")
    found = [Price(amount=amount, currency=currency) for amount, currency in (parse_price(p, "price") for p in given)]
    return [*found] * (machines if len(given) == 1 else 1)
