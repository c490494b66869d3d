"""The description of a machine: memory, bandwidth, dense rates and links, from data sheets or as given.

Rates are dense. Vendors also, or only, print twice the rate "with sparsity"; such figures are not used.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from asbuilt.catalog.quantities import parse_bytes, parse_rate
from asbuilt.errors import InputError, near, one_of
from asbuilt.files import read_regular

GB, GIB = 10**9, 2**30
MemoryConvention = Literal["process", "reported", "vendor", "binary"]
MEMORY_CONVENTIONS: tuple[MemoryConvention, ...] = ("process", "reported", "vendor", "binary")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4", "fp4")
# If a machine has no rate for a precision, it computes at the first of these for which it has one.
INSTEAD = {
    "fp4": ("bf16", "fp16", "fp32"),  # without FP4 units weights are converted to a wider format
    "int4": ("int8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
}
LARGEST_FILE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between machines of a kind: `bandwidth` is in bytes/s, out of one device in one direction."""

    kind: str
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One accelerator or CPU, as programs see it: hardware that appears as two devices is described as one of them.

    `memory_gb` is the vendor's number; `reported_gib` is what the driver reports, in units of 2^30, None if unknown;
    `process_gib` is what a process sees, and `process_source` its source. `bandwidth` is in bytes/s; `rates` are dense,
    in FLOP/s (OP/s for integers) by precision. `source` is the source of the figures; `note` tells which of them are
    derived, or not from a data sheet. `shared_memory` is the processor's too;
    `slice_of` is the card of which it is a MIG slice.
    """

    name: str
    vendor: str = ""
    kind: Literal["accelerator", "cpu"] = "accelerator"
    memory_gb: float
    reported_gib: float | None = None
    process_gib: float | None = None
    process_source: str = ""
    bandwidth: float
    rates: Mapping[str, float] = field(default_factory=dict)
    link: Link | None = None
    shared_memory: bool = False
    slice_of: str = ""
    source: str = ""
    note: str = ""

    def memory_bytes(self, convention: MemoryConvention = "process") -> int:
        """Returns the bytes of memory by one of the conventions.

        process: what a process sees, `torch.cuda.mem_get_info()[1]`, which is less than what the driver reports; if
        unknown, as `reported`. reported: what the driver reports, else the vendor's number. vendor: the vendor's number
        times 10^9. binary: the vendor's number times 2^30, since memory chips come in powers of two.
        """
        if convention == "binary":
            return int(self.memory_gb * GIB)
        if convention == "process" and self.process_gib is not None:
            return int(self.process_gib * GIB)
        if convention in ("process", "reported") and self.reported_gib is not None:
            return int(self.reported_gib * GIB)
        return int(self.memory_gb * GB)

    def rate(self, precision: str) -> tuple[float, str]:
        """Returns the rate at `precision`, or at its first fallback in INSTEAD, and the precision of that rate.

        Raises InputError, listing the machine's rates, if it has none of these.
        """
        for name in (precision, *INSTEAD.get(precision, ())):
            if name in self.rates:
                return self.rates[name], name
        raise InputError(
            "no rate is known at this precision",
            field=f"{self.name}: rates",
            value=precision,
            allowed=one_of(self.rates),
            fix=f"state one: --gpu {self.name},{precision}=100T",
        )


def parse_numbers(text: str) -> Machine:
    """Returns the machine given as `memory=80GB,bandwidth=2TB/s,bf16=312T,link=300GB/s,process=79.2GiB,name=mine`.

    Raises InputError naming a missing, unknown or invalid key.
    """
    return from_plain(_overrides(text), "gpu")


def _overrides(text: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        key = key.strip().lower()
        if not equals or key in given:
            problem = "given twice" if equals else ""
            raise InputError(problem, field="gpu", value=item, allowed="distinct key=value pairs, separated by commas")
        given[key] = value.strip()
    return given


def with_numbers(machine: Machine, text: str) -> Machine:
    """Returns the machine with some numbers replaced, `bf16=990T,bandwidth=3TB/s`; raises InputError as above."""
    given = _overrides(text)
    new = from_plain({"memory": machine.memory_gb * GB, "bandwidth": machine.bandwidth} | given, "gpu")
    same_memory = "memory" not in given
    told = same_memory and "reported" not in given  # what a process sees of another memory size is unknown
    return replace(
        machine,
        name=given.get("name", machine.name),
        memory_gb=machine.memory_gb if same_memory else new.memory_gb,
        reported_gib=new.reported_gib if "reported" in given else machine.reported_gib if same_memory else None,
        process_gib=new.process_gib if "process" in given else machine.process_gib if told else None,
        process_source=new.process_source if "process" in given else machine.process_source if told else "",
        bandwidth=new.bandwidth,
        rates={**machine.rates, **new.rates},
        link=new.link or machine.link,
        note="; ".join(filter(None, (machine.note, f"replaced: {', '.join(given)}"))),
    )


def from_calibration(plain: Mapping[str, Any]) -> Machine:
    """Returns the machine that `asbuilt measure` calibrated, from the plain data of its calibration.

    Its bandwidth is that of reading memory, its rates are those of matrix products. Raises InputError for anything but
    a calibration.
    """
    try:
        found = plain["machine"]
        rates = {name: float(lines["product_rate"]) for name, lines in plain["rates"].items() if name in PRECISIONS}
        numbers = {"memory": int(found["memory_bytes"]), "bandwidth": float(plain["read_bandwidth"]), **rates}
        processor, threads = str(found["processor"])[:200], int(found["threads"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            "not a calibration",
            field="machine",
            value=str(error)[:80],
            allowed="the output of `asbuilt measure --json`",
        ) from error
    source = f"measured: {processor}, {threads} threads"
    return replace(from_plain(numbers, "machine"), name="this", kind="cpu", source=source)


def read_toml(path: Path) -> Machine:
    """Returns the machine described by a TOML file with the keys of `parse_numbers`; rates may be under [rates].

    Raises InputError for an unreadable file, and as `parse_numbers` does.
    """
    text = read_regular(path, LARGEST_FILE, "gpu")
    try:
        plain = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or a number with thousands of digits
        raise InputError(f"not a TOML file: {str(error)[:200]}", field="gpu", value=str(path)) from error
    rates = plain.pop("rates", {})
    if not isinstance(rates, dict):
        raise InputError(field=f"{path}: rates", value=rates, allowed="a table")
    for key in rates:
        if key not in PRECISIONS or key in plain:
            raise _unknown(f"{path}: rates", key, PRECISIONS)
    plain.setdefault("name", path.stem)
    return from_plain(plain | rates, str(path))


TEXTS = ("name", "vendor", "kind", "source", "note", "link_kind")
SIZES = ("memory", "reported", "process", "bandwidth", "link")


def from_plain(given: Mapping[str, Any], where: str) -> Machine:
    """Returns the machine described by plain values; raises InputError naming `where` and the invalid key."""
    for key, value in given.items():
        if key not in (*TEXTS, *SIZES, *PRECISIONS):
            raise _unknown(where, key, (*SIZES, *PRECISIONS, *TEXTS))
        if key in TEXTS and (not isinstance(value, str) or len(value) > 1000):
            raise InputError(field=f"{where}: {key}", value=value, allowed="a string of at most 1,000 characters")
    for key in ("memory", "bandwidth"):
        if key not in given:
            raise InputError("missing", field=f"{where}: {key}", fix="state both, as in memory=80GB,bandwidth=2TB/s")
    kind = given.get("kind", "accelerator")
    if kind not in ("accelerator", "cpu"):
        raise InputError(field=f"{where}: kind", value=kind, allowed="accelerator or cpu")
    link = given.get("link")
    reported, process = given.get("reported"), given.get("process")
    return Machine(
        name=given.get("name", "custom"),
        vendor=given.get("vendor", ""),
        kind=kind,
        memory_gb=parse_bytes(given["memory"], f"{where}: memory") / GB,
        reported_gib=None if reported is None else parse_bytes(reported, f"{where}: reported") / GIB,
        process_gib=None if process is None else parse_bytes(process, f"{where}: process") / GIB,
        process_source="" if process is None else f"given in {where}",
        bandwidth=parse_bytes(given["bandwidth"], f"{where}: bandwidth", per_second=True),
        rates={key: parse_rate(given[key], f"{where}: {key}") for key in PRECISIONS if key in given},
        link=None
        if link is None
        else Link(kind=given.get("link_kind", "link"), bandwidth=parse_bytes(link, f"{where}: link", per_second=True)),
        source=given.get("source", f"given in {where}"),
        note=given.get("note", ""),
    )


def _unknown(where: str, key: object, known: tuple[str, ...]) -> InputError:
    hint = near(str(key)[:80], known)
    return InputError("unknown key", field=where, value=key, allowed=one_of(known), fix=hint)
