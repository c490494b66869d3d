"""`asbuilt machines`: every row with its source, in the table and in the document."""

from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

from asbuilt.catalog import machines
from asbuilt.cli.machines import _figure

Run = Callable[..., Result]


def test_every_row_is_listed_with_its_source(run: Run) -> None:
    rows = json.loads(run("machines", "--json").stdout)["machines"]
    assert [row["name"] for row in rows] == machines.names()
    for row in rows:
        machine = machines.find(row["name"])
        assert row["source"] == machine.source
        assert row["memory_bytes"] == machine.memory_gb * 10**9
        assert row["rates"] == machine.rates
        assert row["bandwidth"] == machine.bandwidth
        assert (row["vendor"], row["kind"], row["note"]) == (machine.vendor, machine.kind, machine.note)
        assert (row["link"] is None) == (machine.link is None)
    h100 = next(row for row in rows if row["name"] == "h100-sxm")
    assert (h100["memory_bytes"], h100["reported_bytes"]) == (80 * 10**9, 81559 * 2**20)
    assert h100["process_bytes"] == int(79.19 * 2**30)
    assert "PyTorch" in h100["process_source"]
    assert h100["link"] == {"kind": "NVLink 4", "bandwidth": 450e9}
    gaudi = next(row for row in rows if row["name"] == "gaudi-3")
    assert (gaudi["reported_bytes"], gaudi["process_bytes"], gaudi["process_source"]) == (None, None, "")


def test_the_table_names_every_machine(run: Run) -> None:
    text = run("machines").stdout
    for name in machines.names():
        assert sum(line.split()[:1] == [name] for line in text.splitlines()) == 3


H100 = {
    "name": "h100-sxm",
    "vendor": "NVIDIA",
    "kind": "accelerator",
    "memory_bytes": 80 * 10**9,
    "reported_bytes": 81_559 * 2**20,  # what nvidia-smi prints, MiB
    "bandwidth": 3.35e12,
    "link": {"kind": "NVLink 4", "bandwidth": 450e9},  # 900 GB/s both ways together
}
# dense, so half of what the data sheet prints with sparsity
RATES = {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12}


def test_a_data_sheet_as_it_is_printed(run: Run) -> None:
    (row,) = [row for row in json.loads(run("machines", "--json").stdout)["machines"] if row["name"] == "h100-sxm"]
    assert {key: row[key] for key in H100} == H100 | {"reported_bytes": row["reported_bytes"]}
    assert abs(row["reported_bytes"] / H100["reported_bytes"] - 1) < 1e-3
    assert row["rates"] == RATES
    assert "sparsity" in row["note"]
    memory, rates, source = [
        line.split() for line in run("machines").stdout.splitlines() if line.split()[:1] == ["h100-sxm"]
    ]
    assert memory == ["h100-sxm", "NVIDIA", "80", "79.65", "79.19", "3,350", "450", "NVLink", "4"]
    assert rates == ["h100-sxm", "67", "989.4", "989.4", "1,978.9", "1,978.9"]
    assert " ".join(source).startswith("h100-sxm NVIDIA data sheet, H100 SXM rates are halves")


def test_headers_name_units(run: Run) -> None:
    lines = run("machines").stdout.splitlines()
    headers = [" ".join(lines[i + 1].split()) for i, line in enumerate(lines) if i and not lines[i - 1] and line]
    assert headers == [
        "name vendor memory, GB reported, GiB a process, GiB GB/s link, GB/s one way kind",
        "name fp32 bf16 fp16 fp8 int8 fp4 int4",
        "name source note",
        "profiles of",
    ]
    assert "1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb" in lines[-3]
    assert "Dense rates, TFLOP/s (TOP/s for int)" in lines


def test_what_a_machine_has_not_is_null(run: Run) -> None:
    (row,) = [row for row in json.loads(run("machines", "--json").stdout)["machines"] if row["name"] == "m4-max"]
    assert row["link"] is None
    memory = next(line for line in run("machines").stdout.splitlines() if line.split()[:1] == ["m4-max"])
    assert memory.split() == ["m4-max", "Apple", "128", "96.00", "96.00", "546"]


def test_six_digits_of_a_figure() -> None:
    assert [_figure(x) for x in (1234.5678, 989.4, 67.0, 0.5)] == ["1,234.57", "989.4", "67", "0.5"]
