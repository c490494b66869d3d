"""qwen3_5_moe: a tower without taps beside delta nets and experts."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import Draw, ParityCase
from seeing_grids import SeeingGrids
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig

from cases.qwen2_5_vl import COSTS, whole
from cases.qwen3_5 import SECTIONS
from cases.qwen3_next import EXPERTS, draw
from cases.qwen3_vl import images


def config(rng: Random, **more: object) -> Qwen3_5MoeConfig:
    """A config of a small tower and a small text; `more` overrides the text's."""
    rope = {"rope_type": "default", "rope_theta": rng.uniform(50, 200), **SECTIONS}
    inner = draw(rng, kind=Qwen3_5MoeTextConfig, rope_parameters=rope, **EXPERTS, **more)
    return whole(rng, Qwen3_5MoeConfig, inner, images(rng, Qwen3_5MoeVisionConfig, inner.hidden_size))


CONFIGS: dict[str, Draw] = {"untied": partial(config, tie_word_embeddings=False)}

CASE = ParityCase(family="qwen3_5_moe", configs=CONFIGS, kind=SeeingGrids(), inert_fields=COSTS)
