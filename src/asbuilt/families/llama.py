"""The llama family: RMSNorm before each branch, rotary grouped-query attention, gated feed-forward, no positions table.

Llama 1 to 3.3, SmolLM2, TinyLlama and others publish under `model_type: llama`. Touvron et al. 2023
(arXiv 2302.13971, 2307.09288); names on disk as on the hub.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Only, Size
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, RMS_EPS, size_keys
from asbuilt.spec import Activation, Model, RMSNorm


def build(
    *,
    eps: float = 1e-5,
    activation: Activation = "silu",
    bias: bool = False,
    output_bias: bool | None = None,
    mlp_bias: bool = False,
    tied: bool = False,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these dimensions; d_head is rotary.d_rotary, n_kv_heads None means n_heads.

    Queries, keys and values have a `bias`, and what leads back too unless `output_bias` says otherwise.
    """
    made = sized(activation=activation, tied=tied, **sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    attention = made.attention(bias=bias, output_bias=bias if output_bias is None else output_bias)
    return made.model((pre_norm(attention, made.gated(mlp_bias), norm),) * made.n_layers, norm)


CONTEXT = Size("max_position_embeddings", "max_positions", default=2048, also=("max_sequence_length",))

FAMILY = Family(
    name="llama",
    heads=("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second in the earliest conversions
    keys=(  # defaults as in transformers' LlamaConfig
        *size_keys(
            n_vocab=32000,
            d_model=4096,
            d_ff=11008,
            n_layers=32,
            n_heads=32,
            context=2048,
            but={"max_positions": CONTEXT},
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        MLP_BIAS,
        Irrelevant("only slices the same products", "pretraining_tp"),
        Irrelevant("a note of the converter's", "is_llama_config"),
        Only("activation", "swiglu", reason="hidden_act says it, and the feed-forward part is gated"),
        Only("qk_layernorm", False, reason="queries and keys are not normed in this family"),
        Only("use_qk_norm", False, reason="queries and keys are not normed in this family"),
        Only("rope_interleaved", False, None, reason="llama turns halves, not adjacent pairs"),
    ),
    build=build,
    names=Names(stems=STEMS),
)
