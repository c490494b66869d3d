"""`asbuilt machines`: every row with its source, in the table and in the document."""

from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

from asbuilt.catalog import machines

Run = Callable[..., Result]


def test_every_row_is_listed_with_its_source(run: Run) -> None:
    rows = json.loads(run("machines", "--json").stdout)["machines"]
    assert [row["name"] for row in rows] == machines.names()
    for row in rows:
        machine = machines.find(row["name"])
        assert row["source"] == machine.source
        assert row["memory_bytes"] == machine.memory_gb * 10**9
        assert row["rates"] == machine.rates


def test_the_table_names_every_machine(run: Run) -> None:
    text = run("machines").stdout
    for name in machines.names():
        assert sum(line.split()[:1] == [name] for line in text.splitlines()) == 3
