"""deepseek_v32: keys chosen by indexers, within a context longer than the choice; groups, YaRN with mscale, biases."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import DeepseekV32Config

from cases.deepseek_v3 import GROUPS, OPEN, latent, stretched

# several heads, since scores that are all cut to zero are equal, and libraries choose among equal ones as they like
INDEXER: dict[str, Any] = {"index_n_heads": 12, "index_head_dim": 20, "index_topk": TOKENS // 4}
USUAL: dict[str, Any] = {"kind": DeepseekV32Config, "mlp_layer_types": None, **INDEXER}
CONFIGS: dict[str, Draw] = {
    "grouped": partial(latent, routed_scaling_factor=1.7, **GROUPS, **USUAL),
    "mscale": partial(stretched, attention_bias=True, tie_word_embeddings=True, norm_topk_prob=False, **OPEN, **USUAL),
}

CASE = ParityCase(family="deepseek_v32", configs=CONFIGS, choosing=(".indexer.",))
