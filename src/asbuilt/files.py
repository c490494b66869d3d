"""Reading files that a user names: regular files only, up to a size limit, and JSON within bounds.

A pipe may never end, and opening a device may have side effects: both are refused without being opened. A few bytes of
JSON can expand to very many objects. Every problem is an InputError that names the file.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from asbuilt.errors import InputError, shorten

# Absent on Windows. With it, a pipe that replaces the file between the check and the opening does not block either.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

# The deepest published JSON, a tokenizer's, nests to 10. A float holds numbers of 64 digits; nobody writes longer ones.
MOST_DEPTH, MOST_DIGITS = 64, 64
# Each value takes up to 200 bytes; the largest published config has some thousands of them.
MOST_VALUES = 1 << 19


def require_regular(path: Path, field: str = "") -> os.stat_result:
    """Returns the file's status; raises InputError naming `field`, or the path, unless it is a regular file."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _unreadable(path, field, error) from error
    _require(status, path, field)
    return status


def open_regular(path: Path, field: str = "") -> BinaryIO:
    """Returns a regular file open for binary reading; the caller closes it. Raises as `require_regular` does."""
    require_regular(path, field)
    try:
        file = os.fdopen(os.open(path, FLAGS), "rb")
    except (OSError, ValueError) as error:
        raise _unreadable(path, field, error) from error
    try:
        _require(os.fstat(file.fileno()), path, field)
    except InputError:
        file.close()
        raise
    return file


def read_regular(path: Path, limit: int, field: str = "") -> bytes:
    """Returns the contents of a regular file of at most `limit` bytes.

    Raises InputError naming `field`, or the path, for a larger file, an unreadable one, and anything but a file.
    """
    with open_regular(path, field) as file:
        try:
            data = file.read(limit + 1) or b""  # None: nothing could be read without blocking
        except OSError as error:
            raise _unreadable(path, field, error) from error
    if len(data) > limit:
        raise InputError(
            "too large",
            field=field or str(path),
            value=str(path) if field else None,
            allowed=f"at most {limit:,} bytes",
        )
    return data


def _require(status: os.stat_result, path: Path, field: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise InputError(
            f"is {kind}",
            field=field or str(path),
            value=str(path) if field else None,
            allowed="a regular file",
        )


def _unreadable(path: Path, field: str, error: OSError | ValueError) -> InputError:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(f"cannot be read: {said}", field=field or str(path), value=str(path) if field else None)


def read_text(path: Path, limit: int, field: str = "") -> str:
    """Returns the UTF-8 text of a regular file; raises InputError for invalid UTF-8, and as `read_regular` does."""
    return decoded(read_regular(path, limit, field), field or str(path))


def decoded(data: bytes, field: str) -> str:
    """Returns the text of UTF-8 bytes; raises InputError naming the position of an invalid byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}", field=field) from error


def read_json(
    path: Path,
    limit: int,
    field: str = "",
    *,
    most_values: int = MOST_VALUES,
    finite: bool = True,
    unique: bool = True,
) -> Any:  # noqa: ANN401  any JSON value
    """Returns the JSON value in a regular file of at most `limit` bytes; raises as `parse_json` does."""
    field = field or str(path)
    return parse_json(read_text(path, limit, field), field, most_values=most_values, finite=finite, unique=unique)


def read_object(path: Path, limit: int, field: str = "", **bounds: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns the JSON object in a file; raises InputError for any other value, and as `read_json` does."""
    found = read_json(path, limit, field, **bounds)
    if not isinstance(found, dict):
        raise InputError(field=field or str(path), value=found, allowed="a JSON object")
    return found


def parse_json(
    text: str, field: str, *, most_values: int = MOST_VALUES, finite: bool = True, unique: bool = True
) -> Any:  # noqa: ANN401  any JSON value
    """Returns the value of a JSON text, which messages call `field`.

    Raises InputError for what is not JSON, more than `most_values` values, 64 levels or 64 digits, duplicate keys
    (if they must be `unique`), NaN and infinities (if numbers must be `finite`), and lone surrogates.
    """
    # Each value but the first follows a comma or a bracket, so this is an upper bound.
    values = 1 + text.count(",") + text.count("[") + text.count("{")
    if values > most_values:
        raise InputError("holds too many values", field=field, value=values, allowed=f"at most {most_values}")

    def number(digits: str) -> float:
        if finite and not math.isfinite(float(digits)):
            raise InputError(f"{digits[:40]} is not a finite number", field=field)
        return float(digits)

    def whole(digits: str) -> int:
        if len(digits) > MOST_DIGITS:
            raise InputError("a number is too long", field=field, value=digits, allowed=f"at most {MOST_DIGITS} digits")
        return int(digits)

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if unique and len(made) < len(found):
            twice = Counter(name for name, _ in found).most_common(1)[0][0]
            raise InputError(f"duplicate key: {shorten(twice)}", field=field)
        return made

    try:
        found = json.loads(text, parse_float=number, parse_constant=number, parse_int=whole, object_pairs_hook=pairs)
    except ValueError as error:
        raise InputError(f"not JSON: {error}", field=field) from error
    except RecursionError as error:
        raise InputError("nested too deeply", field=field, allowed=f"at most {MOST_DEPTH} levels") from error
    _require_shallow(found, field)
    if "\\u" in text:
        _require_unicode(found, field)
    return found


def _require_shallow(value: object, field: str) -> None:
    holders = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        inside = (inner for found in holders for inner in (found.values() if isinstance(found, dict) else found))
        holders = [inner for inner in inside if isinstance(inner, dict | list)]
        if not holders:
            return
    raise InputError("nested too deeply", field=field, allowed=f"at most {MOST_DEPTH} levels")


def _require_unicode(value: object, field: str) -> None:
    """Raises InputError for a lone surrogate, which JSON can spell but nothing can print."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError("a string has a lone surrogate", field=field, value=half) from error


def require_writable(path: Path, field: str) -> None:
    """Raises InputError naming `field` for a file that could not be written: without a folder, or no regular one."""
    try:
        if not path.resolve().parent.is_dir():
            raise InputError("no such folder", field=field, value=str(path.parent))
        if path.exists() and not path.is_file():  # renaming a file to /dev/null would replace the device
            kind = "a folder" if path.is_dir() else "a pipe, a socket or a device"
            raise InputError(f"is {kind}", field=field, value=str(path), allowed="a regular file, or a new one")
    except (OSError, ValueError) as error:  # a link to itself, a null byte
        raise InputError(f"cannot be written: {error}", field=field, value=str(path)) from error


def write_whole(path: Path, data: bytes, field: str) -> None:
    """Writes the file completely or not at all, even if the disk is full or a signal arrives.

    Raises InputError naming `field` if it cannot be written.
    """
    require_writable(path, field)
    aside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"cannot be written: {error.strerror}", field=field, value=str(path)) from error
        raise


def json_text(document: object, *, plain: bool = True) -> str:
    """Returns one JSON document; NaN and infinities become null, since JSON cannot spell them. `plain` is in ASCII."""
    try:
        return json.dumps(document, indent=1, ensure_ascii=plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), indent=1, ensure_ascii=plain, allow_nan=False)


def _finite(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def stays_within(path: Path, folder: Path) -> bool:
    """Returns whether a file lies in the model folder, following links.

    The hub's cache links from `snapshots/REVISION` to `blobs` beside it, which counts as within.
    """
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    return any(path.resolve().is_relative_to(root) for root in roots)
