"""The gemma4 and gemma4_text readers: which layers share keys, both spellings of their heads, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, Model, VisionLanguageModel, buffers
from asbuilt.spec.linear import maps_by_path

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
    whole = {"model_type": "gemma4", "text_config": SIZES}
    with pytest.raises(InputError, match="audio_config: sounds are not read"):
        read_config(whole | {"audio_config": {}}, "x")


def test_clipped_maps_are_those_of_the_tower() -> None:
    whole = {"model_type": "gemma4", "text_config": SIZES, "vision_config": {"num_hidden_layers": 2}}
    plain = read_config(whole, "x").spec
    reading = read_config(whole | {"vision_config": {"num_hidden_layers": 2, "use_clipped_linears": True}}, "x")
    spec = reading.spec
    assert isinstance(spec, VisionLanguageModel)
    assert {path for path, one in maps_by_path(spec).items() if one.plain.clipped} == {
        f"vision.tower.blocks.{i}.{name}.weight"
        for i in range(2)
        for name in (*(f"attention.body.{x}" for x in "qkvo"), *(f"ffn.body.{x}" for x in ("gate", "up", "down")))
    }
    assert len([*buffers(spec)]) == len([*buffers(plain)]) + 2 * 7 * 4
    assert cost.total_parameters(spec) == cost.total_parameters(plain)
    written = write_config("gemma4", spec, reading.carried, None)
    assert written["vision_config"]["use_clipped_linears"] is True
    one = spec.edit("vision.tower.blocks.1.ffn.body", up=None)
    with pytest.raises(InputError):  # a file says it of all maps at once
        write_config("gemma4", one, {}, None)


def edge(d_model: int, n_kv_heads: int, d_ff: int, n_layers: int, shared: int, every: int, wide: bool) -> Model:
    """The published E2B or E4B without its ears, whose tower is the same."""
    kinds = [FULL if i % every == every - 1 else SLIDING for i in range(n_layers)]
    text = {
        "model_type": "gemma4_text",
        "hidden_size": d_model,
        "num_attention_heads": 8,
        "num_key_value_heads": n_kv_heads,
        "intermediate_size": d_ff,
        "num_hidden_layers": n_layers,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "layer_types": kinds,
    }
    tower = {"use_clipped_linears": True, "standardize": False}
    return read_config({"model_type": "gemma4", "text_config": text, "vision_config": tower}, "x").spec


@pytest.mark.parametrize(
    ("spec", "total", "n_buffers", "grows", "window"),
    [
        (edge(1536, 1, 6144, 35, 20, 5, True), 4_797_113_600, 483, 6_144, 512 * 12_288),
        (edge(2560, 2, 10240, 42, 18, 6, False), 7_632_344_064, 490, 16_384, 512 * 40_960),
    ],
    ids=["e2b", "e4b"],
)
def test_published_sums(spec: Model, total: int, n_buffers: int, grows: int, window: int) -> None:
    """Counted with transformers; the cache of E4B is 4 and 20 layers of keys and values, the others share theirs."""
    counted = cost.total_parameters(spec), cost.active_parameters(spec), cost.stored_extra(spec)["buffers"]
    assert counted == (total, total, n_buffers)
    assert (cost.cache(spec, 512, "bf16").unbounded, cost.cache(spec, 512, "bf16").window) == (grows, window)
