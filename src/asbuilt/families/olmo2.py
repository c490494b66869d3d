"""The olmo2 family: no norm before a branch but one after it, and an RMSNorm over the queries and keys of all heads.

Walsh et al. 2025 (arXiv 2501.00656).
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.olmo import SIZES
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import eps
from asbuilt.families.shared.names import ATTENTION, GATED, QK_NORMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS
from asbuilt.spec import Block, Branch, Model, RMSNorm

POST_NORMS = {"attention.post_norm": "post_attention_layernorm", "ffn.post_norm": "post_feedforward_layernorm"}


def build(*, eps: float = 1e-5, bias: bool = False, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes."""
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    first = Branch(name="attention", body=made.whole_normed_attention(bias, eps), post_norm=norm)
    block = Block(branches=(first, Branch(name="ffn", body=made.gated(), post_norm=norm)))
    return made.model((block,) * made.n_layers, norm)


FAMILY = Family(
    name="olmo2",
    heads=("Olmo2ForCausalLM",),
    keys=(*SIZES, eps("rms_norm_eps", 1e-5), ATTENTION_BIAS),  # Olmo2Config has OlmoConfig's defaults
    build=build,
    names=Names(stems=POST_NORMS | ATTENTION | GATED | QK_NORMS),
)
