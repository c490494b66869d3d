"""glm4_moe_lite: dense layers first or as listed, pairs adjacent or of halves, a rank of queries or none."""

from __future__ import annotations

from functools import partial

from harness import Draw, ParityCase
from transformers import Glm4MoeLiteConfig

from cases.deepseek_v3 import OPEN, SIZES, latent

OWN = {key: value for key, value in SIZES.items() if key != "first_k_dense_replace"} | OPEN
LITE = partial(latent, kind=Glm4MoeLiteConfig, routed_scaling_factor=1.7, **OWN)

CONFIGS: dict[str, Draw] = {
    "usual_tied": partial(LITE, tie_word_embeddings=True),
    "listed": partial(
        LITE,
        mlp_layer_types=["sparse", "dense", "sparse"],
        q_lora_rank=None,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
}

CASE = ParityCase(family="glm4_moe_lite", configs=CONFIGS)
