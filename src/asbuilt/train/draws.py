"""Random numbers of a run that depend on what they are for, and on nothing drawn before."""

from __future__ import annotations

import hashlib

from torch import Generator


def draw(*of: object) -> int:
    """Returns 63 bits that depend on all of these."""
    digest = hashlib.sha256(" ".join(map(str, of)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def drawing(*of: object) -> Generator:
    """Returns a generator that depends on all of these, such as a seed and a step, and is the same everywhere."""
    return Generator().manual_seed(draw(*of))
