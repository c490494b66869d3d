"""The qwen2 family: llama with biases on q, k and v, and sliding windows from a given layer on.

Qwen 1.5, 2 and 2.5 publish under `model_type: qwen2`. Yang et al. 2024 (arXiv 2407.10671, 2412.15115).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared.key import Only
from asbuilt.families.shared.sizes import RMS_EPS, DualChunks, LaterWindows, sizes

FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    heads=("Qwen2ForCausalLM",),
    keys=(  # defaults as in transformers' Qwen2Config
        *sizes(n_vocab=151936, d_model=4096, d_ff=22016, n_layers=32, n_heads=32, n_kv_heads=32, context=32768),
        RMS_EPS,
        LaterWindows(),
        DualChunks(),
        Only("attention_bias", True, reason="q, k and v have biases in this family, whatever a config says"),
        Only("qkv_bias", True, reason="q, k and v have biases in this family, whatever a config says"),
        Only("mlp_bias", False, reason="the feed-forward part has no biases in this family"),
        Only("use_mrope", False, reason="positions of images are not supported in this family"),
    ),
    build=partial(llama.build, bias=True, output_bias=False),
)
