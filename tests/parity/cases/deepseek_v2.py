"""deepseek_v2: softmax routing over all experts or the best groups, ranks with and without, YaRN with mscale."""

from __future__ import annotations

from functools import partial

from harness import Draw, ParityCase
from transformers import DeepseekV2Config

from cases.deepseek_v3 import GROUPS, latent, stretched

LIMITED = GROUPS | {"topk_method": "group_limited_greedy"}
V2 = partial(latent, kind=DeepseekV2Config, routed_scaling_factor=1.7)
CONFIGS: dict[str, Draw] = {
    "groups_tied": partial(V2, tie_word_embeddings=True, **LIMITED),
    "no_query_rank": partial(V2, q_lora_rank=None, attention_bias=True, n_group=3, topk_group=1),
    "mscale": partial(stretched, kind=DeepseekV2Config, attention_bias=True, v_head_dim=26, n_shared_experts=2),
}

CASE = ParityCase(family="deepseek_v2", configs=CONFIGS)
