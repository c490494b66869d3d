"""deepseek_v3: corrected choice within groups, ranks with and without, YaRN with mscale, both pairings, biases."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import YARN, draw
from harness import Draw, ParityCase
from transformers import DeepseekV3Config, PreTrainedConfig

SIZES: dict[str, Any] = {
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 16,
    "v_head_dim": 14,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 13,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
}
GROUPS: dict[str, Any] = {"n_group": 3, "topk_group": 2}
OPEN: dict[str, Any] = {"n_group": 1, "topk_group": 1}


def latent(rng: Random, kind: type[PreTrainedConfig], **more: object) -> PreTrainedConfig:
    """Heads are as many for keys as for queries, and their widths have nothing to do with the stream's."""
    heads = rng.choice([2, 3, 5])
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * rng.choice([10, 14])}
    return draw(rng, kind, **{**sizes, **SIZES, **more})


def stretched(
    rng: Random, kind: type[PreTrainedConfig], all_dim: float | None = None, **more: object
) -> PreTrainedConfig:
    """YaRN whose mscales widen the softmax, and where they differ cos and sin too."""
    rope = YARN | {"rope_theta": rng.uniform(50, 200), "factor": rng.uniform(2, 6)}
    mscale = rng.uniform(0.7, 2.0)
    rope |= {"mscale": mscale, "mscale_all_dim": all_dim or mscale}
    return latent(rng, kind, rope_parameters=rope, **more)


V3 = partial(latent, kind=DeepseekV3Config, routed_scaling_factor=1.7)
CONFIGS: dict[str, Draw] = {
    "groups_tied": partial(V3, tie_word_embeddings=True, **GROUPS),
    "no_query_rank": partial(V3, q_lora_rank=None, attention_bias=True, rope_interleave=False, **OPEN),
    "mscale": partial(
        stretched, kind=DeepseekV3Config, attention_bias=True, norm_topk_prob=False, v_head_dim=30, **OPEN
    ),
    "two_mscales": partial(
        stretched, kind=DeepseekV3Config, all_dim=1.3, first_k_dense_replace=0, n_shared_experts=2, **GROUPS
    ),
}

CASE = ParityCase(family="deepseek_v3", configs=CONFIGS)
