"""The gptj family: attention without biases beside a feed-forward with, on one LayerNorm; RoPE on adjacent numbers.

GPT-J-6B (Wang and Komatsuzaki 2021, the model card and published code). The head has a bias.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.gpt2 import MASKS, SUMMARY
from asbuilt.families.shared.dimensions import Sizes, parallel_block, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only, Size, activation, depth, eps, tied
from asbuilt.families.shared.names import Names, in_parallel
from asbuilt.families.shared.sizes import EVEN, DerivedHeadWidth, four_times
from asbuilt.spec import LayerNorm, Model, Rotary
from asbuilt.spec.part import LARGEST_SIZE

STEMS = {
    **{f"attention.body.{part}": f"attn.{part}_proj" for part in "qkv"},
    "attention.body.o": "attn.out_proj",
    "ffn.body.up": "mlp.fc_in",
    "ffn.body.down": "mlp.fc_out",
}
OUTSIDE = {"embedding": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"}


def build(*, d_rotary: int, eps: float = 1e-5, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes; RoPE turns the first `d_rotary` numbers of a head."""
    made = sized({**sizes, "rotary": Rotary(d_rotary=d_rotary)}, activation="gelu_tanh")
    norm = LayerNorm(d=made.d_model, eps=eps)
    block = parallel_block(made.attention(adjacent=True), made.plain(True), norm)
    return made.model((block,) * made.n_layers, norm, head_bias=True)


FAMILY = Family(
    name="gptj",
    prefix="transformer.",
    heads=("GPTJForCausalLM",),
    keys=(  # defaults as in transformers' GPTJConfig
        Size("n_embd", "d_model", default=4096, also=("hidden_size",), most=LARGEST_SIZE // 4),  # d_ff is 4 times that
        Size("n_head", "n_heads", default=16, also=("num_attention_heads",)),
        DerivedHeadWidth(),
        Size(
            "rotary_dim",
            "d_rotary",
            default=64,
            most=lambda values: values["d_head"],
            must=(lambda values: values["d_rotary"] % 2 == 0, EVEN),
            at="rotary.d_rotary",
        ),
        Size("n_positions", "max_positions", default=2048, also=("max_position_embeddings", "n_ctx")),
        Size("vocab_size", "n_vocab", default=50400),
        depth("n_layer", 28, "num_hidden_layers"),
        Size(
            "n_inner",
            "d_ff",
            default=four_times,
            null=four_times,
            at=lambda parts: None if parts.d_ff == 4 * parts.d_model else parts.d_ff,
        ),
        eps("layer_norm_epsilon", 1e-5),
        activation("activation_function", "gelu_new", tanh="gelu_new"),
        tied(False),
        Only("rotary", True, reason="this family has RoPE"),
        Only("scale_attn_weights", True, reason="scores are always scaled in this family"),
        SUMMARY,
    ),
    build=build,
    names=Names(
        stems=in_parallel(STEMS) | {"parallel.norm": "ln_1"},
        outside=OUTSIDE,
        layers="transformer.h",
        ignored=MASKS,
    ),
)
