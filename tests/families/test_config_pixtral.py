"""The pixtral config reader: the published tower, its sizes, the older spelling of its RoPE, and the tower in llava."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.spec import Attention, GridPatches, GridVision, ImageEncoder, Pass, Rotary, VisionLanguageModel, walk

USUAL: dict[str, Any] = {"model_type": "pixtral"}
SMALL: dict[str, Any] = USUAL | {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "patch_size": 2,
    "image_size": 8,
}

# The published config of Pixtral-12B in transformers' format.
WHOLE: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "ignore_index": -100,
    "image_seq_length": 1,
    "image_token_index": 10,
    "projector_hidden_act": "gelu",
    "text_config": {
        "model_type": "mistral",
        "hidden_size": 5120,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "is_composition": True,
        "max_position_embeddings": 1024000,
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e9,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {
        "model_type": "pixtral",
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "is_composition": True,
        "patch_size": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "torch_dtype": "bfloat16",
}


def theta_of(**changes: object) -> float:
    parts = (part.positions for _, part in walk(read_config(USUAL | changes, "x").spec) if isinstance(part, Attention))
    rotary = next(parts)
    assert isinstance(rotary, Rotary)
    return rotary.theta


def test_the_published_tower() -> None:
    """Pixtral 12B's tower, which the class's defaults describe: 24 layers of 1024, patches of 16 x 16."""
    reading = read_config(USUAL, "x")
    spec = reading.spec
    assert isinstance(spec, ImageEncoder)
    assert isinstance(spec.embedding, GridPatches)
    block = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024
    assert cost.total_parameters(spec) == 3 * 16**2 * 1024 + 1024 + 24 * block == 403_489_792
    assert (spec.embedding.image_size, spec.max_positions, spec.norm) == (1024, 4096, None)
    written = write_config("pixtral", spec, reading.carried, "bfloat16")
    assert written["image_size"] == 1024
    assert read_config(written, "x").spec == spec


def test_costs_are_those_of_the_largest_image() -> None:
    small = read_config(SMALL, "x").spec
    run = Pass(tokens=small.max_positions)
    assert small.max_positions == 16
    assert cost.flops(small, run).forward == measured.flops(small, run.tokens)


def test_images_of_other_sizes_are_read() -> None:
    model = build(read_config(SMALL, "x").spec, seed=0)
    assert model(torch.zeros(3, 3, 6, 10)).shape == (3, 15, 8)


def test_the_base_of_rope_in_either_spelling() -> None:
    found = [
        theta_of(),
        theta_of(rope_theta=50.0),
        theta_of(rope_parameters={"rope_type": "default", "rope_theta": 60.0}),
        theta_of(rope_parameters={"rope_type": "axial", "rope_theta": 70.0}),
    ]
    assert found == [10000.0, 50.0, 60.0, 70.0]


def test_the_published_whole() -> None:
    """Pixtral 12B: its tower, two matrices with biases, and a mistral text whose heads are narrower than its stream."""
    reading = read_config(WHOLE, "x")
    spec = reading.spec
    assert isinstance(spec, VisionLanguageModel)
    assert isinstance(spec.vision, GridVision)
    assert cost.total_parameters(spec.vision.tower) == 403_489_792
    projector = 1024 * 5120 + 5120 + 5120**2 + 5120
    block = 2 * 5120 * 4096 + 2 * 5120 * 1024 + 3 * 5120 * 14336 + 2 * 5120
    text = 2 * 131072 * 5120 + 40 * block + 5120
    assert cost.total_parameters(spec) == 403_489_792 + projector + text == 12_682_739_712
    assert (spec.vision.placeholder, spec.vision.layers, spec.vision.keep_class) == (10, None, False)
    written = write_config("llava", spec, reading.carried, "bfloat16")
    assert (written["text_config"]["model_type"], written["vision_config"]["model_type"]) == ("mistral", "pixtral")
    assert (written["vision_feature_layer"], written["vision_feature_select_strategy"]) == (-1, "full")
    assert read_config(written, "x").spec == read_config(write_config("llava", spec, {}, None), "x").spec == spec


def test_the_last_layer_has_two_numbers() -> None:
    assert read_config(WHOLE | {"vision_feature_layer": 24}, "x").spec == read_config(WHOLE, "x").spec


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("vision_feature_layer", -2, "vision_feature_layer: .*-1 or 24"),
        ("vision_feature_layer", 23, "vision_feature_layer: .*-1 or 24"),
        ("vision_feature_select_strategy", "default", 'vision_feature_select_strategy: must be "full"'),
        (
            "vision_config",
            {"model_type": "dinov2"},
            "vision_config.model_type: .*or pixtral",
        ),
        ("vision_config", WHOLE["vision_config"] | {"colour": 1}, "vision_config.colour"),
        ("text_config", {"model_type": "qwen3"}, "text_config.model_type: must be llama or mistral or qwen2"),
    ],
    ids=range(6),
)
def test_what_a_whole_is_not(key: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_config(WHOLE | {key: value}, "x")


def test_a_tower_without_a_class_token_gives_all_its_vectors() -> None:
    """SigLIP's tower, whose last norm never runs, before a tied qwen2: weights counted by their closed form."""
    text = {"model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 152000, "tie_word_embeddings": True}
    images = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 384}
    images |= {"num_hidden_layers": 26, "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False}
    config = WHOLE | {"image_token_index": 151646, "text_config": text, "vision_config": images}
    reading = read_config(config, "x")
    spec = reading.spec
    assert isinstance(spec, VisionLanguageModel)
    tower = 3 * 14**2 * 1152 + 1152 + 27**2 * 1152 + 26 * (4 * 1152**2 + 2 * 1152 * 4304 + 9 * 1152 + 4304) + 2 * 1152
    block = 4 * 1024**2 + 3 * 1024 + 3 * 1024 * 2816 + 2 * 1024
    whole = tower + 1152 * 1024 + 1024 + 1024**2 + 1024 + 152000 * 1024 + 24 * block + 1024
    assert cost.total_parameters(spec) == whole
    assert (spec.vision.n_tokens, spec.vision.layers, spec.vision.keep_class) == (27**2, 26, False)
    written = write_config("llava", spec, {}, None)
    assert (written["text_config"]["model_type"], written["vision_config"]["model_type"]) == (
        "qwen2",
        "siglip_vision_model",
    )
    assert read_config(written, "x").spec == spec
    with pytest.raises(InputError, match='vision_feature_select_strategy: must be "full"'):
        read_config(config | {"vision_feature_select_strategy": "default"}, "x")
    with pytest.raises(InputError, match="vision_use_head"):
        read_config(config | {"vision_config": images | {"vision_use_head": True}}, "x")
