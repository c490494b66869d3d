"""What families known from papers alone share: sizes under the usual keys, and no tensors that have names."""

from __future__ import annotations

from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import MOST_LAYERS
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import Attention, FeedForward, Model, TiedHead


def read_sizes(reader: ConfigReader) -> dict[str, Any]:
    """Returns the sizes by the names that the families' `build` has for them; contexts are 2,048 where not said."""
    return {
        "n_vocab": reader.size("vocab_size"),
        "d_model": reader.size("hidden_size"),
        "n_layers": reader.size("num_hidden_layers", most=MOST_LAYERS),
        "n_heads": reader.size("num_attention_heads"),
        "d_head": reader.size("head_dim"),
        "d_ff": reader.size("intermediate_size"),
        "max_positions": reader.size("max_position_embeddings", default=2048),
        "tied": reader.flag("tie_word_embeddings", default=True),
        "name": reader.where,
    }


def write_sizes(spec: Model, family: str, attention: Attention, ffn: FeedForward) -> dict[str, Any]:
    """Returns the keys that `read_sizes` reads, of the first layer."""
    return {
        "model_type": family,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "head_dim": attention.d_head,
        "intermediate_size": ffn.d_ff,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }


def no_tensors(family: str) -> InputError:
    """Returns the InputError that says why there is no table of tensors."""
    return InputError(
        "no checkpoints of this family were published, so its tensors have no names",
        field="family",
        value=family,
        fix="write the spec as JSON",
    )
