"""qwen3_vl_moe: experts stored in stacks, in all layers of the text or in all but one."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import Draw, ParityCase
from seeing_grids import SeeingGrids
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig

from cases.qwen2_5_vl import COSTS, whole
from cases.qwen3_vl import images, text

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 23}


def config(rng: Random, **more: object) -> Qwen3VLMoeConfig:
    """A config of a small tower and a small text; `more` overrides the text's."""
    inner = text(rng, Qwen3VLMoeTextConfig, **EXPERTS, **more)
    made = images(rng, Qwen3VLMoeVisionConfig, inner.hidden_size, deepstack_visual_indexes=[1])
    return whole(rng, Qwen3VLMoeConfig, inner, made)


CONFIGS: dict[str, Draw] = {
    "tied": partial(config, tie_word_embeddings=True),
    "listed": partial(config, mlp_only_layers=[1], tie_word_embeddings=False),
}

CASE = ParityCase(family="qwen3_vl_moe", configs=CONFIGS, kind=SeeingGrids(), inert_fields=COSTS)
