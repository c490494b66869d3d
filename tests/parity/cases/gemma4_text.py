"""gemma4_text: heads by kind of layer, values that are keys, layers that read others' keys, vectors, experts."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, ParityCase
from transformers import Gemma4TextConfig

from cases.gemma import sizes
from cases.gemma2 import FULL, SLIDING, SMOOTH

NONE: dict[str, Any] = {"hidden_size_per_layer_input": 0}
EXPERTS: dict[str, Any] = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 13}
SAME: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


def ropes(rng: Random, full: str = "proportional", local: str = "default") -> dict[str, Any]:
    """RoPE of full layers, of which a part of the pairs turn, and of those with a window."""
    found: dict[str, Any] = {}
    for kind, name in ((FULL, full), (SLIDING, local)):
        found[kind] = {"rope_type": name, "rope_theta": rng.uniform(50, 200)}
        if name == "proportional":
            found[kind]["partial_rotary_factor"] = rng.choice([0.25, 0.5])
        if name != "default":
            found[kind]["factor"] = rng.uniform(2, 6)
    return found


def draw(rng: Random, **more: object) -> Gemma4TextConfig:
    """A config of two kinds of layer whose heads differ; `more` overrides."""
    drawn = {
        **sizes(rng),
        "hidden_activation": rng.choice(SMOOTH),
        "rope_parameters": ropes(rng),
        "sliding_window": rng.randrange(6, TOKENS // 3),
        "layer_types": [SLIDING, FULL],
        "global_head_dim": 24,
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": rng.choice([5, 7]),
        "final_logit_softcapping": rng.choice([None, rng.uniform(8, 20)]),
        **more,
    }
    return Gemma4TextConfig(**drawn)


# Scores are not scaled, so that a small epsilon makes them large, and four layers blow up what float32 rounds.
READERS: dict[str, Any] = {
    "rms_norm_eps": 0.5,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}

CONFIGS: dict[str, Draw] = {
    "bare": partial(draw, attention_bias=False, tie_word_embeddings=True, **NONE),
    "vectors": partial(draw, attention_bias=True, tie_word_embeddings=False),
    "experts": partial(draw, num_attention_heads=4, num_key_value_heads=2, hidden_size=36, **SAME, **EXPERTS, **NONE),
    "readers": partial(draw, use_double_wide_mlp=True, final_logit_softcapping=12.0, **READERS),
}

CASE = ParityCase(family="gemma4_text", configs=CONFIGS)
