"""Configs of mllama: the class's defaults, what the tower says together, what is refused, and the published totals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Pass, TiledVision, TilePatches, VisionLanguageModel

FRONTIER = Path(__file__).parents[3] / "shared" / "frontier"
TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 6, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "vocab_size": 11, "cross_attention_layers": [1]}
IMAGES: dict[str, Any] = {"hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1}
IMAGES |= {"intermediate_size": 32, "image_size": 8, "patch_size": 4, "intermediate_layers_indices": [1]}
IMAGES |= {"vision_output_dim": 32, "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [2, 1]]}
CONFIG: dict[str, Any] = {"model_type": "mllama", "image_token_index": 12, "text_config": TEXT, "vision_config": IMAGES}


def read(config: dict[str, Any]) -> VisionLanguageModel:
    spec = read_config(config, "model").spec
    assert isinstance(spec, VisionLanguageModel)
    return spec


def test_defaults_are_the_11b_models_with_smaller_tiles() -> None:
    spec = read({"model_type": "mllama"})
    assert (spec.n_vocab, spec.n_rows, spec.d_model, spec.n_layers) == (128256, 128264, 4096, 40)
    assert [i for i, block in enumerate(spec.blocks) if block.crosses] == [3, 8, 13, 18, 23, 28, 33, 38]
    vision, patches = spec.vision, spec.patches
    assert isinstance(vision, TiledVision)
    assert isinstance(patches, TilePatches)
    assert (vision.taps, vision.d_seen, vision.placeholder) == ((3, 7, 15, 23, 30), 7680, 128256)
    assert (patches.image_size, patches.n_tiles, patches.n_places, patches.n_padded) == (448, 4, 1025, 1032)
    assert patches.tilings == ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


def test_written_and_read_back() -> None:
    other = {("num_attention_heads" if key == "attention_heads" else key): value for key, value in IMAGES.items()}
    for images in (IMAGES, other, IMAGES | {"intermediate_layers_indices": [1, 0], "vision_output_dim": 48}):
        reading = read_config(CONFIG | {"vision_config": images}, "model")
        written = write_config("mllama", reading.spec, reading.carried, None)
        assert read_config(written, "model").spec == reading.spec


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("vision_config", IMAGES | {"vision_output_dim": 48}, "vision_output_dim"),
        ("vision_config", IMAGES | {"intermediate_layers_indices": [2]}, "intermediate_layers_indices"),
        ("vision_config", IMAGES | {"intermediate_layers_indices": []}, "intermediate_layers_indices"),
        ("vision_config", IMAGES | {"supported_aspect_ratios": [[1, 1], [3, 1]]}, "supported_aspect_ratios"),
        ("vision_config", IMAGES | {"supported_aspect_ratios": [[1, 1], [1, 1]]}, "supported_aspect_ratios"),
        ("vision_config", IMAGES | {"supported_aspect_ratios": [[1, 2]]}, "supported_aspect_ratios"),
        ("vision_config", IMAGES | {"supported_aspect_ratios": "all"}, "supported_aspect_ratios"),
        ("vision_config", IMAGES | {"num_global_layers": 0}, "num_global_layers"),
        ("vision_config", IMAGES | {"image_size": [8, 12]}, "image_size"),
        ("vision_config", IMAGES | {"attention_heads": 3}, "attention_heads"),
        ("vision_config", IMAGES | {"model_type": "clip_vision_model"}, "model_type"),
        ("vision_config", IMAGES | {"colour": 1}, "colour"),
        ("text_config", TEXT | {"model_type": "llama"}, "model_type"),
        ("text_config", TEXT | {"cross_attention_layers": [3]}, "cross_attention_layers"),
        ("text_config", TEXT | {"cross_attention_layers": [2, 1]}, "cross_attention_layers"),
        ("text_config", TEXT | {"cross_attention_layers": []}, "cross_attention_layers"),
        ("text_config", TEXT | {"head_dim": 8}, "head_dim"),
        ("text_config", TEXT | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("text_config", 3, "text_config"),
        ("image_token_index", 19, "image_token_index"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("colour", 1, "colour"),
    ],
)
def test_refused_by_name(key: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read({**CONFIG, key: value})


def test_another_vision_is_no_mllama() -> None:
    spec = read(CONFIG)
    with pytest.raises(InputError):
        write_config("mllama", spec.text, {}, None)
    with pytest.raises(InputError):
        write_config("llama", spec.text, {}, None)


def test_published_totals() -> None:
    if not FRONTIER.exists():
        pytest.skip(f"no published models at {FRONTIER}")
    rows = [row for row in csv.reader((FRONTIER / "totals.csv").open()) if row[1] == "mllama"]
    assert rows
    for folder, _, total, active, _ in rows:
        spec = read(json.loads((FRONTIER / folder / "config.json").read_text()))
        assert (cost.total_parameters(spec), cost.active_parameters(spec)) == (int(total), int(active)), folder


def test_the_90b_models_parts() -> None:
    """Counted by transformers: the text, the tower and the projector, and keys and values of 80 and 20 layers."""
    folder = FRONTIER / "meta-llama--Llama-3.2-90B-Vision-Instruct"
    if not folder.exists():
        pytest.skip(f"no published model at {folder}")
    spec = read(json.loads((folder / "config.json").read_text()))
    parts = spec.text, spec.vision.tower, spec.vision.projector
    assert [cost.total_parameters(part) for part in parts[:2]] == [87_666_865_192, 863_567_379]
    assert cost.total_parameters(spec) - sum(map(cost.total_parameters, parts[:2])) == 62_922_752
    kept = cost.cache(spec, 1000, "bf16")
    assert (kept.per_token, kept.fixed) == (2 * 163_840, 2 * 262_307_840)
    # a text alone passes over 20 of 100 layers, and no image is read
    alone, seeing = (cost.flops(spec, Pass(tokens=100, images=n)).forward for n in (0, 1))
    own = cost.flops(spec.text, Pass(tokens=100)).forward
    assert alone == own
    assert seeing > 2 * alone
