"""The qwen3 family: llama with an RMSNorm over each head's query and key, and qwen2's windows.

Yang et al. 2025 (arXiv 2505.09388). Heads are 128 wide whatever hidden_size / num_attention_heads is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared.key import Only
from asbuilt.families.shared.names import QK_NORMS, STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, DualChunks, LaterWindows, sizes

# Keys that repeat what the family always is, or that only other programs read.
REDUNDANT = (
    Only("qkv_bias", lambda values: values["bias"], reason="attention_bias says it too"),
    Only("use_qk_norm", True, reason="each head's queries and keys are normed in this family"),
    DualChunks(),
)
FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    heads=("Qwen3ForCausalLM",),
    keys=(  # defaults as in transformers' Qwen3Config
        *sizes(
            n_vocab=151936, d_model=4096, d_ff=22016, n_layers=32, n_heads=32, n_kv_heads=32, d_head=128, context=32768
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        *REDUNDANT,
        LaterWindows(),
    ),
    build=partial(llama.build, head_norms=True),
    names=Names(stems=STEMS | QK_NORMS),
)
