"""The cohere family: attention and gated feed-forward in parallel on one LayerNorm without bias, logits scaled.

Command R (Cohere 2024, the model card of c4ai-command-r-v01). RoPE pairs adjacent numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, parallel_block, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Number, eps
from asbuilt.families.shared.names import ATTENTION, GATED, QK_NORMS, Names, in_parallel
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import Block, LayerNorm, Model


def build(
    *,
    windows: Sequence[int | None] = (),
    eps: float = 1e-5,
    bias: bool = False,
    logit_scale: float = 0.0625,
    head_norms: bool = False,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these sizes; `bias` is the attention's.

    With `head_norms` q and k have a LayerNorm with gains for each head. With `windows`, one for each layer, those that
    have none have no RoPE either.
    """
    made = sized(sizes)
    norm, normed = LayerNorm(d=made.d_model, eps=eps, bias=False), made.head_norms(eps) if head_norms else {}

    def block(window: int | None) -> Block:
        rope = window is not None or not windows
        attention = made.attention(rope=rope, adjacent=True, bias=bias, output_bias=bias, window=window, **normed)
        return parallel_block(attention, made.gated(), norm)

    every = windows or (None,) * made.n_layers
    kinds = {window: block(window) for window in set(every)}
    return made.model(tuple(kinds[window] for window in every), norm, logit_scale=logit_scale)


LOGIT_SCALE = Number("logit_scale", "logit_scale", default=0.0625)

FAMILY = Family(
    name="cohere",
    heads=("CohereForCausalLM",),
    padding=0,
    keys=(  # defaults as in transformers' CohereConfig
        *sizes(n_vocab=256000, d_model=8192, d_ff=22528, n_layers=40, n_heads=64, context=8192, theta=5e5, ties=True),
        eps("layer_norm_eps", 1e-5),
        ATTENTION_BIAS,
        LOGIT_SCALE,
        Irrelevant("the context of long texts; max_position_embeddings is the one that is read", "model_max_length"),
        Flag("use_qk_norm", "head_norms", default=False, null=False),
    ),
    build=build,
    names=Names(stems={"parallel.norm": "input_layernorm"} | in_parallel(ATTENTION | GATED | QK_NORMS)),
)
