"""What torch.compile needs: a C++ compiler on a CPU, and steps whose numbers stay in tensors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asbuilt.errors import InputError

COMPILERS = ("g++", "clang++", "c++")

_recording = False


@contextmanager
def recording() -> Iterator[None]:
    """Has kernels read no number of a tensor meanwhile, which a record of what they do could not."""
    global _recording
    before, _recording = _recording, True
    try:
        yield
    finally:
        _recording = before


def records() -> bool:
    """Returns whether what kernels do is recorded."""
    return _recording or torch.compiler.is_compiling()


def require_compiler(device: str, field: str) -> None:
    """Raises InputError if there is no C++ compiler, which kernels for a CPU are written for."""
    named = os.environ.get("CXX", "")
    if device == "cpu" and not any(shutil.which(one) for one in (named, *COMPILERS) if one):
        fix = "install one (apt install g++), name it in CXX, or leave this setting out"
        raise InputError("there is no C++ compiler", field=field, value=True, allowed="false", fix=fix)
