"""`asbuilt diff --transformers` of every family that reads text: the same, and diverging where a weight was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import CASES
from click.testing import CliRunner
from harness import ParityCase, asbuilt_loads, transformers_saves

from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.inspect import Difference, diff_transformers, first_divergence

TOLERANCE = 1e-4
IMAGES = ("vit", "clip", "siglip", "dinov2", "dinov3_vit", "pixtral")  # they read no tokens
FAMILIES = [family for family in CASES if family not in IMAGES]


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    case: ParityCase = CASES[family]
    variant = next(iter(case.configs))
    transformers_saves(case.config(variant), case.random(variant, "diff").randrange(2**32), tmp_path / "a", case.kind)
    return tmp_path / "a"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same_and_parts_where_it_was_changed(family: str, folder: Path) -> None:
    model = asbuilt_loads(folder)
    padding = open_model(folder).reading.carried.get("pad_token_id")  # some count their positions around it
    ids = torch.tensor([[i for i in range(model.spec.n_vocab) if i != padding][:11]])
    found = diff_transformers(model, folder, family, ids)
    places = [d.path for d in found]
    assert first_divergence(found, TOLERANCE) is None, found
    assert places[-1] == ""
    # of relative buckets' numbers, which all layers share, some sides' blocks hold more than ours, or the first norm
    shared = model.spec.relative is not None or family == "rwkv"
    passed = model.spec.crosses  # blocks that read an image do not run here
    own = [
        f"blocks.{i}"
        for i, block in enumerate(model.spec.blocks)
        if block.borrows is None and not (passed and block.crosses)
    ]
    assert shared or {*own} <= set(places)
    inside = {".".join(place.split(".")[:2]) for place in places if place.startswith("blocks.")}
    assert inside == {*own}
    block = f"{own[-1]}."
    # the last matrix of a block, whose result goes into the stream
    last = next(p for n, p in reversed(list(model.named_parameters())) if n.startswith(block) and p.ndim > 1)
    with torch.no_grad():
        last.copy_(last.flip(-1))
    at = first_divergence(diff_transformers(model, folder, family, ids), TOLERANCE)
    assert at is not None
    assert at.path.startswith(block[:-1])


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_command(family: str, folder: Path) -> None:
    same = CliRunner().invoke(cli, ["diff", str(folder), "--transformers", "--json", "--tolerance", str(TOLERANCE)])
    assert (same.exit_code, json.loads(same.stdout)["same"]) == (0, True)
    source, changed = open_model(folder), asbuilt_loads(folder)
    place = f"blocks.{source.spec.n_layers - 1}.ffn.body.down"
    with torch.no_grad():
        changed.get_parameter(f"{place}.weight").add_(0.5)
    other = folder.parent / "b"
    save(changed, other, family=family, carried=source.reading.carried)
    parts = CliRunner().invoke(cli, ["diff", str(other), str(folder), "--transformers", "--json"])
    assert (parts.exit_code, json.loads(parts.stdout)["first"]) == (1, place)
    refused = CliRunner().invoke(cli, ["diff", "gpt2", "--transformers"])
    assert (refused.exit_code, "folder" in refused.stderr) == (2, True)
    refused = CliRunner().invoke(cli, ["diff", str(folder)])
    assert (refused.exit_code, "SECOND" in refused.stderr) == (2, True)


def test_what_later_places_take_back_is_no_difference() -> None:
    def found(*places: tuple[str, float]) -> list[Difference]:
        return [Difference(path=path, relative=relative) for path, relative in places]

    scaled = found(("embedding", 0.9), ("blocks.0.attention.norm", 0.0), ("blocks.0", 0.0), ("", 0.0))
    assert first_divergence(scaled, TOLERANCE) is None
    below = found(
        ("embedding", 0.9),
        ("blocks.0.attention.norm", 0.0),
        ("blocks.0.attention.body.q", 0.1),
        ("blocks.0.attention.body.k", 0.0),
        ("blocks.0", 0.1),
        ("", 0.1),
    )
    at = first_divergence(below, TOLERANCE)
    assert at is not None
    assert at.path == "blocks.0.attention.body.q"
    head = found(("blocks.0.attention.norm", 0.0), ("blocks.0", 0.0), ("head", 0.2), ("", 0.2))
    assert first_divergence(head, TOLERANCE) == head[2]
