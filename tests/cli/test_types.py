"""Numbers of tokens on a command line: plain, in thousands, in units of 1024, within their bounds."""

from __future__ import annotations

import json
from collections.abc import Callable

import click
import pytest
from click.testing import Result

from asbuilt.cli.types import LARGEST, Tokens

Run = Callable[..., Result]


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("1", 1),
        ("8192", 8192),
        ("8,192", 8192),
        ("128k", 128_000),
        ("128K", 131_072),
        ("128Ki", 131_072),
        ("1M", 1 << 20),
        ("1m", 10**6),
        ("1.5k", 1500),
        (4096, 4096),
        ("2147483647", LARGEST),
        ("0", 0),
        (0, 0),
    ],
)
def test_numbers(said: str | int, number: int) -> None:
    assert Tokens(0).convert(said, None, None) == number


@pytest.mark.parametrize("said", ["0", "-1", "2147483648", "2049M", "x", "", "1.0005k", "1e-3", "1kk", "٣", "1" * 5000])
def test_what_is_refused(said: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        Tokens().convert(said, None, None)
    assert len(str(refused.value)) < 300


def test_bounds() -> None:
    kind = Tokens(10, 20)
    assert [kind.convert(str(n), None, None) for n in (10, 20)] == [10, 20]
    for n in (9, 21):
        with pytest.raises(click.BadParameter, match=f"{n} is not in the range 10 to 20"):
            kind.convert(str(n), None, None)


def test_on_the_command_line(run: Run) -> None:
    assert json.loads(run("describe", "llama-3.1-8b", "--seq", "128K", "--json").stdout)["seq"] == 131_072
    refused = run("describe", "llama-3.1-8b", "--seq", "128q")
    assert (refused.exit_code, "128k (128,000) or 128K (131,072)" in refused.stderr) == (2, True)
    refused = run("generate", "gpt2", "x", "--max-new-tokens", "some")
    assert (refused.exit_code, "--max-new-tokens" in refused.stderr) == (2, True)
