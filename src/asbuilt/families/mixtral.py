"""The mixtral family: mistral with a mixture of experts; a token's experts are weighted by a softmax over those chosen.

Jiang et al. 2024 (arXiv 2401.04088).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Only, but, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.sizes import NullableHeadWidth, sizes, window

STEMS = NORMS | ATTENTION | {"ffn.body.router": "block_sparse_moe.gate"}
STORED = {"gate": "w1", "up": "w3", "down": "w2"}
EXPERTS = {part: f"block_sparse_moe.experts.{{}}.{name}.weight" for part, name in STORED.items()}

FAMILY = replace(
    llama.FAMILY,
    name="mixtral",
    heads=("MixtralForCausalLM",),
    keys=(  # defaults as in transformers' MixtralConfig
        *but(
            sizes(n_vocab=32000, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, context=131072),
            d_head=NullableHeadWidth(),
            rotary={"theta": 1e6},
        ),
        experts.TRAINING,
        experts.routed(*experts.counts("num_local_experts", "num_experts", n_experts=8, top_k=2), renormalise=True),
        eps("rms_norm_eps", 1e-5),
        window(None),
        Only("attention_bias", False, None, reason="this family has no biases"),
    ),
    names=Names(stems=STEMS, experts=EXPERTS),
)
