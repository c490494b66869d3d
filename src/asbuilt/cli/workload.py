"""The options of `asbuilt plan serve` that describe a workload and its price."""

from __future__ import annotations

from collections.abc import Callable

import click

from asbuilt.cli.types import Tokens

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
