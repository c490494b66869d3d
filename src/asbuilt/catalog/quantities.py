"""Sizes and rates as people write them: 80GB, 79.65GiB, 2TB/s, 312T."""

from __future__ import annotations

import re

from asbuilt.errors import InputError

DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?|\.[0-9]+)\s*"
SIZE = re.compile(NUMBER + r"([kmgtp]i?)?(?:b|bytes)?\s*(/s)?\s*", re.IGNORECASE)
RATE = re.compile(NUMBER + r"([kmgtp])?(?:flops?|ops?)?\s*(?:/s)?\s*", re.IGNORECASE)
# No machine there is, and none that will be, has this much of anything: 10^21 bytes, bytes/s or FLOP/s.
LARGEST = 1e21
# A bare number below this was meant in some other unit than bytes.
LEAST_BARE = 1e6


def parse_bytes(text: str | int | float, field: str, *, per_second: bool = False) -> float:
    """Returns 80e9 for "80GB" and 80*2^30 for "80GiB"; a bare number, of a million or more, is in bytes.

    Raises InputError naming `field` for what is no positive size, and for a rate where a size is meant.
    """
    if isinstance(text, str):
        found = SIZE.fullmatch(text)
        unit = (found[2] or "").lower() if found else ""
        if found and not unit and text.strip()[-1:].isdigit() and float(found[1]) < LEAST_BARE:
            like = "a rate such as 50GB/s" if per_second else "a size such as 3GB or 3GiB"
            raise InputError("has no unit", field=field, value=text, allowed=like)
        if found and (found[3] is None or per_second) and unit in DECIMAL | BINARY:
            return _bounded(float(found[1]) * (DECIMAL | BINARY)[unit], field, text)
    elif not isinstance(text, bool):
        return _bounded(text, field, text)
    allowed = "a rate such as 2TB/s or 900GB/s" if per_second else "a size such as 80GB (10^9) or 80GiB (2^30)"
    raise InputError("not understood", field=field, value=text, allowed=allowed)


def parse_rate(text: str | int | float, field: str) -> float:
    """Returns 312e12 for "312T" or "312TFLOP/s"; a bare number is in FLOP/s.

    Raises InputError naming `field` for what is no positive rate.
    """
    if isinstance(text, str):
        if found := RATE.fullmatch(text):
            return _bounded(float(found[1]) * DECIMAL[(found[2] or "").lower()], field, text)
    elif not isinstance(text, bool):
        return _bounded(text, field, text)
    raise InputError("not understood", field=field, value=text, allowed="a rate such as 312T or 989TFLOP/s")


COUNT = re.compile(NUMBER + r"([kmgbtp])?\s*", re.IGNORECASE)


def parse_count(text: str | int | float, field: str) -> float:
    """Returns 15e12 for "15T" and 7e9 for "7B"; raises InputError naming `field` for what is no number above 0."""
    if isinstance(text, str):
        if found := COUNT.fullmatch(text):
            return _bounded(float(found[1]) * (DECIMAL | {"b": 10**9})[(found[2] or "").lower()], field, text)
    elif not isinstance(text, bool):
        return _bounded(text, field, text)
    raise InputError("not understood", field=field, value=text, allowed="a number such as 15T, 70B or 7.5e9")


TIME = re.compile(NUMBER + r"(s|ms|us|µs)?\s*", re.IGNORECASE)
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def parse_time(text: str, field: str) -> float:
    """Returns 0.02 for "20ms"; a bare number is in seconds. Raises InputError for what is no time above 0."""
    if found := TIME.fullmatch(text):
        return _bounded(float(found[1]) * SECONDS[(found[2] or "").lower()], field, text)
    raise InputError("not understood", field=field, value=text, allowed="a time such as 20ms or 0.5s")


def _bounded(value: float, field: str, said: object) -> float:
    if not isinstance(value, int | float) or not 0 < value <= LARGEST:  # infinity, NaN and 10^5000 are outside too
        raise InputError("out of bounds", field=field, value=said, allowed="above 0 and at most 10^21")
    return float(value)
