"""PaLM: parallel blocks with one norm, one key/value head, SwiGLU, no biases (Chowdhery et al. 2022, arXiv 2204.02311).

No weights were published, so there are no names of tensors: a config of this form is described, costed and built.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.dimensions import sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only, Size
from asbuilt.families.shared.papers import no_tensors, size_keys
from asbuilt.spec import Block, Branch, LayerNorm, Model, Parallel, Rotary

EVEN = (lambda values: values["d_head"] % 2 == 0, "an even number (RoPE rotates pairs)")


def build(*, d_head: int, **sizes: Any) -> Model:  # noqa: ANN401
    """Returns the model of these sizes; a tied head's logits are scaled by d_model^-0.5 (the paper, section 5)."""
    made = sized(sizes, n_kv_heads=1, rotary=Rotary(d_rotary=d_head), tied=True)
    norm = LayerNorm(d=made.d_model, bias=False)
    body = Parallel(attention=made.attention(), ffn=made.gated())
    block = Block(branches=(Branch(name="both", norm=norm, body=body),))
    return made.model((block,) * made.n_layers, norm, logit_scale=made.d_model**-0.5 if made.tied else 1.0)


FAMILY = Family(
    name="palm",
    heads=(),
    keys=(
        *size_keys(d_head=EVEN),
        Size("num_key_value_heads", "n_kv_heads", default=1, divides="n_heads"),
        Only("bias", False, reason="this family has no biases"),
        Only("parallel_block", True, reason="attention and feed-forward read the same norm in this family"),
        Only("hidden_act", "swiglu", reason="this family has SwiGLU"),
    ),
    build=build,
    names=no_tensors,
)
