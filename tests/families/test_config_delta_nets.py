"""Families with gated delta nets: which layers have one, what is refused, and that what is written reads back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table, write_config
from asbuilt.spec import Attention, GatedDeltaNet, GatedMLP, Model, Rotary, walk

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 9,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": SIZES | EXPERTS,
    "qwen3_5_text": SIZES,
    "qwen3_5_moe_text": {key: value for key, value in SIZES.items() if key != "intermediate_size"} | EXPERTS,
}
LINEAR, FULL = "linear_attention", "full_attention"


def spec_of(family: str, **changes: object) -> Model:
    return read_config(CONFIGS[family] | {"model_type": family} | changes, "x").spec


def linear(spec: Model) -> list[bool]:
    return [isinstance(block.branches[0].body, GatedDeltaNet) for block in spec.blocks]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_fourth_layer_is_attention_unless_listed(family: str) -> None:
    assert linear(spec_of(family)) == [True, True, True, False]
    assert linear(spec_of(family, full_attention_interval=2)) == [True, False, True, False]
    kinds = [FULL, LINEAR, FULL, LINEAR]
    assert linear(spec_of(family, layer_types=kinds, full_attention_interval=3)) == [False, True, False, True]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_quarter_of_a_head_has_rope_and_its_sums_have_gates(family: str) -> None:
    (attention,) = (part for _, part in walk(spec_of(family)) if isinstance(part, Attention))
    assert attention.gating == "channel"
    assert isinstance(attention.positions, Rotary)
    assert attention.positions.d_rotary == 4


@pytest.mark.parametrize("family", CONFIGS)
@given(
    kinds=st.lists(st.sampled_from([FULL, LINEAR]), min_size=3, max_size=3),
    groups=st.integers(1, 3),
    kernel=st.integers(1, 5),
    bias=st.booleans(),
)
def test_what_is_written_reads_back_equal(family: str, kinds: list[str], groups: int, kernel: int, bias: bool) -> None:
    changes: dict[str, object] = {
        "layer_types": [*kinds, FULL],
        "linear_num_value_heads": 2 * groups,
        "linear_conv_kernel_dim": kernel,
        "attention_bias": bias,
    }
    spec = spec_of(family, **changes)
    assert read_config(write_config(family, spec, {}, None), "x").spec == spec
    tensor_table(family, spec)  # covers every weight, or raises


BAD: list[tuple[str, str, object]] = [
    *((name, "linear_num_value_heads", 3) for name in CONFIGS),
    *((name, "layer_types", [LINEAR] * 3) for name in CONFIGS),
    *((name, "full_attention_interval", 0) for name in CONFIGS),
    *((name, "hidden_act", "relu") for name in CONFIGS),
    *((name, "attn_output_gate", False) for name in CONFIGS),
    *((name, "some_new_key", 1) for name in CONFIGS),
    ("qwen3_5_moe_text", "norm_topk_prob", False),
    ("qwen3_5_moe_text", "mlp_only_layers", [1]),
    ("qwen3_5_text", "num_experts", 4),
]


@pytest.mark.parametrize(("family", "key", "value"), BAD)
def test_bad_values_are_one_message_naming_the_key(family: str, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(family, **{key: value})


def test_sections_of_a_texts_rope_change_nothing() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    wanted = spec_of("qwen3_5_text", rope_parameters=rope)
    assert spec_of("qwen3_5_text", rope_parameters=rope | sections) == wanted
    with pytest.raises(InputError, match="mrope_section"):
        spec_of("qwen3_next", rope_parameters=rope | sections)


KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, Any] = {
    "full_attn_layers": FULL_LAYERS,
    "kda_layers": [i for i in range(1, 28) if i not in FULL_LAYERS],
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}


def kimi(**changes: object) -> Model:
    return read_config(KIMI | changes, "x").spec


def test_kimi_linear_counts_its_layers_from_one() -> None:
    """48B-A3B as published; the class's own layers are one attention fewer, 49,133,074,464 parameters."""
    spec = kimi(linear_attn_config=PUBLISHED)
    assert [i + 1 for i, one in enumerate(linear(spec)) if not one] == FULL_LAYERS
    assert cost.total_parameters(spec) == 49_122_675_072
    assert cost.total_parameters(kimi()) == 49_133_074_464
    newer = kimi(layer_types=[LINEAR if one else FULL for one in linear(spec)])
    assert newer == spec == read_config(write_config("kimi_linear", spec, {}, None), "x").spec
    assert cost.cache(spec, 100, "bf16").per_token == 7 * (512 + 64) * 2
    assert cost.cache(spec, 100, "bf16").fixed == 20 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2)


def test_kimi_linear_lists_its_dense_layers() -> None:
    kinds = ["sparse"] * 26 + ["dense"]
    spec = kimi(mlp_layer_types=kinds)
    assert [isinstance(block.branches[1].body, GatedMLP) for block in spec.blocks] == [False] * 26 + [True]
    assert read_config(write_config("kimi_linear", spec, {}, None), "x").spec == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kda_layers", {"linear_attn_config": PUBLISHED | {"kda_layers": [1, 2]}}),
        ("mla_use_nope", {"mla_use_nope": False}),
        ("mlp_layer_types", {"mlp_layer_types": ["dense"] * 27}),
        ("num_key_value_heads", {"num_key_value_heads": 8}),
        ("some_new_key", {"linear_attn_config": PUBLISHED | {"some_new_key": 1}}),
    ],
)
def test_kimi_linear_refuses_by_name(key: str, value: dict[str, object]) -> None:
    with pytest.raises(InputError, match=key):
        kimi(**value)
