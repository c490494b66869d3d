"""llama4_text: chunks, layers without positions, dense layers between, one expert or two, warm queries."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, ORIGINAL, WINDOW, draw, wide
from harness import Draw, ParityCase
from transformers import Llama4TextConfig

CHUNKED = "chunked_attention"
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
USUAL: dict[str, Any] = {
    "kind": Llama4TextConfig,
    "head_dim": D_HEAD,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 21,
    "num_hidden_layers": 3,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": WINDOW,
    "floor_scale": 7,
    "attn_scale": 0.6,
}
CONFIGS: dict[str, Draw] = {
    "usual": partial(draw, rope_parameters=LLAMA3, tie_word_embeddings=False, **USUAL),
    "interleaved": partial(
        wide, interleave_moe_layer_step=2, attention_bias=True, **USUAL | {"num_experts_per_tok": 2}
    ),
    "plain": partial(
        draw,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        tie_word_embeddings=True,
        no_rope_layers=[0, 1, 1],
        layer_types=[CHUNKED, "full_attention", CHUNKED],
        **USUAL,
    ),
}

CASE = ParityCase(
    family="llama4_text",
    configs=CONFIGS,
    inert_weights={"blocks.1.attention.body.k.bias": "without positions it adds the same to every score of a query"},
)
