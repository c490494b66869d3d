"""The phi and phi3 config readers: parts of heads turned, longrope and its attention factor, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, LongRope, Model, Parallel, Rotary

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "intermediate_size": 96,
    "max_position_embeddings": 131072,
}
FAMILIES = ("phi", "phi3")
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def spec_of(family: str, **changes: object) -> Model:
    return read_config(SIZES | {"model_type": family} | changes, "x").spec


def attention_of(spec: Model) -> Attention:
    body = spec.blocks[0].branches[0].body
    body = body.attention if isinstance(body, Parallel) else body
    assert isinstance(body, Attention)
    return body


def rotary_of(family: str, **changes: object) -> Rotary:
    positions = attention_of(spec_of(family, **changes)).positions
    assert isinstance(positions, Rotary)
    return positions


def longrope_of(rope: dict[str, Any], **changes: object) -> LongRope:
    scaling = rotary_of("phi3", rope_scaling={"type": "longrope"} | LISTS | rope, **changes).scaling
    assert isinstance(scaling, LongRope)
    return scaling


def test_parts_of_heads() -> None:
    assert (rotary_of("phi").d_rotary, rotary_of("phi3").d_rotary) == (8, 16)  # half of 16, and all
    for family in FAMILIES:
        assert rotary_of(family, partial_rotary_factor=0.25).d_rotary == 4
        assert rotary_of(family, rope_parameters={"partial_rotary_factor": 0.75}).d_rotary == 12


def test_attention_factor_of_longrope() -> None:
    """The paper's sqrt(1 + ln(s)/ln(original)), with s the ratio of the contexts unless it is given."""
    published = longrope_of({}, original_max_position_embeddings=4096)
    assert published.attention_factor == math.sqrt(1 + math.log(131072 / 4096) / math.log(4096))
    assert published == longrope_of({"factor": 32.0}, original_max_position_embeddings=4096) == longrope_of({})
    assert longrope_of({"factor": 2.0}).attention_factor == math.sqrt(1 + math.log(2) / math.log(4096))
    assert longrope_of({"attention_factor": 1.5, "factor": 2.0}).attention_factor == 1.5
    assert longrope_of({}, max_position_embeddings=4096).attention_factor == 1.0


def test_lists_change_beyond_the_original_context() -> None:
    rotary = rotary_of("phi3", rope_scaling={"type": "su"} | LISTS, original_max_position_embeddings=1000)
    short, long = rotary.inverse_frequencies(1000), rotary.inverse_frequencies(1001)
    assert short == pytest.approx([2 * frequency for frequency in long])


def test_an_unused_original_context_is_carried() -> None:
    reading = read_config(SIZES | {"model_type": "phi3", "original_max_position_embeddings": 4096}, "x")
    assert reading.carried == {"original_max_position_embeddings": 4096}


def test_code_beside_the_weights_is_carried_and_never_imported() -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert read_config(SIZES | {"model_type": "phi3", "auto_map": auto_map}, "x").carried == {"auto_map": auto_map}


BAD: list[tuple[str, str, dict[str, Any]]] = [
    *((family, "num_attention_heads", {"num_attention_heads": 5}) for family in FAMILIES),
    *((family, "num_key_value_heads", {"num_key_value_heads": 3}) for family in FAMILIES),
    *(
        (family, "partial_rotary_factor", {"partial_rotary_factor": value})
        for family in FAMILIES
        for value in (0, 0.2, 1.5, None)
    ),
    *(
        (
            family,
            "partial_rotary_factor",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        )
        for family in FAMILIES
    ),
    ("phi", "head_dim", {"head_dim": 32}),
    ("phi", "sliding_window", {"sliding_window": 8}),
    ("phi", "qk_layernorm", {"qk_layernorm": None}),
    ("phi3", "attention_bias", {"attention_bias": True}),
    ("phi3", "head_dim", {"head_dim": 16}),
    ("phi3", "sliding_window", {"sliding_window": 0}),
    ("phi3", "rope_scaling.rope_type", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("phi3", "rope_scaling.rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("phi3", "rope_scaling.short_factor", {"rope_scaling": {"type": "longrope"} | LISTS | {"short_factor": [1.0] * 7}}),
    ("phi3", "rope_scaling.long_factor", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}),
    (
        "phi3",
        "original_max_position_embeddings",
        {
            "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 8} | LISTS,
            "original_max_position_embeddings": 16,
        },
    ),
]


@pytest.mark.parametrize(("family", "key", "changes"), BAD)
def test_bad_values_are_one_message_naming_the_key(family: str, key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read_config(SIZES | {"model_type": family} | changes, "folder/config.json")
    assert key in str(caught.value)
    assert str(caught.value).startswith("folder/config.json: ")


@given(
    family=st.sampled_from(FAMILIES),
    d_head=st.integers(1, 60).map(lambda half: 2 * half),
    part=st.floats(0.0, 1.0),
    tied=st.booleans(),
    kv_heads=st.sampled_from([None, 1, 2, 4]),
)
def test_what_is_written_reads_back_equal(
    family: str, d_head: int, part: float, tied: bool, kv_heads: int | None
) -> None:
    """Any even part of heads of any width."""
    d_rotary = max(2, int(d_head * part) // 2 * 2)
    config = SIZES | {"hidden_size": 4 * d_head, "tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    rope = {"partial_rotary_factor": math.nextafter(d_rotary / d_head, 1.0)}
    first = read_config(config | {"model_type": family, "rope_parameters": rope}, "x")
    assert getattr(attention_of(first.spec).positions, "d_rotary", None) == d_rotary
    written = write_config(family, first.spec, first.carried, first.dtype)
    assert read_config(json.loads(json.dumps(written)), "x") == first
