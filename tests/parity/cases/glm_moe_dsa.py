"""glm_moe_dsa: layers that share the last choice of keys, told in each way; RoPE of indexers on adjacent pairs."""

from __future__ import annotations

from functools import partial

from harness import Draw, ParityCase
from transformers import GlmMoeDsaConfig

from cases.deepseek_v3 import GROUPS, OPEN, latent
from cases.deepseek_v32 import USUAL

GLM = partial(latent, **{**USUAL, "kind": GlmMoeDsaConfig})
CONFIGS: dict[str, Draw] = {
    "listed": partial(GLM, indexer_types=["full", "shared", "full"], attention_bias=True, **OPEN),
    "every_second": partial(GLM, index_topk_freq=2, index_skip_topk_offset=1, n_shared_experts=2, **GROUPS),
}

CASE = ParityCase(family="glm_moe_dsa", configs=CONFIGS, choosing=(".indexer.",))
