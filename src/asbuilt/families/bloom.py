"""The bloom family: ALiBi instead of positions, a LayerNorm after the embedding, q, k and v stored head by head.

BigScience 2022 (arXiv 2211.05100); ALiBi: Press et al. 2021 (arXiv 2108.12409). Published files lack `transformer.`.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Only, Size, depth, eps, tied
from asbuilt.families.shared.names import FUSED_STEMS, Fused, Names, by_key_head
from asbuilt.spec import Alibi, LayerNorm, Model
from asbuilt.spec.part import LARGEST_SIZE


def build(*, eps: float = 1e-5, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes; d_ff is 4 * d_model."""
    made = sized(sizes, activation="gelu_tanh", tied=True)
    norm = LayerNorm(d=made.d_model, eps=eps)
    attention = made.attention(bias=True, output_bias=True, positions=Alibi(n_heads=made.n_heads))
    return made.model((pre_norm(attention, made.plain(True), norm),) * made.n_layers, norm, embedding_norm=norm)


FAMILY = Family(
    name="bloom",
    prefix="transformer.",
    heads=("BloomForCausalLM",),
    keys=(  # defaults as in transformers' BloomConfig
        # d_ff is 4 times that
        Size("hidden_size", "d_model", default=64, also=("n_embed",), most=LARGEST_SIZE // 4),
        Size("n_head", "n_heads", default=8, also=("num_attention_heads",), divides="d_model"),
        Size("vocab_size", "n_vocab", default=250880),
        depth("n_layer", 2, "num_hidden_layers"),
        Size("seq_length", "max_positions", default=2048),  # no limit of the model's, what it was trained on
        eps("layer_norm_epsilon", 1e-5),
        tied(True),
        Irrelevant(
            "read by the code that trained the model only",
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
        ),
        Irrelevant("only slices the same products", "slow_but_exact"),
        Only("apply_residual_connection_post_layernorm", False, reason="residuals after the norm are not supported"),
        Only(
            "n_inner",
            None,
            lambda values: 4 * values["d_model"],
            reason="the feed-forward is 4 times as wide as the stream",
        ),
    ),
    build=build,
    names=Names(
        stems=FUSED_STEMS,
        outside={
            "embedding": "transformer.word_embeddings",
            "embedding_norm": "transformer.word_embeddings_layernorm",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layers="transformer.h",
        fused={"self_attention.query_key_value": Fused.qkv(by_key_head)},
        ignored={},
    ),
)
