"""The olmoe family: experts weighted by softmax over all of them, and norms over all heads' queries and keys together.

Muennighoff et al. 2024 (arXiv 2409.02060). The published 7B has experts 1024 wide; the class default is 2048.
"""

from __future__ import annotations

from asbuilt.families.shared import experts
from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Only, eps
from asbuilt.families.shared.names import ATTENTION, EXPERTS, NORMS, QK_NORMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes
from asbuilt.spec import Model, RMSNorm, Router


def build(dimensions: Dimensions, router: Router, *, eps: float = 1e-5, bias: bool = False) -> Model:
    """Returns the model of these dimensions; `bias` is of q, k, v and o."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    attention = dimensions.whole_normed_attention(bias, eps)
    block = pre_norm(attention, experts.mixture(dimensions, router), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


FAMILY = Family(
    name="olmoe",
    heads=("OlmoeForCausalLM",),
    keys=(  # defaults as in transformers' OlmoeConfig
        sizes(n_vocab=50304, d_model=2048, d_ff=2048, n_layers=16, n_heads=16, context=4096),
        Check(
            "head_dim",
            (
                lambda values: values["dimensions"].d_query == values["dimensions"].d_model,
                "hidden_size / num_attention_heads: the query norm is hidden_size wide",
            ),
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=64, top_k=8), experts.renormalise()
        ),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Only("clip_qkv", None, reason="clipped queries, keys and values are not read"),
    ),
    build=build,
    names=Names(stems=NORMS | ATTENTION | QK_NORMS | {"ffn.body.router": "mlp.gate"}, experts=EXPERTS),
)
