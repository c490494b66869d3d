"""Sizes, rates, counts and times as people write them: 80GB, 79.65GiB, 2TB/s, 400Gb/s, 312T, 128k, 20ms."""

from __future__ import annotations

import re

from asbuilt.errors import InputError

DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?|\.[0-9]+)\s*"
BYTES = re.compile(NUMBER + r"([kmgtp]i?)?(bytes?|bits?|b)?\s*(ps|/s|/sec|/second)?\s*", re.IGNORECASE)
RATE = re.compile(NUMBER + r"([kmgtp])?(?:flops?|ops?)?\s*(?:/s)?\s*", re.IGNORECASE)
# Beyond any machine that exists: 10^21 bytes, bytes/s or FLOP/s.
LARGEST = 1e21
# A bare number below this was probably meant in another unit than bytes.
LEAST_BARE = 1e6


def parse_bytes(text: str | int | float, field: str, *, per_second: bool = False) -> float:
    """Returns 80e9 for "80GB" and 80*2^30 for "80GiB"; a bare number, which must be a million or more, is in bytes.

    A rate may be in bits: B is a byte and b a bit, so "400Gb/s", "400Gbit/s" and "400Gbps" are 50e9 bytes/s. Raises
    InputError naming `field` for anything but a positive size, for a rate in place of a size, and if bits cannot be
    distinguished from bytes.
    """
    if isinstance(text, str):
        found = BYTES.fullmatch(text)
        if found and (found[4] is None or per_second) and (found[2] or "").lower() in DECIMAL | BINARY:
            return _bounded(_as_bytes(found, field, per_second=per_second), field, text)
    elif not isinstance(text, bool):
        if isinstance(text, int | float) and 0 < text < LEAST_BARE:
            raise InputError("has no unit", field=field, value=text, allowed=_like(per_second=per_second))
        return _bounded(text, field, text)
    raise InputError(field=field, value=text, allowed=_like(per_second=per_second))


def parse_size(text: str, field: str) -> float:
    """Returns what `parse_bytes` does, and 0 for a size of nothing."""
    return 0.0 if text.strip() in ("0", "0GB", "0GiB") else parse_bytes(text, field)


def _as_bytes(found: re.Match[str], field: str, *, per_second: bool) -> float:
    number, prefix, unit, per = float(found[1]), found[2] or "", found[3] or "", found[4] or ""
    if not unit and not prefix and number < LEAST_BARE:
        raise InputError("has no unit", field=field, value=found[0], allowed=_like(per_second=per_second))
    bits = _rate_in_bits(prefix, unit, per) if per_second else _size_in_bits(prefix, unit)
    if bits is None:
        problem = "does not say whether bits or bytes" if per_second else "a size is in bytes, and b is a bit"
        raise InputError(problem, field=field, value=found[0], allowed=_like(per_second=per_second))
    return number * (DECIMAL | BINARY)[prefix.lower()] / (8 if bits else 1)


def _rate_in_bits(prefix: str, unit: str, per: str) -> bool | None:
    """Returns whether a rate is in bits, None if that is ambiguous: 400G, 400gb/s and 400GBPS."""
    if not unit:
        return None if prefix else False
    if len(unit) > 1:
        return unit.lower().startswith("bit")
    if unit == "B":
        return None if per == "PS" else False
    return True if per == "ps" or prefix[:1].isupper() else None


def _size_in_bits(prefix: str, unit: str) -> bool | None:
    """Returns False for a size in bytes, None for one that may be in bits: 80Gb and 80Gbit, but not 80gb."""
    bytes_meant = unit in ("", "B") or unit.lower().startswith("by") or (unit == "b" and prefix.islower())
    return False if bytes_meant else None


def _like(*, per_second: bool) -> str:
    if per_second:
        return "a rate such as 2TB/s or 900GB/s in bytes, or 400Gb/s in bits"
    return "a size such as 80GB (10^9 bytes) or 80GiB (2^30)"


def parse_rate(text: str | int | float, field: str) -> float:
    """Returns 312e12 for "312T" or "312TFLOP/s"; a bare number is in FLOP/s.

    Raises InputError naming `field` for anything but a positive rate.
    """
    if isinstance(text, str):
        if found := RATE.fullmatch(text):
            return _bounded(float(found[1]) * DECIMAL[(found[2] or "").lower()], field, text)
    elif not isinstance(text, bool):
        return _bounded(text, field, text)
    raise InputError(field=field, value=text, allowed="a rate such as 312T or 989TFLOP/s")


COUNT = re.compile(NUMBER + r"([kmgbtp])?\s*", re.IGNORECASE)


def parse_count(text: str | int | float, field: str) -> float:
    """Returns 15e12 for "15T" and 7e9 for "7B"; raises InputError naming `field` unless the number is above 0."""
    if isinstance(text, str):
        if found := COUNT.fullmatch(text):
            return _bounded(float(found[1]) * (DECIMAL | {"b": 10**9})[(found[2] or "").lower()], field, text)
    elif not isinstance(text, bool):
        return _bounded(text, field, text)
    raise InputError(field=field, value=text, allowed="a number such as 15T, 70B or 7.5e9")


TOKENS = re.compile(r"\s*([0-9]{1,12})(?:\.([0-9]{1,6}))?\s*(?:[eE]\+?([0-9])|(k|K|Ki|ki|m|M|Mi|mi))?\s*")
THOUSANDS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


def parse_tokens(text: str | int, field: str) -> int:
    """Returns 128,000 for "128k", 131,072 for "128K" or "128Ki", as serving engines do, and 1,000 for "1e3".

    Raises InputError naming `field` for anything but a whole number of tokens, 1 or more.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    if isinstance(text, str) and (found := TOKENS.fullmatch(text.replace(",", ""))):
        unit = found[4] or ""
        factor = THOUSANDS[unit[:1].upper() if unit.endswith("i") else unit] * 10 ** int(found[3] or 0)
        scaled, rest = divmod(int(found[1] + (found[2] or "")) * factor, 10 ** len(found[2] or ""))
        if scaled and not rest:
            return scaled
    allowed = "a whole number of tokens such as 8192, 128k (128,000) or 128K (131,072)"
    raise InputError(field=field, value=text, allowed=allowed)


TIME = re.compile(NUMBER + r"(s|sec|seconds?|ms|us|µs|μs)?\s*", re.IGNORECASE)
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}


def parse_time(text: str, field: str) -> float:
    """Returns 0.02 for "20ms"; raises InputError for a number without a unit, and for anything but a time above 0."""

    found = TIME.fullmatch(text)
    if found and found[2]:
        unit = found[2].lower()
        return _bounded(float(found[1]) * SECONDS["s" if unit.startswith("se") else unit], field, text)
    problem, number = ("has no unit", found[1]) if found else ("", "20")
    raise InputError(problem, field=field, value=text, allowed=f"a time such as {number}ms or 0.02s")


PER_TIME = re.compile(NUMBER + r"(?:/\s*(s|sec|second|min|minute|h|hour|day))?\s*", re.IGNORECASE)
SECONDS_IN = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_per_time(text: str, field: str) -> float:
    """Returns 5.0 for "5/s" and 2.0 for "120/min"; raises InputError for a number without a unit."""
    found = PER_TIME.fullmatch(text)
    if found and found[2]:
        return _bounded(float(found[1]) / SECONDS_IN[found[2][0].lower()], field, text)
    problem, number = ("has no unit", found[1]) if found else ("", "5")
    raise InputError(problem, field=field, value=text, allowed=f"a number in a time such as {number}/s or {number}/min")


LARGEST_PRICE = 1e6
PRICE = re.compile(r"\s*([$€£¥]|[A-Z]{3})?" + NUMBER + r"([$€£¥]|[A-Z]{3})?\s*(?:/\s*(?:h|hour))?\s*")


def parse_price(text: str, field: str) -> tuple[float, str]:
    """Returns the price of an hour and its currency: (2.5, "$") for "$2.50/h"; raises InputError for anything else."""
    found = PRICE.fullmatch(text)
    if found is None or (found[1] and found[3]):
        raise InputError(
            field=field, value=text, allowed="the price of one device for an hour, such as 2.50 or $2.50/h"
        )
    return _bounded(float(found[2]), field, text), found[1] or found[3] or ""


def _bounded(value: float, field: str, said: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= LARGEST:  # compared, not converted: a whole number may be too large for a float
        raise InputError(field=field, value=said, allowed="above 0 and at most 10^21")
    return float(value)
