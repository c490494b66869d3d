"""How a fuzzer is run by hand: `--count` cases from a printed `--seed`."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable


def run(fuzz: Callable[[int, int], Counter[str]], said: str | None) -> None:
    """Runs as many cases as asked for; exits with 1, saying which it was, at the first that broke the rule."""
    arguments = argparse.ArgumentParser(description=said)
    arguments.add_argument("--count", type=int, default=20_000)
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = arguments.parse_args()
    try:
        print(f"seed {given.seed}: {dict(fuzz(given.count, given.seed))}")
    except AssertionError as error:
        sys.exit(str(error))
