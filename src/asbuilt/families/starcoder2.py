"""The starcoder2 family: LayerNorm, a feed-forward part of two matrices, biases everywhere, one window or none.

Lozhkov et al. 2024 (arXiv 2402.19173).
"""

from __future__ import annotations

from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Only, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.sizes import sizes, window
from asbuilt.spec import LayerNorm, Model


def build(dimensions: Dimensions, *, eps: float = 1e-5, bias: bool = True, window: int | None = None) -> Model:
    """Returns the model of these dimensions; every layer has the window, every matrix but the head a bias if asked."""
    norm = LayerNorm(d=dimensions.d_model, eps=eps)
    attention = dimensions.attention(bias=bias, output_bias=bias, window=window)
    block = pre_norm(attention, dimensions.plain(bias), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


FAMILY = Family(
    name="starcoder2",
    heads=("Starcoder2ForCausalLM",),
    keys=(  # defaults as in transformers' Starcoder2Config
        sizes(
            n_vocab=49152,
            d_model=3072,
            d_ff=12288,
            n_layers=30,
            n_heads=24,
            n_kv_heads=2,
            context=4096,
            act="gelu_pytorch_tanh",
            ties=True,
        ),
        eps("norm_epsilon", 1e-5),
        Flag("use_bias", "bias", default=True),
        window(None),
        Irrelevant("training only", "residual_dropout", "embedding_dropout"),
        Irrelevant(
            "of the code this family grew from; norm_epsilon is what is read",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "layer_norm_epsilon",
        ),
        Only("scale_attn_weights", True, reason="scores are always scaled in this family"),
        # in the published configs; transformers no longer reads the two
        Only("mlp_type", "default", reason="only the plain feed-forward part is read in this family"),
        Only("norm_type", "layer_norm", reason="only LayerNorm is read in this family"),
        Only("layer_types", None, reason="all layers of this family are alike"),
    ),
    build=build,
    names=Names(stems=NORMS | ATTENTION | {"ffn.body.up": "mlp.c_fc", "ffn.body.down": "mlp.c_proj"}),
)
