"""Files that a person names: regular ones only, and never more of them than was asked for.

A pipe has no end, and a device may have none either or may do something when it is opened: both are refused unopened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from asbuilt.errors import InputError

# Absent on Windows. A pipe put in the file's place between the look and the opening does not keep us waiting either.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def require_regular(path: Path, field: str = "") -> os.stat_result:
    """Returns the file's status; raises InputError naming `field`, or the path, for what is no regular file."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _unreadable(path, field, error) from error
    _require(status, path, field)
    return status


def read_regular(path: Path, limit: int, field: str = "") -> bytes:
    """Returns what a regular file of at most `limit` bytes holds.

    Raises InputError naming `field`, or the path, for a larger file, one that cannot be read, and what is no file.
    """
    require_regular(path, field)
    try:
        with os.fdopen(os.open(path, FLAGS), "rb") as file:
            _require(os.fstat(file.fileno()), path, field)
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise _unreadable(path, field, error) from error
    if len(data) > limit:
        raise InputError("too large", field=field or str(path), value=str(path) if field else None,
                         allowed=f"at most {limit:,} bytes")  # fmt: skip
    return data


def _require(status: os.stat_result, path: Path, field: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise InputError(f"{kind}, not a file", field=field or str(path), value=str(path) if field else None,
                         allowed="a regular file")  # fmt: skip


def _unreadable(path: Path, field: str, error: OSError | ValueError) -> InputError:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(f"cannot be read: {said}", field=field or str(path), value=str(path) if field else None)
