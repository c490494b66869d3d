"""The cohere family: attention and gated feed-forward side by side on one LayerNorm without bias, logits scaled.

Command R (Cohere 2024, the model card of c4ai-command-r-v01). Rotary positions turn adjacent numbers of a head.
"""

from __future__ import annotations

from asbuilt.families.shared.dimensions import Dimensions, side_by_side
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Number, Only, eps
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import LayerNorm, Model

STEMS = {"parallel.norm": "input_layernorm"}
STEMS |= {f"parallel.body.attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
STEMS |= {f"parallel.body.ffn.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}


def build(dimensions: Dimensions, *, eps: float = 1e-5, bias: bool = False, logit_scale: float = 0.0625) -> Model:
    """Returns the model of these dimensions, pairs of adjacent numbers turning; `bias` is the attention's."""
    norm = LayerNorm(d=dimensions.d_model, eps=eps, bias=False)
    attention = dimensions.attention(adjacent=True, bias=bias, output_bias=bias)
    block = side_by_side(attention, dimensions.gated(), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm, logit_scale=logit_scale)


FAMILY = Family(
    name="cohere",
    heads=("CohereForCausalLM",),
    keys=(  # defaults as in transformers' CohereConfig
        sizes(
            n_vocab=256000, d_model=8192, d_ff=22528, n_layers=40, n_heads=64, context=8192, theta=500000.0, ties=True
        ),
        eps("layer_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Number("logit_scale", "logit_scale", default=0.0625),
        # in published configs; transformers reads none of these
        Irrelevant("the context of long texts; max_position_embeddings is the one that is read", "model_max_length"),
        Irrelevant("only slices the same products", "pretraining_tp"),
        Only("use_qk_norm", False, None, reason="norms with weights of each head's own are not read in this family"),
    ),
    build=build,
    names=Names(stems=STEMS),
)
