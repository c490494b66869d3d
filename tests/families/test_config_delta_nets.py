"""Families with gated delta nets: which layers have one, what is refused, and that what is written reads back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table, write_config
from asbuilt.spec import Attention, GatedDeltaNet, Model, Rotary, walk

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
