"""Which modules are left out, as transformers, compressed-tensors and modelopt say; files and plans agree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from asbuilt import cost
from asbuilt.catalog import find
from asbuilt.packing import LEFT_OUT, block_scales, left_out, modules
from asbuilt.plan.devices import device
from asbuilt.plan.placement import Placement
from asbuilt.plan.quantised import quantised
from asbuilt.spec import weights

SHARED = Path(__file__).parents[3] / "shared"


def published() -> Iterator[tuple[str, str, str, list[str]]]:
    """The lists of modules of every config that was published with one, by file, way of packing and key."""
    for path in sorted((*SHARED.glob("frontier/*/*config.json"), *SHARED.glob("engine-logs/configs/*.json"))):
        said = json.loads(path.read_text())
        said = said.get("quantization_config") or said.get("quantization") or {} if isinstance(said, dict) else {}
        method = "modelopt" if "quant_algo" in said else said.get("quant_method", "")
        for key in LEFT_OUT:
            if said.get(key):
                yield f"{path.parent.name}/{path.name}", method, key, said[key]


LISTS = list(published())


def by_transformers(names: list[str], said: list[str]) -> set[str]:
    """`modules_to_not_convert`: transformers' own function."""
    return {name for name in names if not should_convert_module(name, said)}


def by_compressed_tensors(names: list[str], said: list[str]) -> set[str]:
    """`ignore`: a linear map's whole name, or `re:` and what `re.match` finds (compressed_tensors.utils.match)."""
    expressions = [pattern.removeprefix("re:") for pattern in said if pattern.startswith("re:")]
    return {name for name in names if name in said or any(re.match(e, name) for e in expressions)}


def by_modelopt(names: list[str], said: list[str]) -> set[str]:
    """`exclude_modules`: fnmatch of a module's name, or of one that it lies in."""
    return {name for name in names if any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in said)}


RULES: dict[str, Callable[[list[str], list[str]], set[str]]] = {
    "compressed-tensors": by_compressed_tensors,
    "modelopt": by_modelopt,
}
LAYER = re.compile(r"(.*layers\.\d+)\.")
# Maps beside those that are named, which share a beginning or an end with them.
BESIDE = ("gate_proj", "up_proj", "q_proj", "kv_b_proj", "experts.1.down_proj", "lm_heads", "shared_expert.up_proj")


def named(said: list[str]) -> list[str]:
    """The linear maps that a list names one by one, and others in its layers and in those of one digit more."""
    plain = [name for name in said if not set(name) & set("*\\$^|:")]
    layers = sorted({found[1] for name in said if (found := LAYER.match(name))})[:20] or ["model.layers.3"]
    beside = [f"{layer}{digit}.mlp.{name}" for layer in layers for digit in ("", "0") for name in BESIDE]
    return list(dict.fromkeys([*plain, *beside]))


@pytest.mark.parametrize(("where", "method", "key", "said"), LISTS, ids=[f"{row[0]} {row[2]}" for row in LISTS])
def test_published_lists_leave_out_what_their_own_library_leaves_out(
    where: str, method: str, key: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(re, "_MAXCACHE", 4096)  # transformers compiles every pattern for every name
    names = named(said)
    assert left_out({key: said}, names) == RULES.get(method, by_transformers)(names, said)


def test_there_are_such_lists() -> None:
    assert {row[2] for row in LISTS} >= {"modules_to_not_convert", "ignore", "exclude_modules"}
    assert {row[1] for row in LISTS} >= {"fp8", "mxfp4", "compressed-tensors", "modelopt"}
    assert len(LISTS) > 20


@pytest.mark.parametrize(
    "said",
    [
        [],
        ["lm_head", "gate"],
        ["model.layers.1"],
        ["gate_proj", "model.layers.*.self_attn"],
        ["re:.*mlp\\.(gate|up)_proj$"],
        ["k_proj", "model.layers.2*"],
        ["roj", "mlp.gate_pro"],  # pieces of a word are no module
    ],
    ids=str,
)
def test_a_plan_counts_the_scales_that_a_file_holds(said: list[str]) -> None:
    """Scales by the family's rule, and what a plan's bytes leave after one for packed and two for plain numbers."""
    spec, family = find("qwen3-30b-a3b").spec(), "qwen3_moe"
    config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": said}
    held = quantised(spec.edit("", blocks=spec.blocks[:3]), config, "bf16", family)
    cut = spec.edit("", blocks=spec.blocks[:3])
    names = modules(family, cut)
    plain = left_out(config, [name for found in names.values() for name in found])
    numbers = 0
    for path, weight, owner in weights(cut):
        packed = owner.kind in ("attention", "ffn") and weight.role == "matrix"
        share = sum(name not in plain for name in names[path]) / len(names[path]) if packed else 0
        numbers += round(weight.size * share)
    every = cost.total_parameters(cut)
    total = device(cut, Placement(), held).stages[0].folds.total_bytes
    assert total == numbers + 2 * (every - numbers) + 4 * block_scales(family, cut, config)
