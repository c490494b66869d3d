"""The gemma, gemma2 and gemma3_text config readers: what each key means, misreadings avoided, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import load_config_file, read_config, write_config
from asbuilt.spec import Attention, GatedMLP, LinearScaling, Model, RMSNorm, Rotary, TiedHead, weights

MODELS = Path(__file__).parents[3] / "shared" / "models"
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
FAMILIES = ("gemma", "gemma2", "gemma3_text")
FULL, SLIDING = "full_attention", "sliding_attention"


def spec_of(family: str, **changes: object) -> Model:
    return read_config(SIZES | {"model_type": family} | changes, "x").spec


def attentions(spec: Model) -> list[Attention]:
    return [block.branches[0].body for block in spec.blocks if isinstance(block.branches[0].body, Attention)]


def _softcap(spec: Model) -> float | None:
    return spec.head.softcap if isinstance(spec.head, TiedHead) else None


def rotaries(spec: Model) -> list[Rotary]:
    return [body.positions for body in attentions(spec) if isinstance(body.positions, Rotary)]


def total(config: dict[str, Any]) -> int:
    return sum(weight.size for _, weight, _ in weights(read_config(config, "x").spec))


@pytest.mark.parametrize(
    ("name", "misread"),
    [
        ("gemma-7b", lambda config: config | {"head_dim": config["hidden_size"] // config["num_attention_heads"]}),
        ("gemma-2b", lambda config: config | {"tie_word_embeddings": False}),
    ],
)
def test_misreadings_are_avoided(name: str, misread: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """traps.json: the right total, and the total of the misreading, to which the config would have to be changed."""
    if not (MODELS / "traps.json").exists():
        pytest.skip(f"no published models at {MODELS}")
    trap = next(trap for trap in json.loads((MODELS / "traps.json").read_text()) if trap["name"] == name)
    config = load_config_file(MODELS / f"{name}.json")
    assert total(config) == trap["right_total"]
    assert total(misread(config)) == trap["wrong_total"]


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_is_scaled_by_the_root_of_its_width_and_the_head_tied(family: str) -> None:
    spec = spec_of(family)
    assert getattr(spec.embedding, "scale", 1.0) == SIZES["hidden_size"] ** 0.5
    assert isinstance(spec.head, TiedHead)
    assert spec == spec_of(family, tie_word_embeddings=True, attention_bias=False, cache_implementation="hybrid")


def activation_of(**changes: object) -> str:
    body = spec_of("gemma", **changes).blocks[0].branches[1].body
    assert isinstance(body, GatedMLP)
    return body.activation


def test_gelu_of_the_first_gemma_means_its_tanh_form() -> None:
    assert activation_of(hidden_act="gelu") == activation_of() == "gelu_tanh"
    assert activation_of(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh") == "gelu_tanh"
    assert activation_of(hidden_act="gelu", hidden_activation=None) == "gelu_tanh"


def test_windows_alternate_or_follow_the_pattern_or_the_list() -> None:
    def windows(family: str, **changes: object) -> list[int | None]:
        return [body.window for body in attentions(spec_of(family, sliding_window=8, **changes))]

    assert windows("gemma2") == [8, None] * 3
    assert windows("gemma3_text") == [8] * 5 + [None]
    assert windows("gemma3_text", sliding_window_pattern=3) == [8, 8, None] * 2
    listed = [FULL, SLIDING, SLIDING, FULL, FULL, FULL]
    assert windows("gemma2", layer_types=listed) == windows("gemma3_text", layer_types=listed)
    assert windows("gemma2", layer_types=listed) == [None if kind == FULL else 8 for kind in listed]


def test_scores_and_logits_of_gemma2() -> None:
    usual, other = spec_of("gemma2"), spec_of("gemma2", query_pre_attn_scalar=16, attn_logit_softcapping=None)
    assert (attentions(usual)[0].softcap, _softcap(usual)) == (50.0, 30.0)
    assert (attentions(usual)[0].scale, attentions(other)[0].scale) == (256**-0.5, None)  # 16 is the heads' width
    assert (attentions(other)[0].softcap, _softcap(other)) == (None, 30.0)


def test_both_spellings_of_the_two_rotations() -> None:
    older = spec_of(
        "gemma3_text", rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"type": "linear", "factor": 8}
    )
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    newer = spec_of("gemma3_text", rope_parameters={FULL: full, SLIDING: {"rope_theta": 2e4}})
    assert older == newer
    assert rotaries(older)[0] == Rotary(d_rotary=16, theta=2e4)
    assert rotaries(older)[-1] == Rotary(d_rotary=16, theta=5e5, scaling=LinearScaling(factor=8.0))
    missing = rotaries(spec_of("gemma3_text"))
    assert (missing[0].theta, missing[-1].theta) == (1e4, 1e6)


BAD: list[tuple[str, str, dict[str, Any]]] = [
    *((family, "use_bidirectional_attention", {"use_bidirectional_attention": True}) for family in FAMILIES),
    *((family, "head_dim", {"head_dim": value}) for family in FAMILIES for value in (7, 0, None)),
    *((family, "num_key_value_heads", {"num_key_value_heads": value}) for family in FAMILIES for value in (3, None)),
    *((family, "partial_rotary_factor", {"partial_rotary_factor": 0.5}) for family in ("gemma", "gemma2")),
    *((family, "final_logit_softcappings", {"final_logit_softcappings": 30.0}) for family in FAMILIES),
    ("gemma", "sliding_window", {"sliding_window": 8}),
    ("gemma", "hidden_activation", {"hidden_act": "silu", "hidden_activation": "gelu"}),
    ("gemma2", "hidden_act", {"hidden_act": "silu"}),
    ("gemma2", "sliding_window", {"sliding_window": None}),
    ("gemma2", "layer_types", {"layer_types": [FULL]}),
    ("gemma2", "layer_types", {"layer_types": ["chunked_attention"] * 6}),
    ("gemma2", "query_pre_attn_scalar", {"query_pre_attn_scalar": 0}),
    ("gemma2", "attn_logit_softcapping", {"attn_logit_softcapping": -1.0}),
    ("gemma3_text", "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    ("gemma3_text", "sliding_window_pattern", {"sliding_window_pattern": 0}),
    ("gemma3_text", "sliding_window_pattern", {"sliding_window_pattern": 2, "layer_types": [FULL] * 6}),
    ("gemma3_text", "rope_scaling", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {}}),
    ("gemma3_text", "rope_scaling.rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("gemma3_text", "rope_parameters", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    (
        "gemma3_text",
        f"rope_parameters.{SLIDING}.rope_theta",
        {"rope_local_base_freq": 1e4, "rope_parameters": {SLIDING: {"rope_theta": 2e4}}},
    ),
]


@pytest.mark.parametrize(("family", "key", "changes"), BAD)
def test_bad_values_are_one_message_naming_the_key(family: str, key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read_config(SIZES | {"model_type": family} | changes, "folder/config.json")
    assert key in str(caught.value)
    assert str(caught.value).startswith("folder/config.json: ")


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config of any of the three, with or without each optional key."""
    family = draw(st.sampled_from(FAMILIES))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "rms_norm_eps": st.sampled_from([1e-6, 3e-4]),
        "attention_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "rope_theta": st.floats(2.0, 1e7),
        "eos_token_id": st.just([1, 106]),
    }
    if family != "gemma":
        optional["sliding_window"] = st.integers(1, 100)
        optional["query_pre_attn_scalar"] = st.integers(1, 1000) | st.floats(0.5, 1000.0)
        optional["final_logit_softcapping"] = st.none() | st.floats(1.0, 100.0)
        optional["layer_types"] = st.lists(st.sampled_from([FULL, SLIDING]), min_size=6, max_size=6)
    if family == "gemma2":
        optional["attn_logit_softcapping"] = st.none() | st.floats(1.0, 100.0)
    if family == "gemma3_text":
        optional["rope_local_base_freq"] = st.floats(2.0, 1e7)
        optional["rope_scaling"] = st.none() | st.just({"rope_type": "linear", "factor": 8.0})
    return SIZES | {"model_type": family} | draw(st.fixed_dictionaries({}, optional=optional))


@given(configs())
def test_what_is_written_reads_back_equal(config: dict[str, Any]) -> None:
    first = read_config(config, "x")
    written = write_config(first.family, first.spec, first.carried, first.dtype)
    assert read_config(json.loads(json.dumps(written)), "x") == first


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        *((family, "sinks", True) for family in FAMILIES),
        *((family, "positions", None) for family in FAMILIES),
        *((family, "chunk", 8) for family in FAMILIES),
        *((family, "q_norm", RMSNorm(d=16)) for family in FAMILIES),
        ("gemma", "window", 8),
        ("gemma3_text", "softcap", 50.0),
    ],
)
def test_writer_names_what_it_cannot_express(family: str, field: str, value: object) -> None:
    """The attention of one layer of those that see everything, changed."""
    spec = spec_of(family)
    i = max(i for i, body in enumerate(attentions(spec)) if body.window is None)
    branch, ffn = spec.blocks[i].branches
    block = replace(spec.blocks[i], branches=(replace(branch, body=replace(branch.body, **{field: value})), ffn))
    other = replace(spec, blocks=(*spec.blocks[:i], block, *spec.blocks[i + 1 :]))
    with pytest.raises(InputError, match=rf"blocks\.{i}\..*{field}"):
        write_config(family, other, {}, None)
