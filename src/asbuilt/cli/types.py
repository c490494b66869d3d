"""Option types beyond click's own."""

from __future__ import annotations

from typing import Any

import click

from asbuilt.errors import InputError

LARGEST = 2**31 - 1


class Tokens(click.ParamType):
    """A number of tokens: 8192, 128k (128,000) or 128K (131,072)."""

    name = "tokens"

    def __init__(self, least: int = 1, most: int = LARGEST) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """Returns the number; a usage error if it is not a number of tokens or out of bounds."""

        from asbuilt.catalog.quantities import parse_tokens

        try:
            number = 0 if value in (0, "0") else parse_tokens(value, "")
        except InputError as error:
            self.fail(f"{error}", param, ctx)
        if not self.least <= number <= self.most:
            self.fail(f"{number:,} is not in the range {self.least:,} to {self.most:,}.", param, ctx)
        return number
