"""The gpt_neox family: rotary positions on part of each head, attention and feed-forward side by side, each normed.

GPT-NeoX-20B (Black et al. 2022, arXiv 2204.06745) and Pythia (Biderman et al. 2023, arXiv 2304.01373). Both branches
read the block's input, each through a LayerNorm of its own; q, k and v are stored as one tensor, head by head.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, activation, eps
from asbuilt.families.shared.names import Fused, Names, by_key_head
from asbuilt.families.shared.rotary import Rope, shared_out
from asbuilt.families.shared.sizes import SharedOut, size_keys
from asbuilt.spec import Activation, LayerNorm, Model

STEMS = {
    "attention.norm": "input_layernorm",
    "attention.body.o": "attention.dense",
    "ffn.norm": "post_attention_layernorm",
    "ffn.body.up": "mlp.dense_h_to_4h",
    "ffn.body.down": "mlp.dense_4h_to_h",
}


def build(
    *,
    eps: float = 1e-5,
    activation: Activation = "gelu",
    bias: bool = True,
    parallel: bool = True,
    tied: bool = False,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these dimensions; `parallel` lets both branches read the block's input."""
    made = sized(activation=activation, tied=tied, **sizes, d_head=sizes["d_model"] // sizes["n_heads"])
    norm = LayerNorm(d=made.d_model, eps=eps)
    block = pre_norm(made.attention(bias=bias, output_bias=bias), made.plain(True), norm, parallel=parallel)
    return made.model((block,) * made.n_layers, norm)


FAMILY = Family(
    name="gpt_neox",
    prefix="gpt_neox.",
    heads=("GPTNeoXForCausalLM",),
    keys=(  # defaults as in transformers' GPTNeoXConfig
        *size_keys(
            n_vocab=50432,
            d_model=6144,
            d_ff=24576,
            n_layers=44,
            n_heads=64,
            context=2048,
            but={
                "d_head": SharedOut(),
                "rotary": Rope(partial=0.25, outside=("rotary_emb_base", "rotary_pct"), width=shared_out),
                "n_kv_heads": None,
                "activation": activation(default="gelu", tanh="gelu_new"),
            },
        ),
        eps("layer_norm_eps", 1e-5),
        Flag("attention_bias", "bias", default=True),
        Flag("use_parallel_residual", "parallel", default=True, at=lambda parts: parts.last.parallel),
    ),
    build=build,
    names=Names(
        stems=STEMS,
        outside={"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        layers="gpt_neox.layers",
        fused={"attention.query_key_value": Fused.qkv(by_key_head)},
        ignored={
            r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)": "the causal mask, stored as a buffer",
            r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq": "rotary frequencies, computed from the config",
        },
    ),
)
