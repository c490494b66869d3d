"""nemotron_h: every kind of block, experts with and without a latent width, groups, biases."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import ACTIVATIONS
from harness import TOKENS, Draw, ParityCase
from transformers import NemotronHConfig

GROUPS: dict[str, Any] = {"n_group": 3, "topk_group": 2}


def draw(rng: Random, layers: str, **more: object) -> NemotronHConfig:
    """A config whose heads divide nothing that they need not, and whose chunks are shorter than the text."""
    groups = rng.choice([1, 2, 3])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": rng.choice([20, 28]),
        "hybrid_override_pattern": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": rng.randrange(30, 50),
        "mamba_num_heads": groups * 2,
        "mamba_head_dim": 6,
        "ssm_state_size": 8,
        "n_groups": groups,
        "conv_kernel": rng.choice([3, 4]),
        "use_conv_bias": rng.random() < 0.5,
        "chunk_size": 16,
        "time_step_min": 1e-9,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 14,
        "routed_scaling_factor": 1.7,
        "mlp_hidden_act": rng.choice(["relu2", *ACTIVATIONS]),
        "max_position_embeddings": TOKENS,
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return NemotronHConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "dense": partial(draw, layers="M-*-M", mlp_bias=True, use_bias=True),
    "experts": partial(draw, layers="ME*", mlp_hidden_act="relu2", **GROUPS),
    "latent": partial(draw, layers="ME*E", moe_latent_size=9, mlp_bias=True),
}

CASE = ParityCase(family="nemotron_h", configs=CONFIGS)
