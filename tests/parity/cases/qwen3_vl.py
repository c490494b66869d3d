"""qwen3_vl: towers whose blocks reach two of the text's layers, one, or none; coordinates that take turns."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import D_HEAD, draw
from harness import Draw, ParityCase
from seeing_grids import SeeingGrids, tower
from transformers import Qwen3VLConfig, Qwen3VLTextConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from cases.qwen2_5_vl import COSTS, whole


def text(rng: Random, kind: Any, **more: object) -> Any:  # noqa: ANN401  # configs of these families
    """A text whose pairs take turns; `more` overrides."""
    sections = rng.choice([[4, 2, 2], [3, 3, 2]])
    rope = {"rope_theta": rng.uniform(50, 200), "mrope_section": sections, "mrope_interleaved": True}
    return draw(rng, kind, **{"rope_parameters": {"rope_type": "default", **rope}, "head_dim": D_HEAD, **more})


def images(rng: Random, kind: Any, width: int, **more: object) -> Any:  # noqa: ANN401
    """A tower of square positions; `more` overrides."""
    sizes = tower(rng, spatial_merge_size=2, out_hidden_size=width, hidden_act=rng.choice(["gelu", "relu"]))
    return kind(**sizes, num_position_embeddings=rng.choice([9, 16, 25]), **more)


def config(rng: Random, taps: tuple[int, ...] = (), **more: object) -> Qwen3VLConfig:
    """A config of a small tower and a small text; `more` overrides the text's."""
    inner = text(rng, Qwen3VLTextConfig, **more)
    made = images(rng, Qwen3VLVisionConfig, inner.hidden_size, deepstack_visual_indexes=list(taps))
    return whole(rng, Qwen3VLConfig, inner, made)


CONFIGS: dict[str, Draw] = {
    "two": partial(config, taps=(0, 2), tie_word_embeddings=True),
    "one": partial(config, taps=(1,), attention_bias=True, tie_word_embeddings=False),
    "none": partial(config, hidden_size=40, tie_word_embeddings=False),
}

CASE = ParityCase(family="qwen3_vl", configs=CONFIGS, kind=SeeingGrids(), inert_fields=COSTS)
