"""The pixtral config reader: the published tower, its sizes, and the older spelling of its RoPE."""

from __future__ import annotations

from typing import Any

import torch

from asbuilt import cost
from asbuilt.families import read_config, write_config
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.spec import Attention, GridPatches, ImageEncoder, Pass, Rotary, walk

USUAL: dict[str, Any] = {"model_type": "pixtral"}
SMALL: dict[str, Any] = USUAL | {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "patch_size": 2,
    "image_size": 8,
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
