"""Mutated configs: each is either described or refused with one message, quickly, and never anything else.

`python tests/fuzz/configs.py --count 20000 --seed 1` takes every published config of ../shared/models and
../shared/frontier whose family is known, and of each family with no config there the default config of transformers'
class, and removes, nulls, negates, swells, retypes or renames what it finds in it. Every family is drawn as often as
any other. Prints what happened, and exits with 1 at the first case that escaped, took more CPU time than a stranger
may, or changed a total where only an irrelevant key was touched.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from running import run
from transformers import CONFIG_MAPPING

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import FAMILIES, read_config
from asbuilt.families.shared.common import IRRELEVANT
from asbuilt.spec import Pass

MODELS, FRONTIER = (Path(__file__).parents[3] / "shared" / name for name in ("models", "frontier"))
# Seconds that a stranger may cost us. Of 1,024 blocks half a second on a quiet machine, three times that on a busy one.
SLOWEST = 5.0
HUGE = (1024, 10_000, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, 1e308, math.inf, -math.inf, math.nan, 5e-324)
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
STRANGE: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    3,
    0.5,
    -2.5,
    True,
    False,
    "",
    "seven",
    [],
    [1],
    [None] * 3,
    [0.0, math.inf],
    "\ud800",
    DEEP,
    {},
    {"a": 1},
    *HUGE,
)


# Sizes that no default is enough for.
DECAYS: dict[str, Any] = dict.fromkeys(
    ("decay_low_rank_dim", "a_low_rank_dim", "gate_low_rank_dim", "v_low_rank_dim"), 32
)
NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "qwen2_vl": {"vision_config": {"model_type": "qwen2_vl", "hidden_size": 8192}},
    "rwkv7": DECAYS,
}


def published() -> dict[str, dict[str, Any]]:
    """Returns the configs of known families by name."""
    configs = {path.stem: json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))}
    configs |= {path.parent.name: json.loads(path.read_text()) for path in sorted(FRONTIER.glob("*/config.json"))}
    named = {n: c for n, c in configs.items() if isinstance(c, dict) and c.get("model_type") in FAMILIES}
    return {name: config for name, config in named.items() if described(config, name) is not None}


def drawn_from() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the configs by family and name: those published, and the defaults of families with none."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, config in published().items():
        found.setdefault(config["model_type"], {})[name] = config
    for family in FAMILIES:
        if family not in found:
            found[family] = {family: default_of(family)}
            assert described(found[family][family], family) is not None, f"the defaults of {family} are refused"
    return found


def default_of(family: str) -> dict[str, Any]:
    """Returns the config of a family by the defaults of transformers' class, or ours where it has none."""
    config = {"model_type": family}
    if family in CONFIG_MAPPING:
        config = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    return config | NEEDED.get(family, {})


def described(config: dict[str, Any], name: str) -> int | None:
    """Returns the parameters of a config, having computed all that `describe` prints; None where it is refused."""
    try:
        spec = read_config(config, name).spec
    except InputError:
        return None
    run = Pass(tokens=min(1024, spec.max_positions))
    cost.flops(spec, run)
    cost.cache(spec, run.tokens, "bf16")
    cost.rows(spec, run, "bf16")
    cost.saved(spec, run)
    cost.moved(spec, Pass(tokens=1, past=run.tokens - 1), "q4_k", "bf16")
    return cost.total_parameters(spec)


def places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401
    """Returns the path of every value in a config."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    return [p for key, value in items for p in [(*path, key), *places(value, (*path, key))]]


def holder(config: Any, path: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Returns the dict or list that holds the value at `path`."""
    for key in path[:-1]:
        config = config[key]
    return config


def remove(at: Any, key: Any, draw: random.Random) -> None:  # noqa: ANN401
    del at[key]


def replace(at: Any, key: Any, draw: random.Random) -> None:  # noqa: ANN401
    at[key] = deepcopy(draw.choice(STRANGE))


def nudge(at: Any, key: Any, draw: random.Random) -> None:  # noqa: ANN401
    value = at[key]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max:
        at[key] = draw.choice((-value, value + 1, value - 1, value * 2, value / 2, float(value), str(value), [value]))
    elif isinstance(value, list):
        at[key] = draw.choice((value[:-1], value * 2, value[::-1], {"0": value}))
    else:
        replace(at, key, draw)


def rename(at: Any, key: Any, draw: random.Random) -> None:  # noqa: ANN401
    if isinstance(at, dict):
        at[draw.choice((f"{key}s", f"x_{key}", str(key).upper()))] = at.pop(key)


# What is irrelevant to all other families.
READ: dict[str, set[str]] = {"vit": {"id2label", "num_labels"}}  # a classifier's labels
MUTATIONS: tuple[Callable[[Any, Any, random.Random], None], ...] = (remove, replace, replace, nudge, nudge, rename)


def mutate(config: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Returns a config with one to three changes, and the top-level keys they touched."""
    changed, touched = deepcopy(config), []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = draw.choice(places(changed) or [("model_type",)])
        if path == ("model_type",) or not places(changed):
            continue
        draw.choice(MUTATIONS)(holder(changed, path), path[-1], draw)
        touched.append(str(path[0]))
    return changed, touched


def fuzz(count: int, seed: int) -> Counter[str]:
    """Runs `count` cases; raises AssertionError naming the case that broke the rule."""
    draw, outcomes, families = random.Random(seed), Counter[str](), drawn_from()
    configs = {name: config for own in families.values() for name, config in own.items()}
    irrelevant_keys = {key for keys in IRRELEVANT.values() for key in keys}
    for number in range(count):
        name = draw.choice(list(families[draw.choice(list(families))]))
        changed, touched = mutate(configs[name], draw)
        case = f"case {number} of seed {seed}, {name}: {json.dumps(changed)[:2000]}"
        start = time.process_time()  # what it took, not what else the machine was doing
        try:
            total = described(changed, name)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} escaped from {case}") from error
        spent = time.process_time() - start
        assert spent < SLOWEST, f"{spent:.1f} s for {case}"
        irrelevant = bool(touched) and set(touched) <= irrelevant_keys - READ.get(configs[name]["model_type"], set())
        assert not irrelevant or total in (None, described(configs[name], name)), f"{total} of {case}"
        outcomes["refused" if total is None else "described"] += 1
    return outcomes


if __name__ == "__main__":
    run(fuzz, __doc__)
