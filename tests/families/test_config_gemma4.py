"""The gemma4 and gemma4_text readers: which layers share keys, both spellings of their heads, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.spec import Attention, Model

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 8,
}


def attentions(**changes: object) -> list[Attention]:
    spec: Model = read_config(SIZES | changes, "x").spec
    return [block.branches[0].body for block in spec.blocks if isinstance(block.branches[0].body, Attention)]


def test_the_last_layers_read_the_last_layer_of_their_kind_before_them() -> None:
    found = attentions(num_kv_shared_layers=3)
    assert [one.kv_name for one in found] == [None, "sliding", "full", None, None, None]
    assert [one.kv_from for one in found] == [None, None, None, "sliding", "sliding", "full"]
    for n in (4, 6, 7):  # then no full layer, or none at all, is before them
        with pytest.raises(InputError, match="num_kv_shared_layers: must be fewer"):
            attentions(num_kv_shared_layers=n)


def test_heads_of_full_layers_are_said_by_kind_or_by_layer() -> None:
    by_kind = attentions(attention_k_eq_v=True, num_global_key_value_heads=1)
    own = {"head_dim": 32, "num_key_value_heads": 1}
    by_layer = {key: value for key, value in SIZES.items() if key != "global_head_dim"}
    by_layer |= {"attention_k_eq_v": True, "per_layer_config": {"02": own, "5": own}}
    spec = read_config(by_layer, "x").spec
    assert [block.branches[0].body for block in spec.blocks] == by_kind
    assert [(one.d_head, one.n_kv_heads, one.values_are_keys) for one in by_kind[1:3]] == [
        (16, 2, False),
        (32, 1, True),
    ]
    for wrong in ({"02": own}, {"0": own, "2": own, "5": own}, {"9": own}, {"x": own}, [own]):
        with pytest.raises(InputError, match="per_layer_config"):
            read_config(by_layer | {"per_layer_config": wrong}, "x")


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="layer_types: must be a list that ends in full_attention"):
        attentions(layer_types=[FULL] * 5 + [SLIDING])
    with pytest.raises(InputError, match="use_bidirectional_attention"):
        attentions(use_bidirectional_attention="all")
    whole = {"model_type": "gemma4", "text_config": SIZES, "vision_config": {"use_clipped_linears": True}}
    with pytest.raises(InputError, match="use_clipped_linears: clamped linear maps are not supported"):
        read_config(whole, "x")
    with pytest.raises(InputError, match="audio_config: sounds are not read"):
        read_config(whole | {"audio_config": {}}, "x")
