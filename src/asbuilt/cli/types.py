"""What options take beyond click's own types."""

from __future__ import annotations

import re
from typing import Any

import click

LARGEST = 2**31 - 1
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
SAID = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([km]?)", re.ASCII | re.IGNORECASE)


class Tokens(click.ParamType):
    """A number of tokens: 8192, or 8k and 1M, by 1024 as contexts are named: 128k is 131,072."""

    name = "tokens"

    def __init__(self, least: int = 1, most: int = LARGEST) -> None:
        self.least, self.most = least, most

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """TOKENS, in the help."""
        return "TOKENS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """Returns the number; a usage error for what is none, and for one beyond the bounds."""
        if isinstance(value, int):
            return value
        found = SAID.fullmatch(str(value).strip())
        number = float(found[1]) * UNITS[found[2].lower()] if found else -1.0
        if number != int(number) or not self.least <= number <= self.most:
            allowed = f"{self.least:,} to {self.most:,}, such as 8192, 128k (131,072) or 1M"
            self.fail(f"{value!r} is not a number of tokens; allowed: {allowed}", param, ctx)
        return int(number)
