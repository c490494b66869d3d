"""`asbuilt machines`: the accelerators and CPUs in the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.output import print_json, table
from asbuilt.shown import number

if TYPE_CHECKING:
    from asbuilt.catalog.machine import Machine

SHOWN = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def machines(as_json: bool) -> None:
    """List the machines that `--gpu` takes by name: memory, bandwidth, dense rates, links and sources."""
    from asbuilt.catalog import machines as catalogue
    from asbuilt.catalog.slices import CARDS, profiles

    rows = [catalogue.find(name) for name in catalogue.names()]
    if as_json:
        print_json({"machines": [document(machine) for machine in rows]})
        return
    columns = ("name", "vendor", "memory, GB", "reported, GiB", "a process, GiB", "GB/s", "link, GB/s one way", "kind")
    table("Memory and links", columns, [_memory(machine) for machine in rows])
    table(
        "Dense rates, TFLOP/s (TOP/s for int)",
        ("name", *SHOWN),
        [(m.name, *(_figure(m.rates[p] / 1e12) if p in m.rates else "" for p in SHOWN)) for m in rows],
    )
    table("Sources", ("name", "source", "note"), [(m.name, m.source, m.note) for m in rows])
    divided: dict[str, list[str]] = {}
    for card in CARDS:
        divided.setdefault(", ".join(profiles(card)), []).append(card)
    of = [(names, ", ".join(cards)) for names, cards in divided.items()]
    table("MIG slices, as in --gpu h100-sxm-3g.40gb", ("profiles", "of"), of)


def _figure(value: float) -> str:
    """Returns a figure with up to six digits and no trailing zeros, as in data sheets."""
    return number(float(value), 6)


def _memory(machine: Machine) -> tuple[str, ...]:
    reported = "" if machine.reported_gib is None else f"{machine.reported_gib:,.2f}"
    process = "" if machine.process_gib is None else f"{machine.process_gib:,.2f}"
    link = ("", "") if machine.link is None else (_figure(machine.link.bandwidth / 1e9), machine.link.kind)
    bandwidth = _figure(machine.bandwidth / 1e9)
    return machine.name, machine.vendor, _figure(machine.memory_gb), reported, process, bandwidth, *link


def document(machine: Machine) -> dict[str, Any]:
    """Returns the machine as plain data; rates in FLOP/s."""
    from asbuilt.catalog.slices import profiles

    return {
        "name": machine.name,
        "vendor": machine.vendor,
        "kind": machine.kind,
        "memory_bytes": machine.memory_bytes("vendor"),
        "reported_bytes": None if machine.reported_gib is None else machine.memory_bytes("reported"),
        "process_bytes": None if machine.process_gib is None else machine.memory_bytes("process"),
        "process_source": machine.process_source,
        "bandwidth": machine.bandwidth,
        "rates": dict(machine.rates),
        "link": None if machine.link is None else {"kind": machine.link.kind, "bandwidth": machine.link.bandwidth},
        "mig_profiles": profiles(machine.name),
        "source": machine.source,
        "note": machine.note,
    }
