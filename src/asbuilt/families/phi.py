"""The phi family: attention and feed-forward in parallel on one LayerNorm, RoPE on parts of heads, biases throughout.

Phi-1, 1.5 and 2: Gunasekar et al. 2023 (arXiv 2306.11644), Li et al. 2023 (arXiv 2309.05463). The head has a bias too.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, parallel_block, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Only, activation, but, eps
from asbuilt.families.shared.names import ATTENTION, OUTSIDE, Names, in_parallel
from asbuilt.families.shared.sizes import DerivedHeadWidth, sizes
from asbuilt.spec import LayerNorm, Model

STEMS = ATTENTION | {
    "attention.body.o": "self_attn.dense",
    "attention.body.q_norm": "self_attn.q_layernorm",
    "attention.body.k_norm": "self_attn.k_layernorm",
    "ffn.body.up": "mlp.fc1",
    "ffn.body.down": "mlp.fc2",
}


def build(*, eps: float = 1e-5, head_norms: bool = False, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes; `head_norms` norm each head's queries and keys."""
    made = sized(sizes, activation="gelu_tanh")
    norm, per_head = LayerNorm(d=made.d_model, eps=eps), LayerNorm(d=made.head_width, eps=eps) if head_norms else None
    attention = made.attention(bias=True, output_bias=True, q_norm=per_head, k_norm=per_head)
    block = parallel_block(attention, made.plain(True), norm)
    return made.model((block,) * made.n_layers, norm, head_bias=True)


FAMILY = Family(
    name="phi",
    heads=("PhiForCausalLM",),
    keys=(  # defaults as in transformers' PhiConfig
        *but(
            sizes(n_vocab=51200, d_model=2048, d_ff=8192, n_layers=24, n_heads=32, context=2048),
            d_head=DerivedHeadWidth(),
            rotary={"partial": 0.5},
            activation=activation(default="gelu_new", tanh="gelu_new"),
        ),
        eps("layer_norm_eps", 1e-5),
        Flag("qk_layernorm", "head_norms", default=False),
        Only("head_dim", lambda values: values["d_head"], reason="heads are hidden_size / num_attention_heads wide"),
        Only("attention_bias", True, False, reason="all maps of this family have biases, whatever it says"),
        Only(
            "rotary_dim",
            lambda values: values["rotary"].d_rotary,
            reason="an older spelling of partial_rotary_factor",
        ),
    ),
    build=build,
    names=Names(
        stems=in_parallel(STEMS) | {"parallel.norm": "input_layernorm"},
        outside=OUTSIDE | {"norm": "model.final_layernorm"},
    ),
)
