"""Configs of kimi_k25, mistral3 and lfm2_vl: spellings, ties, texts, what is refused, layouts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.families.shared.table import ChannelsFirst, Reshaped
from asbuilt.spec import GridPositions, MLPProjector, TiedHead, VisionLanguageModel

FRONTIER = Path(__file__).parents[3] / "shared" / "frontier"
FAMILIES = ("kimi_k25", "mistral3", "lfm2_vl")
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 24,
    "intermediate_size": 6,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 11,
}
NEWER: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 6,
    "pos_emb_height": 3,
    "pos_emb_width": 3,
}
OLDER: dict[str, Any] = {
    "model_type": "",
    "vt_hidden_size": 16,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 1,
    "vt_intermediate_size": 6,
    "init_pos_emb_height": 3,
    "init_pos_emb_width": 3,
    "mm_hidden_size": 16,
    "projector_ln_eps": 1e-3,
    "projector_hidden_act": "gelu",
    "text_hidden_size": 24,
}
KIMI: dict[str, Any] = {"model_type": "kimi_k25", "text_config": LATENT, "vision_config": NEWER, "image_token_id": 7}
KIMI |= {"projection_hidden_size": 16, "projection_layer_norm_eps": 1e-3, "tie_word_embeddings": False}
TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "vocab_size": 11}
TOWER: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 6}
MISTRAL: dict[str, Any] = {"model_type": "mistral3", "text_config": TEXT, "vision_config": TOWER}
HYBRID = TEXT | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
NAFLEX: dict[str, Any] = TOWER | {"vision_use_head": False, "num_patches": 9}
LFM: dict[str, Any] = {"model_type": "lfm2_vl", "text_config": HYBRID, "image_token_id": 7}
LFM |= {"vision_config": NAFLEX}
CONFIGS = {"kimi_k25": KIMI, "mistral3": MISTRAL, "lfm2_vl": LFM}


def read(config: dict[str, Any]) -> VisionLanguageModel:
    spec = read_config(config, "model").spec
    assert isinstance(spec, VisionLanguageModel)
    return spec


def test_keys_of_the_first_release_are_the_newer_ones() -> None:
    moved = ("projection_hidden_size", "projection_layer_norm_eps", "image_token_id")
    older = {key: value for key, value in KIMI.items() if key not in moved}
    older |= {
        "vision_config": OLDER,
        "media_placeholder_token_id": 7,
        "text_config": LATENT | {"model_type": "kimi_k2"},
    }
    reading = read_config(older, "model")
    assert reading.spec == read(KIMI)
    written = write_config("kimi_k25", reading.spec, reading.carried, None)
    assert (written["projection_layer_norm_eps"], written["vision_config"]["text_hidden_size"]) == (1e-3, 24)
    assert read_config(written, "model").spec == reading.spec
    positions = read(KIMI).vision.tower.positions
    assert positions == GridPositions(n_side=3, d_model=16, interpolation="cubic")


def test_the_text_of_mistral3_is_of_its_own_family() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 8}
    grown = TEXT | {"model_type": "ministral3", "rope_parameters": rope | {"llama_4_scaling_beta": 0.1}}
    for text, kind in ((TEXT, "mistral"), (grown, "ministral3")):
        reading = read_config(MISTRAL | {"text_config": text}, "model")
        written = write_config("mistral3", reading.spec, reading.carried, None)
        assert written["text_config"]["model_type"] == kind
        assert read_config(written, "model").spec == reading.spec


def test_rope_of_a_tower_has_older_spellings() -> None:
    said = (
        {"rope_theta": 50.0},
        *({"rope_parameters": {"rope_type": kind, "rope_theta": 50.0}} for kind in ("default", "axial")),
    )
    one, *others = (read(MISTRAL | {"vision_config": TOWER | rope}) for rope in said)
    assert all(other == one for other in others)
    assert one != read(MISTRAL)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_decides_on_ties(family: str) -> None:
    config = {key: value for key, value in CONFIGS[family].items() if key != "tie_word_embeddings"}
    assert isinstance(read(config).head, TiedHead)
    inner = config["text_config"] | {"tie_word_embeddings": True}
    assert not isinstance(read(config | {"tie_word_embeddings": False, "text_config": inner}).head, TiedHead)


@pytest.mark.parametrize(
    ("family", "key", "value", "named"),
    [
        ("kimi_k25", "vision_config", NEWER | {"pos_emb_width": 4}, "pos_emb_height"),
        ("kimi_k25", "vision_config", NEWER | {"merge_kernel_size": [2, 1]}, "merge_kernel_size"),
        ("kimi_k25", "vision_config", NEWER | {"merge_type": "mean"}, "merge_type"),
        ("kimi_k25", "vision_config", NEWER | {"pos_emb_type": "fixed"}, "pos_emb_type"),
        ("kimi_k25", "vision_config", NEWER | {"text_hidden_size": 30}, "text_hidden_size"),
        ("kimi_k25", "vision_config", NEWER | {"vt_hidden_size": 18}, "hidden_size"),
        ("kimi_k25", "vision_config", NEWER | {"colour": 1}, "colour"),
        ("kimi_k25", "projection_hidden_size", 18, "projection_hidden_size"),
        ("kimi_k25", "image_token_id", 11, "image_token_id"),
        ("mistral3", "text_config", TEXT | {"model_type": "llama"}, "model_type"),
        ("mistral3", "vision_config", TOWER | {"head_dim": 4}, "head_dim"),
        ("mistral3", "vision_config", TOWER | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("mistral3", "vision_config", TOWER | {"patch_size": [14, 16]}, "patch_size"),
        ("mistral3", "vision_feature_layer", -2, "vision_feature_layer"),
        ("mistral3", "colour", 1, "colour"),
        ("lfm2_vl", "vision_config", TOWER | {"num_patches": 9}, "vision_use_head"),
        ("lfm2_vl", "vision_config", NAFLEX | {"vision_use_head": True}, "vision_use_head"),
        ("lfm2_vl", "vision_config", NAFLEX | {"num_patches": 10}, "num_patches"),
        ("lfm2_vl", "vision_config", NAFLEX | {"model_type": "siglip_vision_model"}, "model_type"),
        ("lfm2_vl", "image_token_id", 11, "image_token_id"),
        ("lfm2_vl", "colour", 1, "colour"),
    ],
)
def test_refused_by_name(family: str, key: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read({**CONFIGS[family], key: value})


def test_older_spelling_of_ties() -> None:
    assert not isinstance(read(LFM | {"tie_embedding": False}).head, TiedHead)
    inner = LFM["text_config"] | {"tie_embedding": False}
    assert isinstance(read(LFM | {"text_config": inner}).head, TiedHead)
    reading = read_config(LFM | {"tie_embedding": False}, "model")
    written = write_config("lfm2_vl", reading.spec, reading.carried, None)
    assert written["tie_word_embeddings"] is False
    assert "tie_embedding" not in written
    assert read_config(written, "model").spec == reading.spec


def test_positions_of_siglip2_are_antialiased() -> None:
    positions = read(LFM).vision.tower.positions
    assert positions == GridPositions(n_side=3, d_model=16, interpolation="triangle")
    assert [GridPositions(n_side=16, d_model=2, interpolation="triangle").n_taps(n) for n in (1, 5, 16, 32)] == [
        32,
        7,
        2,
        2,
    ]


def test_layouts_know_their_inverse() -> None:
    matrix = torch.arange(2 * 12).view(2, 12)
    turned = ChannelsFirst(3)
    (stored,) = turned.save([matrix])
    assert stored[0].tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert torch.equal(turned.load([stored])[0], matrix)
    shaped = Reshaped((2, 12), (2, 3, 4))
    assert shaped.stored_shapes([(2, 12)]) == [(2, 3, 4)]
    assert torch.equal(shaped.load(shaped.save([matrix]))[0], matrix)


def test_a_map_that_only_merges_is_followed_by_another() -> None:
    with pytest.raises(InputError, match="merging"):
        MLPProjector(widths=(8, 4), activation="gelu", merge=2, merging=True)


def test_published_totals() -> None:
    if not FRONTIER.exists():
        pytest.skip(f"no published models at {FRONTIER}")
    rows = [row for row in csv.reader((FRONTIER / "totals.csv").open()) if row[1] in FAMILIES]
    assert rows
    for folder, _, total, active, _ in rows:
        spec = read(json.loads((FRONTIER / folder / "config.json").read_text()))
        assert (cost.total_parameters(spec), cost.active_parameters(spec)) == (int(total), int(active)), folder
