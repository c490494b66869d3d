"""The starcoder2 family: llama with LayerNorm, a feed-forward of two matrices, biases everywhere, one window or none.

Lozhkov et al. 2024 (arXiv 2402.19173).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import llama
from asbuilt.families.shared.key import Flag, Irrelevant, Only, but, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.sizes import sizes, window
from asbuilt.spec import LayerNorm

FAMILY = replace(
    llama.FAMILY,
    name="starcoder2",
    heads=("Starcoder2ForCausalLM",),
    keys=(  # defaults as in transformers' Starcoder2Config
        *but(
            sizes(n_vocab=49152, d_model=3072, d_ff=12288, n_layers=30, n_heads=24, n_kv_heads=2, context=4096),
            activation={"default": "gelu_pytorch_tanh"},
            tied={"default": True},
        ),
        eps("norm_epsilon", 1e-5),
        Flag("use_bias", "bias", default=True),
        window(None),
        Irrelevant("training only", "residual_dropout", "embedding_dropout"),
        Irrelevant("left by older code, which read what norm_epsilon says now", "layer_norm_epsilon"),
        Irrelevant("how it is computed, not what", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        Only("scale_attn_weights", True, reason="scores are always scaled in this family"),
        Only("mlp_type", "default", reason="only the plain feed-forward part is read in this family"),
        Only("norm_type", "layer_norm", reason="only LayerNorm is read in this family"),
        Only("layer_types", None, reason="all layers of this family are alike"),
    ),
    build=lambda bias, **values: llama.build(bias=bias, mlp_bias=bias, norms=LayerNorm, gated=False, **values),
    names=Names(stems=NORMS | ATTENTION | {"ffn.body.up": "mlp.c_fc", "ffn.body.down": "mlp.c_proj"}),
)
