"""The options of `asbuilt plan serve` that describe a workload and its price."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.types import Tokens
from asbuilt.errors import InputError

if TYPE_CHECKING:
    from asbuilt.plan.serve.money import Price
    from asbuilt.plan.serve.workload import Workload

# Options that mean nothing without a workload.
OF_WORKLOAD = ("rate", "arrivals", "prefix_share", "speculate", "acceptance", "draft_cost", "requests", "seed")
OPTIONS = (
    click.option("--input-tokens", type=Tokens(), help="Simulate a workload: tokens of a prompt."),
    click.option("--output-tokens", type=Tokens(), help="Tokens of an answer."),
    click.option(
        "--lengths", metavar="FILE", help="Lengths to draw from, in place of both: a line of two numbers per request."
    ),
    click.option(
        "--rate", metavar="RATE", help="Requests that arrive, such as 5/s; without it users wait for answers."
    ),
    click.option(
        "--arrivals", type=click.Choice(("poisson", "even")), help="At random, or evenly.  [default: poisson]"
    ),
    click.option("--prefix-share", type=float, help="Share of a prompt that is cached already, once for all."),
    click.option("--speculate", type=int, metavar="N", help="Tokens that are drafted for each step."),
    click.option("--acceptance", type=float, help="Probability that a drafted token is accepted."),
    click.option("--draft-cost", type=float, help="Steps that drafting one token takes.  [default: 0]"),
    click.option("--requests", type=int, help="Requests to simulate.  [default: 1,000, or 5 per user]"),
    click.option("--seed", type=int, help="Of arrivals and lengths.  [default: 0]"),
    click.option(
        "--price",
        metavar="PRICE",
        multiple=True,
        help="Of one device for an hour, such as $2.50/h, or one for each machine.",
    ),
    click.option(
        "--search",
        is_flag=True,
        help="Find the cheapest layouts that meet the targets; with --gpus, of so many devices.",
    ),
    click.option("--any-vendor", is_flag=True, help="Suggest other vendors' cards too."),
)


def workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def workload(options: dict[str, Any]) -> Workload | None:
    """Takes the options of a workload out of `options` and returns it, None if none was asked for.

    Raises InputError for an option without lengths, and for lengths that are given twice or in part.
    """
    said = {name: options.pop(name) for name in (*OF_WORKLOAD, "input_tokens", "output_tokens", "lengths")}
    asked = ("input_tokens", "output_tokens", "lengths")
    if all(said[name] is None for name in asked):
        for name in OF_WORKLOAD:
            if said[name] is not None:
                fix = "give --input-tokens and --output-tokens, or --lengths"
                raise InputError("needs a workload", field=name.replace("_", "-"), value=said[name], fix=fix)
        return None
    from asbuilt.catalog.quantities import parse_per_time
    from asbuilt.plan.serve.workload import Workload

    given = {name: value for name, value in said.items() if value is not None and name not in asked}
    if "speculate" in given:
        given["drafts"] = given.pop("speculate")
    if "rate" in given:
        given["rate"] = parse_per_time(given["rate"], "rate")
    return Workload(lengths=_lengths(said), users=options["users"], **given)


def _lengths(said: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    from asbuilt.plan.serve.workload import read_lengths

    pair = said["input_tokens"], said["output_tokens"]
    if said["lengths"] is not None:
        if pair != (None, None):
            raise InputError("replaces --input-tokens and --output-tokens", field="lengths", fix="give one of them")
        return read_lengths(Path(said["lengths"]))
    for name, value in zip(("input-tokens", "output-tokens"), pair, strict=True):
        if value is None:
            raise InputError("missing", field=name, fix="give both, or --lengths FILE")
    return (pair,)


def prices(given: tuple[str, ...], machines: int) -> list[Price | None]:
    """Returns the price on each machine; raises InputError unless there is one price, or one for each machine."""
    if not given:
        return [None] * machines
    from asbuilt.catalog.quantities import parse_price
    from asbuilt.plan.serve.money import Price

    if len(given) not in (1, machines):
        raise InputError(field="price", value=len(given), allowed="given once, or once for each --gpu")
    found = [Price(amount=amount, currency=currency) for amount, currency in (parse_price(p, "price") for p in given)]
    return [*found] * (machines if len(given) == 1 else 1)
