"""Packed weights are planned from the names of a few experts, unless a list names some experts and not others."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from asbuilt.catalog import find
from asbuilt.families.shared.patterns import matched, tells_experts_apart
from asbuilt.packing import modules, with_fewest_experts
from asbuilt.plan import quantised as planned
from asbuilt.spec import MixtureOfExperts, Model, stored_weights
from asbuilt.spec.part import walk_stored

EXPERTS = [0, 3, 7, 10, 33, 71, 100, 255]
ENDS = ("up_proj", "w1", "experts.gate")
STEMS = tuple(f"model.layers.{layer}.mlp" for layer in (0, 1, 10, 31))
PIECES = ("model", "layers", "mlp", "experts", "up_proj", "w1", "7", "10", "0", "1", "*", "*", "gate")
EXPRESSIONS = ("model", r"\.", r".*", ".", "layers", "mlp", "experts", "up_proj", r"\d+", "7", "$", "1", "w", "_")
FIXED = (
    ("model.layers.0*", "*.ffn.shared_experts.*", "lm_head", "re:.*self_attn.*", r"re:.*mlp\.experts.*up_proj$"),
    ("model.layers.0.mlp.experts.7", "*experts.7*", "10", r"re:.*experts\.7.*", r"re:.*experts\...up_proj"),
)


def drawn(rng: random.Random) -> str:
    """A pattern of some pieces of names: by name, with stars, or an expression."""
    if rng.random() < 0.4:
        return "re:" + "".join(rng.choices(EXPRESSIONS, k=rng.randint(1, 7)))
    return ".".join(rng.choices(PIECES, k=rng.randint(1, 6))) + rng.choice(("", "*"))


def tells(pattern: str) -> bool:
    """Whether the pattern matches some experts of a stack and not others, each of them being matched."""
    stacks = [[f"{stem}.experts.{e}.{end}" for e in EXPERTS] for stem in STEMS for end in ENDS]
    found = matched([pattern], [name for names in stacks for name in names], "ignore")
    return any(0 < len(found.intersection(names)) < len(names) for names in stacks)


def test_what_may_name_one_expert_alone() -> None:
    rng = random.Random(20)
    patterns = [drawn(rng) for _ in range(4000)]
    seen = [pattern for pattern in patterns if tells(pattern)]
    assert len(seen) > 20
    assert [pattern for pattern in seen if not tells_experts_apart(pattern)] == []
    alike, apart = FIXED  # not all are taken for such
    assert [tells_experts_apart(pattern) for pattern in (*alike, *apart)] == [False] * len(alike) + [True] * len(apart)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4-flash", "minimax-m2.7", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_others_names_are_the_models(name: str) -> None:
    row = find(name)
    spec = row.spec()
    few = with_fewest_experts(spec)
    every, some = modules(row.family, spec), modules(row.family, few)
    assert some.keys() == every.keys()
    assert all(every[path][: len(names)] == names for path, names in some.items())
    assert sum(map(len, some.values())) <= sum(map(len, every.values()))
    counts = [part.n_experts for _, part in walk_stored(few) if isinstance(part, MixtureOfExperts)]
    assert max(counts) < max(part.n_experts for _, part in walk_stored(spec) if isinstance(part, MixtureOfExperts))


FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}


@pytest.mark.parametrize(
    "left_out",
    [["lm_head", "model.layers.1*"], ["model.layers.3.mlp.experts"], ["model.layers.3.mlp.experts.5.up_proj"]],
)
def test_bytes_are_those_of_all_names(left_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = find("deepseek-moe-16b")
    spec = row.spec()

    def held(said: dict[str, Any]) -> list[Any]:
        copy = replace(spec)  # nothing is kept of another plan
        precision = planned.quantised(copy, said, "bf16", row.family)
        small = planned.known(copy).census.small
        return [precision.held(path, weight, owner) for path, weight, owner in stored_weights(small) if owner.holds()]

    few = held(FP8 | {"exclude_modules": left_out})
    monkeypatch.setattr(planned, "with_fewest_experts", whole)
    assert few == held(FP8 | {"exclude_modules": left_out})
    assert few != held(FP8)


def whole(spec: Model) -> Model:
    """Every expert."""
    return spec
