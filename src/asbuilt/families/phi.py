"""The phi family: attention and feed-forward side by side on one LayerNorm, parts of heads turned, biases throughout.

Phi-1, 1.5 and 2: Gunasekar et al. 2023 (arXiv 2306.11644), Li et al. 2023 (arXiv 2309.05463). The head has a bias too.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, side_by_side, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Only, activation, eps
from asbuilt.families.shared.names import OUTSIDE, Names
from asbuilt.families.shared.rotary import Rope, shared_out
from asbuilt.families.shared.sizes import SharedOut, size_keys
from asbuilt.spec import Activation, LayerNorm, Model

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
STEMS = {
    "parallel.norm": "input_layernorm",
    **{f"parallel.body.attention.{part}": f"self_attn.{name}" for part, name in NAMES.items()},
    "parallel.body.ffn.up": "mlp.fc1",
    "parallel.body.ffn.down": "mlp.fc2",
}


def build(
    *,
    eps: float = 1e-5,
    activation: Activation = "gelu_tanh",
    head_norms: bool = False,
    tied: bool = False,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these dimensions; d_head is d_model / n_heads, n_kv_heads None means n_heads.

    `head_norms` normalises each head's queries and keys.
    """
    made = sized(activation=activation, tied=tied, **sizes, d_head=sizes["d_model"] // sizes["n_heads"])
    norm, per_head = LayerNorm(d=made.d_model, eps=eps), LayerNorm(d=made.head_width, eps=eps) if head_norms else None
    attention = made.attention(bias=True, output_bias=True, q_norm=per_head, k_norm=per_head)
    block = side_by_side(attention, made.plain(True), norm)
    return made.model((block,) * made.n_layers, norm, head_bias=True)


FAMILY = Family(
    name="phi",
    heads=("PhiForCausalLM",),
    keys=(  # defaults as in transformers' PhiConfig
        *size_keys(
            n_vocab=51200,
            d_model=2048,
            d_ff=8192,
            n_layers=24,
            n_heads=32,
            context=2048,
            but={
                "d_head": SharedOut(),
                "rotary": Rope(partial=0.5, width=shared_out),
                "activation": activation(default="gelu_new", tanh="gelu_new"),
            },
        ),
        eps("layer_norm_eps", 1e-5),
        Flag("qk_layernorm", "head_norms", default=False),
        Only("head_dim", shared_out, reason="heads of this family are hidden_size / num_attention_heads wide"),
        Only("attention_bias", True, False, reason="all maps of this family have biases, whatever it says"),
        Only(
            "rotary_dim",
            lambda values: values["rotary"].d_rotary,
            reason="what partial_rotary_factor says, in an older spelling",
        ),
    ),
    build=build,
    names=Names(stems=STEMS, outside=OUTSIDE | {"norm": "model.final_layernorm"}),
)
