"""qwen3_next: delta nets with grouped values, gated attention, experts beside a gated shared one, dense layers."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import PreTrainedConfig, Qwen3NextConfig

EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 13,
    "shared_expert_intermediate_size": 17,
}
LINEAR, FULL = "linear_attention", "full_attention"


def draw(rng: Random, kind: type[PreTrainedConfig], **more: object) -> PreTrainedConfig:
    """A delta net and a gated attention, heads of widths that have nothing to do with the stream's."""
    heads, kv_heads = rng.choice([(4, 2), (3, 1)])
    keys = rng.choice([1, 2])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": rng.choice([24, 40]),
        "intermediate_size": rng.randrange(20, 40),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice([2, 3]),
        "linear_key_head_dim": 18,  # few numbers may all be small after silu: their length would swell rounding
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "layer_types": [LINEAR, FULL],
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": rng.uniform(0.3, 0.6),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200), "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
        "pad_token_id": None,
        **more,
    }
    return kind(**sizes)


NEXT = partial(draw, kind=Qwen3NextConfig, **EXPERTS)
CONFIGS: dict[str, Draw] = {
    "dense_tied": partial(NEXT, mlp_only_layers=[1], tie_word_embeddings=True, attention_bias=True),
    "interval": partial(NEXT, layer_types=None, full_attention_interval=2, norm_topk_prob=False),
}

CASE = ParityCase(family="qwen3_next", configs=CONFIGS)
