"""step3p7: texts of both kinds of layers, some clamped, after an image of which two convolutions leave few tokens."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import D_HEAD, WINDOW
from harness import TOKENS, Draw, ParityCase
from seeing import Seeing
from transformers import Step3p7Config

FULL, SLIDING = "full_attention", "sliding_attention"


def text(rng: Random, **more: object) -> dict[str, Any]:
    """Sizes of a small text, with a base and a part of a head for each kind of layer."""
    ropes = {
        FULL: {"rope_type": "default", "rope_theta": rng.uniform(50, 200), "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": rng.uniform(5, 20), "partial_rotary_factor": 1.0},
    }
    return {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": rng.choice([40, 72]),
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_sliding_attention_heads": 6,
        "head_dim": D_HEAD,
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": rng.uniform(0.05, 0.2),
        "rope_parameters": ropes,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL, SLIDING],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": rng.randrange(20, 30),
        "share_expert_dim": rng.randrange(20, 30),
        "moe_router_scaling_factor": 1.7,
        "swiglu_limits": [None, 0.0, 0.5],
        "swiglu_limits_shared": [0.6, None, 0.7],
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }


def config(rng: Random, side: int, bias: bool, **more: object) -> Step3p7Config:
    """A config of a tower of `side` patches on a side; `more` overrides the text's."""
    inner, heads, patch = text(rng, **more), rng.choice([2, 3]), rng.randrange(2, 4)
    tower = {
        "hidden_size": heads * rng.choice([8, 12]),
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_channels": rng.randrange(1, 4),
        "image_size": side * patch + rng.randrange(patch),
        "patch_size": patch,
        "mlp_ratio": rng.uniform(1.0, 2.0),
        "hidden_act": rng.choice(["quick_gelu", "gelu"]),
        "layer_norm_eps": rng.uniform(0.05, 0.2),
        "rope_parameters": {"rope_type": "axial", "rope_theta": rng.uniform(2.0, 20.0)},
    }
    token = rng.randrange(inner["vocab_size"])
    return Step3p7Config(text_config=inner, vision_config=tower, image_token_id=token, projector_bias=bias)


CONFIGS: dict[str, Draw] = {
    "usual": partial(config, side=6, bias=False),
    "biased": partial(
        config,
        side=9,
        bias=True,
        mlp_bias=True,
        layer_types=[FULL, SLIDING, FULL],
        query_pre_attn_scalar=30,
    ),
}

CASE = ParityCase(family="step3p7", configs=CONFIGS, kind=Seeing())
