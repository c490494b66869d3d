"""Experts in one stack for gate and up, as transformers has them in memory and newer published files hold them."""

from __future__ import annotations

from pathlib import Path

import torch
from cases.qwen3_5_moe_text import CASE
from harness import asbuilt_loads, compare, transformers_loads, transformers_saves
from safetensors.torch import load_file, save_file
from torch import Tensor


def stacked(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of experts that are apart as two stacks for each layer."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    others = {name: x for name, x in saved.items() if ".mlp.experts." not in name}
    for name in sorted(saved.keys() - others.keys(), key=lambda name: int(name.split(".experts.")[1].split(".")[0])):
        layer, _, end = name.partition(".experts.")
        found.setdefault(layer, {}).setdefault(end.split(".")[1], []).append(saved[name])
    for layer, own in found.items():
        gate, up, down = (torch.stack(own[f"{part}_proj"]) for part in ("gate", "up", "down"))
        others |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    return others


def test_experts_in_stacks(tmp_path: Path) -> None:
    rng = CASE.random("untied", "stacks")
    transformers_saves(CASE.config("untied"), rng.randrange(2**32), tmp_path, CASE.kind)
    (file,) = tmp_path.glob("*.safetensors")
    save_file(stacked(load_file(file)), file, {"format": "pt"})
    mine, theirs = asbuilt_loads(tmp_path), transformers_loads(tmp_path, kind=CASE.kind)
    inputs = CASE.kind.inputs(rng, mine.spec)
    assert compare(CASE.kind.ours(mine, inputs), CASE.kind.theirs(theirs, inputs)).first is None
