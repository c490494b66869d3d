"""Families with recurrences: which layers have one, how wide they are, and what a config must not say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import RGLRU, Attention, GatedConvolution, MixtureOfExperts, Model, walk

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 30,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
LFM2 = SIZES | {"model_type": "lfm2", "max_position_embeddings": 64}
LFM2_MOE = LFM2 | {"model_type": "lfm2_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
LFM2_MOE |= {"layer_types": ["conv"] * 4, "num_dense_layers": 1}
GRIFFIN = SIZES | {"model_type": "recurrent_gemma"}


def spec_of(config: dict[str, Any], **changes: object) -> Model:
    return read_config(config | changes, "x").spec


def mixers(spec: Model) -> list[type]:
    return [type(block.branches[0].body) for block in spec.blocks]


@given(st.lists(st.sampled_from(["recurrent", "attention"]), min_size=1, max_size=6), st.integers(1, 9))
def test_griffins_kinds_are_repeated_to_the_depth(kinds: list[str], layers: int) -> None:
    """Published files spell the key with an underscore; transformers takes its default for those."""
    wanted = [RGLRU if kinds[i % len(kinds)] == "recurrent" else Attention for i in range(layers)]
    for key in ("block_types", "_block_types"):
        spec = spec_of(GRIFFIN, **{key: kinds, "num_hidden_layers": layers})
        assert mixers(spec) == wanted
        if RGLRU in wanted and Attention in wanted:
            assert read_config(write_config("recurrent_gemma", spec, {}, None), "x").spec == spec
    assert mixers(spec_of(GRIFFIN)) == [RGLRU, RGLRU, Attention, RGLRU]


@given(st.integers(1, 9).map(lambda n: 4 * n), st.integers(1, 6), st.integers(2, 60))
def test_griffins_widths(width: int, kernel: int, size: int) -> None:
    spec = spec_of(GRIFFIN, lru_width=width, conv1d_width=kernel, intermediate_size=size)
    part = next(part for _, part in walk(spec) if isinstance(part, RGLRU))
    assert (part.d_rnn, part.conv.kernel, part.n_heads) == (width, kernel, 4)
    assert spec.blocks[0].branches[1].body.d_ff == size // 2  # type: ignore[union-attr]
    assert spec_of(GRIFFIN, lru_width=None) == spec_of(GRIFFIN, lru_width=32) == spec_of(GRIFFIN)
    assert read_config(write_config("recurrent_gemma", spec, {}, None), "x").spec == spec


def test_griffins_embedding_is_scaled_in_bfloat16() -> None:
    """The root of 2560 is 50.596, between the bfloat16 numbers 50.5 and 50.75."""
    spec = spec_of(GRIFFIN, hidden_size=2560, num_attention_heads=10)
    assert spec.embedding.scale == 50.5  # type: ignore[union-attr]


@given(st.lists(st.integers(0, 3), max_size=4))
def test_lfm2_lists_its_attention_in_two_ways(full: list[int]) -> None:
    types = ["full_attention" if i in full else "conv" for i in range(4)]
    older, newer = spec_of(LFM2, full_attn_idxs=full), spec_of(LFM2, layer_types=types)
    assert older == newer
    assert mixers(older) == [Attention if i in full else GatedConvolution for i in range(4)]


@given(st.integers(3, 400), st.floats(0.5, 3), st.integers(1, 40), st.booleans())
def test_lfm2s_width_is_two_thirds_rounded_up(size: int, factor: float, multiple: int, adjust: bool) -> None:
    keys = {"block_auto_adjust_ff_dim": adjust, "block_ffn_dim_multiplier": factor, "block_multiple_of": multiple}
    spec = spec_of(LFM2, full_attn_idxs=[1], block_ff_dim=size, **keys)
    width = spec.blocks[0].branches[1].body.d_ff  # type: ignore[union-attr]
    least = int(factor * int(2 * size / 3)) if adjust else size
    assert width == spec_of(LFM2, full_attn_idxs=[1], **keys, intermediate_size=size).blocks[0].branches[1].body.d_ff  # type: ignore[union-attr]
    assert width % (multiple if adjust else 1) == 0
    assert least <= width < least + (multiple if adjust else 1)
    reading = read_config(LFM2 | {"full_attn_idxs": [1], "block_ff_dim": size, **keys}, "x")
    for carried in ({}, reading.carried):
        assert read_config(write_config("lfm2", spec, carried, None), "x").spec == spec


def test_experts_come_after_the_dense_layers() -> None:
    spec = spec_of(LFM2_MOE)
    kinds = [isinstance(block.branches[1].body, MixtureOfExperts) for block in spec.blocks]
    assert kinds == [False, True, True, True]


BAD: list[tuple[dict[str, Any], str, object]] = [
    (GRIFFIN, "block_types", ["recurrent", "mamba"]),
    (GRIFFIN, "block_types", []),
    (GRIFFIN, "lru_width", 25),
    (GRIFFIN, "intermediate_size", 1),
    (GRIFFIN, "head_dim", 16),
    (GRIFFIN, "conv1d_width", 0),
    (LFM2, "layer_types", ["conv"] * 3),
    (LFM2, "layer_types", ["conv", "conv", "conv", "sliding_attention"]),
    (LFM2, "full_attn_idxs", ["1"]),
    (LFM2, "conv_L_cache", 0),
    (LFM2, "block_use_swiglu", False),
    (LFM2, "use_pos_enc", False),
    (LFM2, "block_multiple_of", 0),
    (LFM2_MOE, "num_experts_per_tok", 4),
    (LFM2_MOE, "num_dense_layers", -1),
]


@pytest.mark.parametrize(("config", "key", "value"), BAD)
def test_bad_values_are_one_message(config: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(InputError) as refused:
        spec_of(config, **{key: value})
    said = str(refused.value)
    assert "\n" not in said
    assert key in said or ("d_rnn" in said and key == "lru_width")
