"""The gpt_neox family: RoPE on part of each head, attention and feed-forward in parallel, each normed.

GPT-NeoX-20B (Black et al. 2022, arXiv 2204.06745) and Pythia (Biderman et al. 2023, arXiv 2304.01373). Both branches
read the block's input, each through a LayerNorm of its own; q, k and v are stored as one tensor, head by head.
"""

from __future__ import annotations

from functools import partial

from asbuilt.families import llama
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, activation, but, eps
from asbuilt.families.shared.names import FUSED_STEMS, Fused, Names, by_key_head
from asbuilt.families.shared.sizes import DerivedHeadWidth, sizes
from asbuilt.spec import LayerNorm

FAMILY = Family(
    name="gpt_neox",
    prefix="gpt_neox.",
    heads=("GPTNeoXForCausalLM",),
    keys=(  # defaults as in transformers' GPTNeoXConfig
        *but(
            sizes(n_vocab=50432, d_model=6144, d_ff=24576, n_layers=44, n_heads=64, context=2048),
            d_head=DerivedHeadWidth(),
            rotary={"partial": 0.25, "outside": ("rotary_emb_base", "rotary_pct")},
            n_kv_heads=None,
            activation=activation(default="gelu", tanh="gelu_new"),
        ),
        eps("layer_norm_eps", 1e-5),
        Flag("attention_bias", "bias", default=True),
        Flag("use_parallel_residual", "parallel", default=True, at="last.parallel"),
    ),
    build=partial(llama.build, norms=LayerNorm, gated=False, bias=True, mlp_bias=True, parallel=True),
    names=Names(
        stems=FUSED_STEMS | {"attention.body.o": "attention.dense"},
        outside={"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        layers="gpt_neox.layers",
        fused={"attention.query_key_value": Fused.qkv(by_key_head)},
        ignored={
            r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)": "the causal mask, stored as a buffer",
            r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq": "RoPE's frequencies, computed from the config",
        },
    ),
)
