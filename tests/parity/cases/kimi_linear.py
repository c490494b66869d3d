"""kimi_linear: delta nets with decays per channel, latent attention without positions, corrected choice of experts.

All layers have experts: transformers saves the feed-forward of dense layers under `block_sparse_moe`, where published
files have `mlp`; tests/parity/test_kimi_dense.py has those.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import KimiLinearConfig, PreTrainedConfig

LINEAR, FULL = "linear_attention", "full_attention"


def draw(rng: Random, **more: object) -> PreTrainedConfig:
    """Heads of delta nets and of attention have nothing to do with each other, nor with the stream's width."""
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": rng.choice([24, 40]),
        "intermediate_size": rng.randrange(20, 40),
        "moe_intermediate_size": 13,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "linear_num_heads": rng.choice([1, 2]),
        "linear_head_dim": 6,
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "kv_lora_rank": 20,
        "num_experts": 6,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "routed_scaling_factor": 1.7,
        "layer_types": [LINEAR, FULL],
        "mlp_layer_types": ["sparse", "sparse"],
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": rng.uniform(0.05, 0.2),
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return KimiLinearConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "groups": partial(draw, num_expert_group=3, topk_group=2),
    "query_rank": partial(draw, q_lora_rank=16, attention_bias=True, moe_renormalize=False),
}

INERT = {"k_rope.bias": "adds the same number to every score of a query, which softmax does not see"}
CASE = ParityCase(family="kimi_linear", configs=CONFIGS, inert_weights=INERT)
