"""mimo_v2_flash: two kinds of layers, as usual and as listed; values narrower and wider than keys, scaled or not."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import WINDOW, draw
from harness import Draw, ParityCase
from transformers import MiMoV2FlashConfig, PreTrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"
USUAL: dict[str, Any] = {
    "head_dim": 24,  # of which the class's third is even
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "hidden_size": 40,
    "sliding_window": WINDOW,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 23,
    "routed_scaling_factor": 1.7,
}


def layered(rng: Random, *, covered: float, **more: object) -> PreTrainedConfig:
    """Each kind of layer with a base of its own, RoPE on the part `covered` of each head."""
    rope = {"rope_type": "default", "partial_rotary_factor": covered}
    ropes = {kind: rope | {"rope_theta": rng.uniform(50, 200)} for kind in (FULL, SLIDING)}
    return draw(rng, MiMoV2FlashConfig, "rms_norm_eps", **USUAL | {"rope_parameters": ropes} | more)


CONFIGS: dict[str, Draw] = {
    "usual_tied": partial(layered, covered=0.5, v_head_dim=10, num_hidden_layers=3, tie_word_embeddings=True),
    "listed": partial(
        layered,
        covered=1.0,
        v_head_dim=20,
        layer_types=[SLIDING, FULL],
        mlp_layer_types=["sparse", "dense"],
        attention_value_scale=None,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
}

# scaled-dot-product attention has no sinks there
CASE = ParityCase(family="mimo_v2_flash", configs=CONFIGS, attentions=("eager",))
