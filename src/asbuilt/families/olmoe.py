"""The olmoe family: experts weighted by a softmax over all of them, and norms over the queries and keys of all heads.

Muennighoff et al. 2024 (arXiv 2409.02060). The published 7B has experts 1024 wide; the class default is 2048.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Only, eps
from asbuilt.families.shared.names import ATTENTION, EXPERTS, NORMS, QK_NORMS, ROUTER, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes, whole_width

FAMILY = replace(
    llama.FAMILY,
    name="olmoe",
    heads=("OlmoeForCausalLM",),
    padding=1,
    keys=(  # defaults as in transformers' OlmoeConfig
        *sizes(n_vocab=50304, d_model=2048, d_ff=2048, n_layers=16, n_heads=16, context=4096),
        whole_width("the query norm is hidden_size wide"),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=64, top_k=8), experts.renormalise()
        ),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Only("clip_qkv", None, reason="clipped queries, keys and values are not supported"),
    ),
    build=partial(llama.build, whole_norms=True),
    names=Names(stems=NORMS | ATTENTION | QK_NORMS | ROUTER, experts=EXPERTS),
)
