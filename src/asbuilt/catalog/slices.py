"""Multi-instance GPU (MIG): the slices of an NVIDIA card, each with its own share of memory, bandwidth and rates.

A profile such as 3g.40gb names the slices of compute and the gigabytes. NVIDIA's guide gives each as fractions: of the
memory (and with it of the bandwidth) in eighths, of the multiprocessors in sevenths.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError, one_of

SOURCE = "NVIDIA Multi-Instance GPU User Guide, supported MIG profiles"
# Slices of compute and eighths of memory: the profiles of all these cards, whose names differ in their gigabytes.
PROFILES = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8))
# The gigabytes in the names, by eighths of memory.
_OF_80 = {1: 10, 2: 20, 4: 40, 8: 80}
CARDS: dict[str, dict[int, int]] = {
    "a100-40gb": {1: 5, 2: 10, 4: 20, 8: 40},
    "a100-80gb": _OF_80,
    "a100-80gb-pcie": _OF_80,
    "h100-sxm": _OF_80,
    "h100-pcie": _OF_80,
    "h200": {1: 18, 2: 35, 4: 71, 8: 141},
    "b200": {1: 23, 2: 45, 4: 90, 8: 180},
}
# What a name without a form factor means, the larger card first.
SHORT = {"a100": ("a100-80gb", "a100-40gb"), "h100": ("h100-sxm",)}
NAMED = re.compile(r"(.+?)(?:-mig)?-([1-7]g\.[0-9]{1,3}gb)")


def profiles(card: str) -> list[str]:
    """Returns the names of a card's profiles, the smallest first; none for a card that is not divided."""
    sizes = CARDS.get(card, {})
    return [f"{compute}g.{sizes[eighths]}gb" for compute, eighths in PROFILES if sizes]


def split_name(name: str) -> tuple[str, str] | None:
    """Returns card and profile of `h100-sxm-3g.40gb` or `h100-80gb-hbm3-mig-3g.40gb`, None for another name."""
    found = NAMED.fullmatch(name)
    if found is None:
        return None
    card, profile = found.groups()
    known = SHORT.get(card, (card,))
    return next((one for one in known if profile in profiles(one)), known[0]), profile


def sliced(card: Machine, profile: str) -> Machine:
    """Returns a slice of a card; raises InputError unless the card has this profile."""
    known = profiles(card.name)
    if profile not in known:
        allowed = f"one of {one_of(known)}" if known else f"a slice of {one_of(CARDS)}"
        raise InputError(f"{card.name} has no such MIG profile", field="gpu", value=profile, allowed=allowed)
    compute, eighths = PROFILES[known.index(profile)]
    memory, rate = Fraction(eighths, 8), Fraction(compute, 7)
    return replace(
        card,
        name=f"{card.name}-{profile}",
        memory_gb=CARDS[card.name][eighths],
        reported_gib=None if card.reported_gib is None else float(memory * Fraction(card.reported_gib)),
        process_gib=None if card.process_gib is None else float(memory * Fraction(card.process_gib)),
        process_source=f"{memory} of the card's: {card.process_source}",
        bandwidth=float(memory * Fraction(card.bandwidth)),
        rates={precision: float(rate * Fraction(each)) for precision, each in card.rates.items()},
        link=None,
        slice_of=card.name,
        source=f"{card.source}; {SOURCE}",
        note=f"{memory} of the card's memory and bandwidth, {rate} of its rates; slices have no links; a driver may "
        "report up to 0.3 GiB less, and slices may have a few multiprocessors more or less than their share",
    )


def require_undivided(machine: Machine, devices: int, field: str) -> None:
    """Raises InputError where `devices` slices would hold one model."""
    if machine.slice_of and devices > 1:
        fix = f"divide it over whole cards, --gpu {machine.slice_of}, or choose a larger slice"
        raise InputError(f"{machine.name} is a MIG slice, which has no links", field=field, value=devices, fix=fix)
