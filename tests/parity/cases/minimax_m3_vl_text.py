"""minimax_m3_vl_text: blocks of four keys and of three, chosen and local, beside full and dense layers."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import D_HEAD, draw
from harness import Draw, ParityCase
from transformers import MiniMaxM3VLTextConfig, PreTrainedConfig

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
USUAL: dict[str, Any] = {
    "head_dim": D_HEAD,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "index_n_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 1.0,
}


def config(rng: Random, covered: float, **more: object) -> PreTrainedConfig:
    """RoPE on the part `covered` of each head, and of the indexer's heads as much."""
    rope = {"rope_type": "default", "rope_theta": rng.uniform(50, 200), "partial_rotary_factor": covered}
    sizes = {name: rng.randrange(20, 40) for name in ("dense_intermediate_size", "shared_intermediate_size")}
    usual: dict[str, Any] = USUAL | sizes | {"rope_parameters": rope, "rotary_dim": int(covered * D_HEAD)}
    own: dict[str, Any] = usual | {"swiglu_alpha": rng.uniform(1.2, 2.0)} | dict(more)
    return draw(rng, MiniMaxM3VLTextConfig, **own)


CONFIGS: dict[str, Draw] = {
    "after_dense": partial(
        config,
        covered=0.5,
        hidden_size=40,
        num_hidden_layers=3,
        layer_types=[FULL, SPARSE, SPARSE],
        mlp_layer_types=["dense", "sparse", "sparse"],
        index_head_dim=12,
        index_block_size=4,
        index_topk_blocks=3,
        tie_word_embeddings=True,
    ),
    "local": partial(
        config,
        covered=1.0,
        hidden_size=72,
        layer_types=[SPARSE, FULL],
        mlp_layer_types=["sparse", "dense"],
        index_head_dim=D_HEAD,
        index_block_size=3,
        index_topk_blocks=5,
        index_local_blocks=2,
        tie_word_embeddings=False,
    ),
}

CASE = ParityCase(family="minimax_m3_vl_text", configs=CONFIGS, choosing=(".indexer.",))
