"""Chinchilla: RMSNorm, MLP of two matrices, positions as in Transformer-XL (Hoffmann et al. 2022, arXiv 2203.15556).

As Gopher (Rae et al. 2021, arXiv 2112.11446, section 3.1). Biases, and the two vectors per head that Transformer-XL
adds to queries, are in no published count and are left out; the activation is not published, and GELU is assumed. No
weights were published, so there are no names of tensors: a config of this form is described, costed and built.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import first_parts, pre_norm
from asbuilt.families.shared.papers import no_tensors, read_sizes, write_sizes
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import MLP, Attention, Head, Model, RelativeProjection, RMSNorm, TiedHead, TokenEmbedding

FAMILY = "chinchilla"


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_head: int,
    d_ff: int,
    max_positions: int,
    tied: bool = True,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; every layer projects the distances' sinusoids with a matrix of its own."""
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_head,
        positions=RelativeProjection(d_model=d_model, n_heads=n_heads, d_head=d_head),
    )
    norm = RMSNorm(d=d_model)
    block = pre_norm(attention, MLP(d_model=d_model, d_ff=d_ff, activation="gelu"), norm)
    return Model(
        name=name,
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(block,) * n_layers,
        norm=norm,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this form says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, ())
    reader.only("relative_position", "transformer-xl", reason="this family projects the sinusoids of distances")
    sizes = read_sizes(reader)
    reader.require("hidden_size", sizes["d_model"] % 2 == 0, "an even number: a sine and a cosine of each frequency")
    spec = build(**sizes)
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = first_parts(spec, FAMILY, MLP)
    config = config_of(write_sizes(spec, FAMILY, attention, ffn), carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Raises InputError: there are no checkpoints of this family."""
    raise no_tensors(FAMILY)
