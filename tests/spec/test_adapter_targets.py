"""Targets of adapters: names of maps and patterns of their paths, the same for the model and for its plan."""

from __future__ import annotations

import pytest

from asbuilt import InputError, decoder
from asbuilt.catalog import machines
from asbuilt.plan.train import train
from asbuilt.spec import Lora, adapted, weights
from asbuilt.spec.linear import maps_by_path

SPEC = decoder(d_model=32, n_layers=12, n_heads=4, n_vocab=50, max_positions=64)
NAMES = {path.removesuffix(".weight") for path in maps_by_path(SPEC)}

CASES = {
    ("q", "down"): {path for path in NAMES if path.endswith((".q", ".down"))},
    ("blocks.3.*",): {path for path in NAMES if path.startswith("blocks.3.")},
    ("blocks.1[01].*", "blocks.0.*.v"): {p for p in NAMES if p.startswith(("blocks.10.", "blocks.11."))}
    | {p for p in NAMES if p.startswith("blocks.0.") and p.endswith(".v")},
    ("blocks.?.ffn.*",): {p for p in NAMES if p.split(".")[1] in "0123456789" and p.split(".")[2] == "ffn"},
}


@pytest.mark.parametrize("targets", CASES)
def test_patterns_choose_maps_by_path(targets: tuple[str, ...]) -> None:
    made = adapted(SPEC, 3, 6.0, targets)
    found = {path.removesuffix(".weight") for path, one in maps_by_path(made).items() if isinstance(one, Lora)}
    assert found == CASES[targets]
    assert found
    size = sum(weight.size for path, weight, _ in weights(made) if "lora_" in path)
    plan = train(SPEC, machines.find("h100-sxm"), seq=16, dtype="fp32", lora=3, targets=targets)
    assert plan.state.gradients == 4 * size


@pytest.mark.parametrize("target", ["blocks.12.*", "Q", "*.router", "embedding*", "q*x"])
def test_what_matches_nothing_is_refused(target: str) -> None:
    with pytest.raises(InputError, match="no linear map of a block") as refused:
        adapted(SPEC, 3, 6.0, (target,))
    assert refused.value.field == "targets"
