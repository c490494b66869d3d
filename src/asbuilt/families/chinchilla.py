"""Chinchilla: RMSNorm, MLP of two matrices, positions as in Transformer-XL (Hoffmann et al. 2022, arXiv 2203.15556).

As Gopher (Rae et al. 2021, arXiv 2112.11446, section 3.1). Biases, and the two vectors per head that Transformer-XL
adds to queries, are in no published count and are left out; the activation is not published, and GELU is assumed. No
weights were published, so there are no names of tensors: a config of this form is described, costed and built.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only
from asbuilt.families.shared.papers import no_tensors, size_keys
from asbuilt.spec import Model, RelativeProjection, RMSNorm

EVEN = (lambda values: values["d_model"] % 2 == 0, "an even number (a sine and a cosine of each frequency)")


def build(**sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes; every layer projects the distances' sinusoids with a matrix of its own."""
    made = sized(sizes, activation="gelu", tied=True)
    positions = RelativeProjection(d_model=made.d_model, n_heads=made.n_heads, d_head=made.head_width)
    norm = RMSNorm(d=made.d_model)
    block = pre_norm(made.attention(positions=positions), made.plain(), norm)
    return made.model((block,) * made.n_layers, norm)


FAMILY = Family(
    name="chinchilla",
    heads=(),
    keys=(
        Only("relative_position", "transformer-xl", reason="this family projects the sinusoids of distances"),
        *size_keys(d_model=EVEN),
    ),
    build=build,
    names=no_tensors,
)
