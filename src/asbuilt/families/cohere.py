"""The cohere family: attention and gated feed-forward in parallel on one LayerNorm without bias, logits scaled.

Command R (Cohere 2024, the model card of c4ai-command-r-v01). RoPE pairs adjacent numbers of a head.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, parallel_block, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Number, Only, eps
from asbuilt.families.shared.names import ATTENTION, GATED, Names, in_parallel
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import LayerNorm, Model


def build(*, eps: float = 1e-5, bias: bool = False, logit_scale: float = 0.0625, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes; `bias` is the attention's."""
    made = sized(sizes)
    norm = LayerNorm(d=made.d_model, eps=eps, bias=False)
    block = parallel_block(made.attention(adjacent=True, bias=bias, output_bias=bias), made.gated(), norm)
    return made.model((block,) * made.n_layers, norm, logit_scale=logit_scale)


FAMILY = Family(
    name="cohere",
    heads=("CohereForCausalLM",),
    keys=(  # defaults as in transformers' CohereConfig
        *sizes(n_vocab=256000, d_model=8192, d_ff=22528, n_layers=40, n_heads=64, context=8192, theta=5e5, ties=True),
        eps("layer_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Number("logit_scale", "logit_scale", default=0.0625),
        Irrelevant("the context of long texts; max_position_embeddings is the one that is read", "model_max_length"),
        Irrelevant("only slices the same products", "pretraining_tp"),
        Only("use_qk_norm", False, None, reason="norms with weights for each head are not supported"),
    ),
    build=build,
    names=Names(stems={"parallel.norm": "input_layernorm"} | in_parallel(ATTENTION | GATED)),
)
