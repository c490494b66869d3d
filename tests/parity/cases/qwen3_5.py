"""qwen3_5: a tower without taps beside delta nets, in wholes with tied embeddings and without."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import Draw, ParityCase
from seeing_grids import SeeingGrids
from transformers import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

from cases.qwen2_5_vl import COSTS, whole
from cases.qwen3_next import draw
from cases.qwen3_vl import images

SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}


def config(rng: Random, **more: object) -> Qwen3_5Config:
    """A config of a small tower and a small text; `more` overrides the text's."""
    rope = {"rope_type": "default", "rope_theta": rng.uniform(50, 200), **SECTIONS}
    inner = draw(rng, kind=Qwen3_5TextConfig, rope_parameters=rope, **more)
    return whole(rng, Qwen3_5Config, inner, images(rng, Qwen3_5VisionConfig, inner.hidden_size))


CONFIGS: dict[str, Draw] = {
    "tied": partial(config, tie_word_embeddings=True),
    "untied": partial(config, tie_word_embeddings=False),
}

CASE = ParityCase(family="qwen3_5", configs=CONFIGS, kind=SeeingGrids(), inert_fields=COSTS)
