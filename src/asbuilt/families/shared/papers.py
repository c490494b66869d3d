"""What families known only from papers share: sizes under the usual keys, and no names of tensors."""

from __future__ import annotations

from asbuilt.errors import InputError
from asbuilt.families.shared.common import MOST_LAYERS
from asbuilt.families.shared.key import Key, Must, Size, tied
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Model


def size_keys(*, d_model: Must | None = None, d_head: Must | None = None) -> tuple[Key, ...]:
    """Returns the keys of the sizes, which have to be such; contexts are 2,048 where not said."""
    return (
        Size("vocab_size", "n_vocab"),
        Size("hidden_size", "d_model", must=d_model),
        Size("num_hidden_layers", "n_layers", most=MOST_LAYERS),
        Size("num_attention_heads", "n_heads"),
        Size("head_dim", "d_head", must=d_head),
        Size("intermediate_size", "d_ff"),
        Size("max_position_embeddings", "max_positions", default=2048),
        tied(True),
    )


def no_tensors(spec: Model, family: str) -> TensorTable:
    """Raises InputError that says why there is no table of tensors."""
    raise InputError(
        "no checkpoints of this family were published, so its tensors have no names",
        field="family",
        value=family,
        fix="write the spec as JSON",
    )
