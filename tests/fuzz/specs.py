"""Mutated specs: each JSON text is either described or refused with one message, quickly, and never anything else.

`python tests/fuzz/specs.py --count 20000 --seed 1` takes unlike models of the catalogue as spec JSON, and removes,
nulls, negates, swells, retypes, renames or exchanges what it finds in them. Prints what happened, and exits with 1 at
the first case that escaped or took more CPU time than a stranger may.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import configs
from running import run

from asbuilt.catalog import find
from asbuilt.checkpoint.source import Source
from asbuilt.description import bill
from asbuilt.errors import InputError
from asbuilt.families import Reading, families_that_write
from asbuilt.spec import Model, loads, to_dict

NAMES = ("gemma-2-2b", "deepseek-v2", "t5-small", "llama-4-scout", "gpt-oss-20b", "bert-base-uncased")
REPEATS = (0, 2, 127, 10**5, 10**9, -1, True, 1.5)


def described(text: str) -> bool:
    """Returns whether a spec's text is described, having made the whole document; False where it is refused."""
    try:
        spec = loads(text)
        if not isinstance(spec, Model):
            return False
        reading = Reading(spec=spec, carried={}, dtype=None, family=next(iter(families_that_write(spec)), ""))
        source = Source(kind="spec", name=spec.name, reading=reading)
        length = min(64, spec.max_positions)
        document = bill.describe(source, seq=length, batch=1, dtype="bf16", kv_dtype="bf16")
    except InputError as error:
        str(error).encode()
        return False
    json.dumps(document, allow_nan=False)
    return True


def exchange(at: Any, key: Any, draw: random.Random) -> None:  # noqa: ANN401
    """Puts what stands at one place of a spec where another stands."""
    found = configs.places(at)
    at[key] = deepcopy(configs.holder(at, path := draw.choice(found))[path[-1]]) if found else None


def repeat(at: Any, key: Any, draw: random.Random) -> None:  # noqa: ANN401
    at[key] = {"repeat": draw.choice(REPEATS), "item": at[key]}


MUTATIONS: tuple[Callable[[Any, Any, random.Random], None], ...] = (*configs.MUTATIONS, exchange, repeat)


def mutate(spec: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Returns a spec with one to three changes."""
    changed = deepcopy(spec)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = configs.places(changed)
        if found:
            path = draw.choice(found)
            draw.choice(MUTATIONS)(configs.holder(changed, path), path[-1], draw)
    return changed


def fuzz(count: int, seed: int) -> Counter[str]:
    """Runs `count` cases; raises AssertionError naming the case that broke the rule."""
    draw, outcomes = random.Random(seed), Counter[str]()
    specs = {name: to_dict(find(name).spec()) for name in NAMES}
    for number in range(count):
        name = draw.choice(NAMES)
        text = json.dumps(mutate(specs[name], draw))
        case = f"case {number} of seed {seed}, {name}: {text[:3000]}"
        start = time.process_time()
        try:
            whole = described(text)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} escaped from {case}") from error
        spent = time.process_time() - start
        assert spent < configs.SLOWEST, f"{spent:.1f} s for {case}"
        outcomes["described" if whole else "refused"] += 1
    return outcomes


if __name__ == "__main__":
    run(fuzz, __doc__)
