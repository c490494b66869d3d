"""The llama config reader and writer: what each key means, what is refused, and the rotary numbers of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from families_drawn import llama_configs
from hypothesis import given, settings

from asbuilt.errors import InputError
from asbuilt.families import families_that_write, read_config, write_config
from asbuilt.families.shared.common import difference
from asbuilt.spec import (
    Attention,
    DynamicNTK,
    FrequencyFactors,
    LearnedPositions,
    Model,
    RMSNorm,
    Rotary,
    YaRN,
)

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def spec_of(**changes: object) -> Model:
    return read_config(BASE | changes, "x").spec


def attention_of(model: Model) -> Attention:
    body = model.blocks[0].branches[0].body
    assert isinstance(body, Attention)
    return body


def rotary_of(**changes: object) -> Rotary:
    rotary = attention_of(spec_of(**changes)).positions
    assert isinstance(rotary, Rotary)
    return rotary


def test_missing_and_null_key_value_heads_and_head_dim() -> None:
    plain = spec_of()
    assert (attention_of(plain).n_kv_heads, attention_of(plain).d_head) == (4, 16)
    assert plain == spec_of(num_key_value_heads=None, head_dim=None) == spec_of(num_key_value_heads=4, head_dim=16)
    assert attention_of(spec_of(head_dim=32, hidden_size=66)).d_head == 32


def test_attention_bias_is_on_all_four_matrices() -> None:
    body = attention_of(spec_of(attention_bias=True))
    assert (body.bias, body.output_bias) == (True, True)


def test_context_of_early_conversions() -> None:
    config = {key: value for key, value in BASE.items() if key != "max_position_embeddings"}
    assert read_config(config | {"max_sequence_length": 77}, "x").spec.max_positions == 77
    with pytest.raises(InputError, match="max_sequence_length: disagrees with max_position_embeddings"):
        spec_of(max_sequence_length=77)


def test_both_spellings_of_rotary_and_dtype() -> None:
    old = read_config(BASE | {"rope_theta": 5e5, "rope_scaling": YARN, "torch_dtype": "bfloat16"}, "x")
    new = read_config(BASE | {"rope_parameters": YARN | {"rope_theta": 5e5}, "dtype": "bfloat16"}, "x")
    assert old == new
    assert old.dtype == "bfloat16"
    typed = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
    assert rotary_of(rope_scaling=typed) == rotary_of(rope_scaling=YARN)


def test_irrelevant_keys_are_carried_verbatim() -> None:
    carried = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": -1, "initializer_range": 0.04}
    carried |= {"rope_interleaved": False, "pretraining_tp": 1, "use_cache": True}
    carried |= {"auto_map": {"AutoModelForCausalLM": "modeling.X"}}  # code of a folder's own is never imported
    assert read_config(BASE | carried, "x").carried == carried


def test_original_context_defaults_to_the_context_and_dynamic_is_always_that() -> None:
    without = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    scaling = rotary_of(rope_scaling=without).scaling
    assert isinstance(scaling, YaRN)
    assert scaling.original_context == 128
    beside = rotary_of(rope_scaling=without, original_max_position_embeddings=32)
    assert beside == rotary_of(rope_scaling=YARN)
    dynamic = rotary_of(rope_scaling={"type": "dynamic", "factor": 2.0}).scaling
    assert dynamic == DynamicNTK(factor=2.0, original_context=128)


BAD: list[tuple[str, dict[str, Any]]] = [
    *(("hidden_size", {"hidden_size": value}) for value in (0, -64, 64.0, "64", True, None, 2**31, [64])),
    *(("num_hidden_layers", {"num_hidden_layers": value}) for value in (0, -1, 10**9, 1.5)),
    *(("num_attention_heads", {"num_attention_heads": value}) for value in (0, 5, 128, False)),
    *(("num_key_value_heads", {"num_key_value_heads": value}) for value in (0, 3, 8, "1")),
    *(("head_dim", {"head_dim": value}) for value in (0, -2, 7, 16.0)),
    ("head_dim", {"hidden_size": 12}),
    *(("vocab_size", {"vocab_size": value}) for value in (0, -1, 1e4)),
    *(("intermediate_size", {"intermediate_size": value}) for value in (0, None)),
    *(("max_position_embeddings", {"max_position_embeddings": value}) for value in (0, None, "128")),
    *(("rms_norm_eps", {"rms_norm_eps": value}) for value in (0, -1e-5, float("inf"), float("nan"), "1e-5", True)),
    *(("rope_theta", {"rope_theta": value}) for value in (0, -1, 1, None, float("inf"), "1e4", True)),
    ("hidden_act", {"hidden_act": "relu6"}),
    ("hidden_act", {"hidden_act": None}),
    ("attention_bias", {"attention_bias": 1}),
    ("mlp_bias", {"mlp_bias": None}),
    ("tie_word_embeddings", {"tie_word_embeddings": "no"}),
    ("rope_interleaved", {"rope_interleaved": True}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("architectures", {"architectures": ["LlamaForMultipleChoice"]}),
    ("architectures", {"architectures": "LlamaForCausalLM"}),
    ("quantization_config", {"quantization_config": {}}),
    ("quantization_config", {"quantization_config": "gptq"}),
    ("is_encoder_decoder", {"is_encoder_decoder": True}),
    ("pruned_heads", {"pruned_heads": {"0": [1]}}),
    ("torch_dtype", {"torch_dtype": "int4"}),
    ("dtype", {"dtype": 16}),
    ("torch_dtype", {"dtype": "float16", "torch_dtype": "bfloat16"}),
    ("sliding_window", {"sliding_window": 4096}),
    ("num_experts", {"num_experts": 8}),
    ("rope_scaling", {"rope_scaling": "linear"}),
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "su", "factor": 2.0}}),
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 1]}}),
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": None}}),
    ("rope_scaling.type", {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}),
    ("rope_scaling.factor", {"rope_scaling": {"rope_type": "linear"}}),
    *(("rope_scaling.factor", {"rope_scaling": {"type": "linear", "factor": f}}) for f in (0, -1, "2", None, 1e300)),
    ("low_freq_factor", {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}),
    (
        "rope_scaling.original_max_position_embeddings",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
    ),
    ("rope_scaling.factor", {"rope_scaling": {"type": "dynamic"}}),
    ("rope_scaling.rope_type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}),
    ("rope_scaling.factor", {"rope_scaling": {"rope_type": "yarn"}}),
    ("rope_scaling.beta_fast", {"rope_scaling": YARN | {"beta_fast": 0.5}}),
    ("rope_scaling.beta_slow", {"rope_scaling": YARN | {"beta_slow": 0}}),
    ("rope_scaling.truncate", {"rope_scaling": YARN | {"truncate": 1}}),
    ("rope_scaling.attention_factor", {"rope_scaling": YARN | {"attention_factor": -1.0}}),
    ("mscale_all_dims", {"rope_scaling": YARN | {"mscale_all_dims": 1.0}}),
    ("rope_scaling.high_freq_factor", {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.9}}),
    ("rope_scaling.low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
    (
        "rope_scaling.original_max_position_embeddings",
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}},
    ),
    ("original_max_position_embeddings", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 65}),
    ("rope_parameters.rope_theta", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}),
    ("rope_scaling", {"rope_scaling": YARN, "rope_parameters": LLAMA3}),
    (
        "rope_scaling.long_factor",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 1.0}},
    ),
    ("rope_scaling.short_factor", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7}}),
    (
        "rope_scaling.attention_factor",
        {"rope_scaling": {"type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}},
    ),
]


@pytest.mark.parametrize(("key", "changes"), BAD)
def test_bad_values_are_one_message_naming_the_key(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read_config(BASE | changes, "folder/config.json")
    assert key in str(caught.value)
    assert str(caught.value).startswith("folder/config.json: ")


def test_a_misspelt_key_is_named_with_its_neighbour() -> None:
    with pytest.raises(InputError, match=r"'num_key_value_head' did you mean 'num_key_value_heads'"):
        spec_of(num_key_value_head=2)


@given(llama_configs())
def test_what_is_written_reads_back_equal(config: dict[str, Any]) -> None:
    first = read_config(json.loads(json.dumps(config)), "x")
    written = write_config("llama", first.spec, first.carried, first.dtype)
    assert read_config(json.loads(json.dumps(written)), "x") == first
    assert families_that_write(first.spec)[0] == "llama"  # without biases others write it too


def changed(spec: Model, **fields: object) -> Model:
    """The spec with the attention of its last block changed."""
    *blocks, last = spec.blocks
    attention, ffn = last.branches
    branch = replace(attention, body=replace(attention.body, **fields))
    return replace(spec, blocks=(*blocks, replace(last, branches=(branch, ffn))))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("blocks.1.branches.0.body.window", {"window": 8}),
        ("blocks.1.branches.0.body.scale", {"scale": 1.0}),
        ("blocks.1.branches.0.body.softcap", {"softcap": 30.0}),
        ("blocks.1.branches.0.body.q_norm", {"q_norm": RMSNorm(d=16)}),
        ("blocks.1.branches.0.body.positions", {"positions": None}),
        ("blocks.1.branches.0.body.output_bias", {"output_bias": True}),
        ("blocks.1.branches.0.body.n_kv_heads", {"n_kv_heads": 2}),
        ("blocks.1.branches.0.body.positions.pairing", {"positions": Rotary(d_rotary=16, pairing="adjacent")}),
    ],
)
def test_writer_names_what_it_cannot_express(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{path}: "):
        write_config("llama", changed(spec_of(), **fields), {}, None)


def test_writer_refuses_positions_table_and_partial_rotation() -> None:
    spec = spec_of()
    with pytest.raises(InputError, match="positions"):
        write_config("llama", replace(spec, positions=LearnedPositions(n_positions=128, d_model=64)), {}, None)
    half = replace(spec, blocks=changed(spec, positions=Rotary(d_rotary=8)).blocks[1:])
    with pytest.raises(InputError, match="positions"):
        write_config("llama", half, {}, None)
    rotary = Rotary(d_rotary=16, scaling=DynamicNTK(factor=2.0, original_context=64))
    dynamic = replace(spec, blocks=changed(spec, positions=rotary).blocks[1:])
    with pytest.raises(InputError, match="original_context"):
        write_config("llama", dynamic, {}, None)


def test_equal_lists_of_longrope_are_divisors() -> None:
    factors = [float(i + 1) for i in range(8)]
    longrope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    assert rotary_of(rope_scaling=longrope).scaling == FrequencyFactors(factors=tuple(factors))


def frequencies_of_transformers(config: dict[str, Any]) -> tuple[list[float], float]:
    """What transformers' llama computes from its own reading of the config."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    transformers.logging.set_verbosity_error()
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**json.loads(json.dumps(config))))
    return theirs.inv_freq.tolist(), theirs.attention_scaling


# float32 powers of a base up to 1e6 lose up to 4 bits
ROUNDING = 2.0**-19


@settings(max_examples=60, deadline=None)
@given(llama_configs())
def test_frequencies_are_those_transformers_computes(config: dict[str, Any]) -> None:
    """Of the config drawn, and of the one we write from it."""
    if config["hidden_size"] % config["num_attention_heads"]:
        return  # transformers refuses these even where head_dim is given
    reading = read_config(config, "x")
    rotary = attention_of(reading.spec).positions
    assert isinstance(rotary, Rotary)
    for source in (config, write_config("llama", reading.spec, reading.carried, reading.dtype)):
        frequencies, factor = frequencies_of_transformers(source)
        assert frequencies == pytest.approx(rotary.inverse_frequencies(), rel=ROUNDING, abs=0)
        assert factor == pytest.approx(rotary.attention_factor, rel=1e-12)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN | {"truncate": False},
        YARN | {"truncate": None},
        YARN | {"factor": None},
        YARN | {"mscale": 0.7, "truncate": False},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 1.7},
        {"rope_type": "yarn", "factor": 8.0, "truncate": False},
        LLAMA3,
        {key: value for key, value in LLAMA3.items() if not key.startswith("original")},
    ],
)
def test_defaults_of_the_scalings_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    """Wide heads and a ramp that is not rounded, so that every default moves some frequency."""
    wide = {"hidden_size": 512, "max_position_embeddings": 2048, "rope_scaling": scaling}
    rotary = rotary_of(**wide)
    frequencies, factor = frequencies_of_transformers(BASE | wide)
    assert frequencies == pytest.approx(rotary.inverse_frequencies(), rel=ROUNDING, abs=0)
    assert factor == pytest.approx(rotary.attention_factor, rel=1e-12)


def test_difference_reports_the_first_path() -> None:
    spec = spec_of()
    assert difference(spec, replace(spec, name="other"), "") is None
    other = replace(spec, max_positions=5)
    assert difference(spec, other, "") == ("max_positions", 128, 5)
