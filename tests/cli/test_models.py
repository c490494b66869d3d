"""`asbuilt models`: the catalogue as it is listed is the catalogue as it is described."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from click.testing import Result

from asbuilt import catalog

Run = Callable[..., Result]


def test_every_row_is_listed_once(run: Run) -> None:
    document = json.loads(run("models", "--json").stdout)
    assert [row["name"] for row in document["models"]] == catalog.names()
    assert all(row["source"] for row in document["models"])


def test_a_row_says_what_describe_says(run: Run) -> None:
    rows = json.loads(run("models", "--json").stdout)["models"]
    row = Random().choice(rows)
    bill = json.loads(run("describe", row["name"], "--json").stdout)
    assert row["family"] == bill["family"]
    assert row["parameters"] == bill["parameters"]["total"]
    assert row["cache_bytes_per_token"] == bill["cache"]["bytes_per_token"]
    assert row["context"] == bill["context"]


def test_the_table_has_a_line_per_model(run: Run) -> None:
    text = run("models").stdout
    for name in catalog.names():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert f"{catalog.find(name).spec().max_positions:,}" in line
