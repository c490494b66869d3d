"""Families with state spaces: which layers have one, what limits their steps, and what a config must not say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import (
    MLP,
    Attention,
    GatedMLP,
    Mamba,
    Mamba2,
    MixtureOfExperts,
    Model,
    Parallel,
    Rotary,
    SharedTransformer,
    walk,
)

MAMBA: dict[str, Any] = {"model_type": "mamba", "vocab_size": 50, "hidden_size": 40, "num_hidden_layers": 2}
MAMBA2 = MAMBA | {"model_type": "mamba2", "num_heads": 8, "head_dim": 10, "n_groups": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 30, "max_position_embeddings": 64}
NEMOTRON: dict[str, Any] = HEADS | {
    "model_type": "nemotron_h",
    "vocab_size": 50,
    "hidden_size": 40,
    "head_dim": 10,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "hybrid_override_pattern": "M*-E",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7,
    "moe_shared_expert_intermediate_size": 9,
}
JAMBA = HEADS | MAMBA | {"model_type": "jamba", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 6}
BAMBA = HEADS | MAMBA | {"model_type": "bamba", "num_attention_heads": 2, "mamba_n_heads": 8, "attn_layer_indices": [1]}
GRANITE: dict[str, Any] = (
    HEADS
    | MAMBA
    | {
        "model_type": "granitemoehybrid",
        "num_attention_heads": 2,
        "mamba_n_heads": 8,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 9,
    }
)
FALCON: dict[str, Any] = HEADS | MAMBA | {"model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_d_ssm": 48}
ZAMBA: dict[str, Any] = {
    "model_type": "zamba2",
    "vocab_size": 50,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"],
    "num_attention_heads": 4,
    "intermediate_size": 30,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "adapter_rank": 3,
    "max_position_embeddings": 64,
}
KINDS = {"M": Mamba2, "*": Attention, "-": MLP, "E": MixtureOfExperts}
WORDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def spec_of(config: dict[str, Any], **changes: object) -> Model:
    return read_config(config | changes, "x").spec


def bodies(spec: Model) -> list[type]:
    return [type(block.branches[0].body) for block in spec.blocks]


def again(family: str, spec: Model) -> Model:
    return read_config(write_config(family, spec, {}, None), spec.name).spec


@given(st.text("M*-E", min_size=1, max_size=7))
def test_layers_are_letters_or_words(letters: str) -> None:
    spec = spec_of(NEMOTRON, hybrid_override_pattern=letters)
    assert bodies(spec) == [KINDS[letter] for letter in letters]
    listed = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    assert spec_of(listed, layers_block_type=[WORDS[letter] for letter in letters]) == spec
    assert again("nemotron_h", spec) == spec


@pytest.mark.parametrize("unlimited", [[0.0, math.inf], [0, 1e308], [0.0, {"__float__": "Infinity"}], None])
def test_no_limit_has_several_spellings(unlimited: object) -> None:
    for config in (MAMBA2, NEMOTRON, BAMBA, FALCON):
        assert spec_of(config, time_step_limit=unlimited) == spec_of(config)


@given(st.floats(0, 1), st.floats(1.5, 100))
def test_limits_are_kept(least: float, most: float) -> None:
    spec = spec_of(MAMBA2, time_step_limit=[least, most])
    part = next(part for _, part in walk(spec) if isinstance(part, Mamba2))
    assert (part.dt_min, part.dt_max) == (least, most)
    assert again("mamba2", spec) == spec


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), st.integers(0, 3))
def test_periods(period: int, offset: int, every: int, after: int) -> None:
    offset, after = offset % period, after % every
    spec = spec_of(
        JAMBA, attn_layer_period=period, attn_layer_offset=offset, expert_layer_period=every, expert_layer_offset=after
    )
    assert bodies(spec) == [Attention if i % period == offset else Mamba for i in range(6)]
    sparse = [isinstance(block.branches[1].body, MixtureOfExperts) for block in spec.blocks]
    assert sparse == [i % every == after for i in range(6)]
    if {*bodies(spec)} == {Attention, Mamba}:
        assert again("jamba", spec) == spec


@given(
    layers=st.lists(st.sampled_from(["mamba", "attention"]), min_size=2, max_size=2),
    n_experts=st.sampled_from([0, 4]),
    positions=st.sampled_from(["rope", "nope", None]),
    factor=st.integers(1, 20),
)
def test_granite_hybrids(layers: list[str], n_experts: int, positions: str | None, factor: int) -> None:
    changes = {"layer_types": layers, "num_local_experts": n_experts, "position_embedding_type": positions}
    spec = spec_of(GRANITE, **changes, embedding_multiplier=factor, attention_multiplier=1 / factor)
    assert bodies(spec) == [{"mamba": Mamba2, "attention": Attention}[one] for one in layers]
    assert any(isinstance(part, Rotary) for _, part in walk(spec)) == (positions == "rope" and "attention" in layers)
    assert any(isinstance(part, MixtureOfExperts) for _, part in walk(spec)) == (n_experts > 0)
    newer = {"mamba": "linear_attention", "attention": "full_attention"}
    changes["layer_types"] = [newer[one] for one in layers]
    assert spec_of(GRANITE, **changes, embedding_multiplier=factor, attention_multiplier=1 / factor) == spec
    assert again("granitemoehybrid", spec) == spec


def test_granite_hybrids_without_experts_ignore_their_number_and_width() -> None:
    none = {"num_local_experts": 0}
    assert spec_of(GRANITE, **none, num_experts_per_tok=0, intermediate_size=8192) == spec_of(GRANITE, **none)
    config = {key: value for key, value in GRANITE.items() if key != "layer_types"}
    assert bodies(spec_of(config)) == [Mamba2, Mamba2]


@given(st.text("hm", min_size=1, max_size=7).filter(lambda x: "h" in x), st.integers(1, 4), st.booleans())
def test_transformers_of_zamba2_are_used_in_turns(letters: str, n_shared: int, newer: bool) -> None:
    names = {"h": "hybrid", "m": "linear_attention" if newer else "mamba"}
    kinds = [names[letter] for letter in letters]
    said = {"layers_block_type": kinds, "num_hidden_layers": len(kinds), "num_mem_blocks": n_shared}
    config = {key: value for key, value in ZAMBA.items() if key not in said}
    spec = spec_of(config | {"layer_types": kinds}, **{key: said[key] for key in said if key != "layers_block_type"})
    assert spec_of(config, **said) == spec
    sides = [part for _, part in walk(spec) if isinstance(part, SharedTransformer)]
    assert len(sides) == letters.count("h")
    assert sum(side.weights_from is None for side in sides) == min(n_shared, len(sides))
    for i, side in enumerate(sides):
        assert side.weights_from in (None, f"memory_{i % n_shared}")
        assert (side.weights_name is not None) == (i < n_shared and i + n_shared < len(sides))
    assert again("zamba2", spec) == spec


@pytest.mark.parametrize("turns", [True, False])
def test_zamba2_with_rope_or_without(turns: bool) -> None:
    spec = spec_of(ZAMBA, use_mem_rope=turns, rope_theta=777.0)
    found = [part for _, part in walk(spec) if isinstance(part, Rotary)]
    assert [(one.theta, one.d_rotary) for one in found] == ([(777.0, 20)] * 3 if turns else [])
    assert again("zamba2", spec) == spec


FACTORS = st.sampled_from((0.0375, 0.39, 1.0, 1.25, 5.656854249492381))


@given(FACTORS, FACTORS, FACTORS, st.lists(FACTORS, min_size=5, max_size=5), st.integers(1, 40))
def test_factors_of_falcon_h1(key: float, read: float, gives: float, five: list[float], pairs: int) -> None:
    """A factor on the keys is one on the scores, and found again whatever the width of a head."""
    said = {
        "key_multiplier": key,
        "attention_in_multiplier": read,
        "ssm_out_multiplier": gives,
        "ssm_multipliers": five,
    }
    spec = spec_of(FALCON, **said, head_dim=2 * pairs, mlp_multipliers=[key, read])
    both, ffn = (branch for branch in spec.blocks[0].branches)
    assert isinstance(both.body, Parallel)
    assert (both.body.input_scales, both.body.output_scales) == ((read, 1.0), (1.0, gives))
    assert isinstance(ffn.body, GatedMLP)
    assert (ffn.body.gate_scale, ffn.scale) == (key, read)
    attention, mamba = both.body.attention, both.body.ffn
    assert isinstance(attention, Attention)
    assert (attention.scale or attention.d_head**-0.5) == pytest.approx(key * (2 * pairs) ** -0.5, rel=1e-15)
    assert isinstance(mamba, Mamba2)
    assert mamba.scales == (None if set(five) == {1.0} else tuple(five))
    assert again("falcon_h1", spec) == spec
    written = write_config("falcon_h1", spec, {"key_multiplier": key}, None)
    assert {name: written[name] for name in said} == said


@pytest.mark.parametrize(("said", "width"), [(48, 48), (None, 80)])
def test_the_width_of_mamba_in_falcon_h1(said: int | None, width: int) -> None:
    spec = spec_of(FALCON, mamba_d_ssm=said, mamba_d_head=width // 8)
    assert next(part.d_inner for _, part in walk(spec) if isinstance(part, Mamba2)) == width
    assert again("falcon_h1", spec) == spec


def test_the_width_that_is_said_outright_wins() -> None:
    """Falcon Mamba's file has expand 16 beside an intermediate_size of twice the stream."""
    for changes, width in (({}, 80), ({"expand": 3}, 120), ({"expand": 16, "intermediate_size": 80}, 80)):
        part = next(part for _, part in walk(spec_of(MAMBA, **changes)) if isinstance(part, Mamba))
        assert (part.d_inner, part.dt_rank) == (width, 3)


BAD: list[tuple[dict[str, Any], str, object]] = [
    (MAMBA, "hidden_act", "gelu"),
    (MAMBA, "time_step_rank", 0),
    (MAMBA, "state_size", 0),
    (MAMBA2, "n_groups", 3),
    (MAMBA2, "expand", 3),
    (MAMBA2, "time_step_limit", [1.0, 0.5]),
    (MAMBA2, "time_step_limit", [0.0]),
    (MAMBA2, "time_step_limit", "none"),
    (NEMOTRON, "hybrid_override_pattern", "MX"),
    (NEMOTRON, "hybrid_override_pattern", ""),
    (NEMOTRON, "layers_block_type", ["mamba"] * 4),
    (NEMOTRON, "num_hidden_layers", 5),
    (NEMOTRON, "tie_word_embeddings", True),
    (NEMOTRON, "attention_bias", True),
    (NEMOTRON, "mamba_ssm_cache_dtype", "bfloat16"),
    (NEMOTRON, "n_shared_experts", 2),
    (NEMOTRON, "moe_latent_size", 0),
    (JAMBA, "attn_layer_offset", 8),
    (JAMBA, "hidden_act", "gelu"),
    (BAMBA, "attn_layer_indices", [2]),
    (BAMBA, "mamba_d_head", 9),
    (BAMBA, "mamba_n_heads", 7),
    (GRANITE, "layer_types", ["mamba"]),
    (GRANITE, "layer_types", ["mamba", "conv"]),
    (GRANITE, "position_embedding_type", "alibi"),
    (GRANITE, "num_experts_per_tok", 5),
    (GRANITE, "num_local_experts", None),
    (GRANITE, "shared_intermediate_size", 0),
    (GRANITE, "hidden_act", "gelu"),
    (GRANITE, "normalization_function", "layernorm"),
    (GRANITE, "mlp_bias", True),
    (ZAMBA, "layers_block_type", ["mamba"] * 4),
    (ZAMBA, "layers_block_type", ["hybrid"] * 3),
    (ZAMBA, "layers_block_type", ["hybrid", "mamba", "hybrid", "attention"]),
    (ZAMBA, "num_mem_blocks", 0),
    (ZAMBA, "n_mamba_heads", 7),
    (ZAMBA, "num_attention_heads", 7),
    (ZAMBA, "tie_word_embeddings", False),
    (ZAMBA, "use_long_context", True),
    (ZAMBA, "mamba_headdim", 7),
    (ZAMBA, "attention_hidden_size", 40),
    (ZAMBA, "hybrid_layer_ids", [0]),
    (FALCON, "mamba_d_head", 7),
    (FALCON, "mamba_n_heads", 7),
    (FALCON, "mlp_multipliers", [1.0]),
    (FALCON, "ssm_multipliers", [1.0, 1.0, 1.0, 1.0, 0.0]),
    (FALCON, "key_multiplier", 0.0),
    (FALCON, "attn_layer_indices", [1]),
    (FALCON, "mamba_use_mlp", False),
]


@pytest.mark.parametrize(("config", "key", "value"), BAD)
def test_bad_values_are_one_message(config: dict[str, Any], key: str, value: object) -> None:
    spec_of(config)
    with pytest.raises(InputError) as refused:
        spec_of(config, **{key: value})
    said = str(refused.value)
    assert "\n" not in said
    assert key in said
