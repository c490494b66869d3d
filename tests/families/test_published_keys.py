"""Keys that published configs carry beside those that transformers' classes have today: known, and without effect."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config

LLAMA4_TEXT = {"attn_temperature_tuning": 4, "cache_implementation": "hybrid", "_attn_implementation_autoset": True,
               "for_llm_compressor": False}  # fmt: skip
KEYS: list[tuple[str, dict[str, Any]]] = [
    ("gemma-2-2b", {"sliding_window_size": 4096, "cache_implementation": "hybrid", "_attn_implementation": "eager"}),
    ("starcoder2-3b", {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True,
                       "scale_attn_weights": True, "layer_norm_epsilon": 1e-5}),
    ("transformer-base", {"_num_labels": 3, "add_bias_logits": False, "normalize_embedding": False}),
    ("switch-base-8", {"batch_prioritized_routing": False, "num_selected_experts": 1}),
    ("clip-vit-base-patch32", {"text_config": {"tie_word_embeddings": True},
                               "vision_config": {"tie_word_embeddings": True, "num_beams": 1}}),
    ("llama-4-scout", {"text_config": LLAMA4_TEXT, "vision_config": {"_attn_implementation_autoset": True}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys"), KEYS, ids=[name for name, _ in KEYS])
def test_keys_of_published_configs_are_known(name: str, keys: dict[str, Any]) -> None:
    entry = find(name)
    config = write_config(entry.family, entry.spec(), {}, None)
    more = {key: {**config[key], **value} if isinstance(value, dict) else value for key, value in keys.items()}
    assert read_config(config | more, name).spec == entry.spec()


@pytest.mark.parametrize(("name", "key", "value"), [
    ("switch-base-8", "num_selected_experts", 2), ("switch-base-8", "batch_prioritized_routing", True),
    ("starcoder2-3b", "scale_attn_weights", False),
])  # fmt: skip
def test_those_that_would_matter_are_refused(name: str, key: str, value: object) -> None:
    entry = find(name)
    with pytest.raises(InputError, match=key):
        read_config(write_config(entry.family, entry.spec(), {}, None) | {key: value}, name)


@pytest.mark.parametrize(("said", "warmed"), [(4, True), (0, False), (True, True), (False, False)])
def test_llama4_says_a_number_for_true(said: object, warmed: bool) -> None:
    entry = find("llama-4-scout-text")
    config = write_config(entry.family, entry.spec(), {}, None)
    spec = read_config(config | {"attn_temperature_tuning": said}, entry.name).spec
    assert (spec == entry.spec()) == warmed
