"""Configs of the Qwen-VL families: both places of the text, ties, sections, windows, and what is refused by name."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asbuilt import cost
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.nn import build
from asbuilt.spec import GridVision, Rotary, Sections, TiedHead, VisionLanguageModel, Windowed, walk

FRONTIER = Path(__file__).parents[3] / "shared" / "frontier"
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 11,
    "max_position_embeddings": 16,
    "rope_theta": 100.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
}
TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 8, "intermediate_size": 6, "num_heads": 2, "out_hidden_size": 32}
OUTER: dict[str, Any] = {"image_token_id": 7, "tie_word_embeddings": False}
FLAT = {"model_type": "qwen2_5_vl", "vision_config": TOWER, **OUTER, **TEXT}
QWEN3 = {"model_type": "qwen3_vl", **OUTER}
QWEN3 |= {"text_config": TEXT | {"head_dim": 16}, "vision_config": TOWER | {"deepstack_visual_indexes": [1]}}
MOE: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "head_dim": 16}
CONFIGS = {"qwen2_5_vl": FLAT, "qwen3_vl": QWEN3, "qwen3_vl_moe": QWEN3 | {"model_type": "qwen3_vl_moe"}}
CONFIGS["qwen3_vl_moe"] |= {"text_config": TEXT | MOE}


def test_a_flat_text_is_a_nested_one() -> None:
    nested = {"model_type": "qwen2_5_vl", "vision_config": TOWER, **OUTER, "text_config": TEXT}
    found = read_config(FLAT, "model")
    assert found.spec == read_config(nested, "model").spec
    rotaries = [part for _, part in walk(found.spec) if isinstance(part, Rotary)]
    assert Sections(pairs=(4, 2, 2)) in {rotary.axes for rotary in rotaries}
    written = write_config("qwen2_5_vl", found.spec, found.carried, None)
    assert "hidden_size" not in written
    assert read_config(written, "model").spec == found.spec


def test_windows_are_rounded_down_to_squares() -> None:
    for pixels, side in ((112, 8), (139, 8), (140, 10), (28, 2)):
        config = FLAT | {"vision_config": TOWER | {"window_size": pixels, "fullatt_block_indexes": [1, 9]}}
        spec = read_config(config, "model").spec
        assert isinstance(spec, VisionLanguageModel)
        bodies = [block.branches[0].body for block in spec.vision.tower.blocks]
        assert [getattr(body, "side", None) for body in bodies] == [side, None]
        assert isinstance(bodies[0], Windowed)


def test_where_embeddings_are_tied() -> None:
    def tied(config: dict[str, Any]) -> bool:
        return isinstance(read_config(config, "model").spec.head, TiedHead)

    assert tied(FLAT | {"tie_word_embeddings": True})
    inner = {"model_type": "qwen2_5_vl", "vision_config": TOWER, "image_token_id": 7}
    assert tied(inner | {"text_config": TEXT | {"tie_word_embeddings": True}})
    # the whole decides in the later families, whatever its text says
    assert not tied(QWEN3 | {"text_config": QWEN3["text_config"] | {"tie_word_embeddings": True}})
    assert tied(QWEN3 | {"tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("family", "key", "value", "named"),
    [
        ("qwen2_5_vl", "rope_scaling", {"type": "mrope", "mrope_section": [4, 4, 4]}, "mrope_section"),
        ("qwen2_5_vl", "rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope_type|type"),
        ("qwen2_5_vl", "rope_scaling", {"type": "mrope", "mrope_interleaved": True}, "mrope"),
        ("qwen2_5_vl", "vision_config", TOWER | {"out_hidden_size": 30}, "vision_config"),
        ("qwen2_5_vl", "vision_config", TOWER | {"num_heads": 4}, "num_heads"),
        ("qwen2_5_vl", "vision_config", TOWER | {"in_chans": 4}, "in_chans"),
        ("qwen2_5_vl", "vision_config", TOWER | {"spatial_patch_size": 4}, "spatial_patch_size"),
        ("qwen2_5_vl", "vision_config", TOWER | {"window_size": 20}, "window_size"),
        ("qwen2_5_vl", "vision_config", TOWER | {"fullatt_block_indexes": ["a"]}, "fullatt_block_indexes"),
        ("qwen2_5_vl", "vision_config", TOWER | {"colour": 1}, "colour"),
        ("qwen2_5_vl", "image_token_id", 11, "image_token_id"),
        ("qwen2_5_vl", "colour", 1, "colour"),
        ("qwen3_vl", "vision_config", TOWER | {"num_position_embeddings": 10}, "num_position_embeddings"),
        ("qwen3_vl", "vision_config", TOWER | {"deepstack_visual_indexes": [1, 0]}, "deepstack_visual_indexes"),
        ("qwen3_vl", "vision_config", TOWER | {"deepstack_visual_indexes": [2]}, "deepstack_visual_indexes"),
        ("qwen3_vl", "vision_config", TOWER | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("qwen3_vl_moe", "text_config", TEXT | MOE | {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_refused_by_name(family: str, key: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_config({**CONFIGS[family], key: value}, "model")


def test_stacks_of_experts_are_read_either_way(tmp_path: Path) -> None:
    """Published folders have inputs first; transformers 5 writes outputs first, as here."""
    reading = read_config(CONFIGS["qwen3_vl_moe"], "model")
    model = build(reading.spec, seed=1)
    save(model, tmp_path, family=reading.family, carried=reading.carried)
    stored = load_file(tmp_path / "model.safetensors")
    stacks = [name for name in stored if ".experts." in name]
    assert len(stacks) == 4
    turned = {name: x.transpose(1, 2).contiguous() if name in stacks else x for name, x in stored.items()}
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = load(str(tmp_path), dtype="float32").state_dict()
    assert all(torch.equal(again[name], x) for name, x in model.state_dict().items())


def test_taps_need_their_mergers() -> None:
    spec = read_config(QWEN3, "model").spec
    assert isinstance(spec, VisionLanguageModel)
    assert isinstance(spec.vision, GridVision)
    for changed in ({"taps": (0, 1)}, {"mergers": ()}, {"taps": (2,)}, {"keep_class": True}):
        with pytest.raises(InputError, match=next(iter(changed))):
            replace(spec.vision, **changed)


def test_published_totals() -> None:
    if not FRONTIER.exists():
        pytest.skip(f"no published models at {FRONTIER}")
    rows = [row for row in csv.reader((FRONTIER / "totals.csv").open()) if row[1] in FAMILIES]
    assert rows
    for folder, _, total, active, _ in rows:
        config = json.loads((FRONTIER / folder / "config.json").read_text())
        spec = read_config(config, folder).spec
        assert (cost.total_parameters(spec), cost.active_parameters(spec)) == (int(total), int(active)), folder
