"""Families with experts: which layers have them, how many, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table, write_config
from asbuilt.families.shared.experts import MOST_EXPERTS
from asbuilt.spec import (
    Attention,
    ExpertGroups,
    GatedMLP,
    MixtureOfExperts,
    Model,
    Rotary,
    YaRN,
    buffers,
)

Config = dict[str, Any]
SIZES: Config = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, Config] = {
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 5},
    "olmoe": SIZES | {"model_type": "olmoe", "num_experts": 5},
    "qwen3_moe": SIZES | {"model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 7},
}


def spec_of(config: Config) -> Model:
    return read_config(config, "x").spec


def sparse_layers(spec: Model) -> list[int]:
    return [i for i, block in enumerate(spec.blocks) if isinstance(block.branches[-1].body, MixtureOfExperts)]


def mixture_of(spec: Model) -> MixtureOfExperts:
    body = spec.blocks[sparse_layers(spec)[0]].branches[-1].body
    assert isinstance(body, MixtureOfExperts)
    return body


@pytest.mark.parametrize("family", CONFIGS)
def test_both_spellings_of_the_number_of_experts(family: str) -> None:
    config = {key: value for key, value in CONFIGS[family].items() if "experts" not in key or "tok" in key}
    for key in ("num_experts", "num_local_experts"):
        assert mixture_of(spec_of(config | {key: 3})).n_experts == 3
    with pytest.raises(InputError, match="disagrees"):
        spec_of(config | {"num_experts": 3, "num_local_experts": 4})


def test_only_mixtral_always_renormalises() -> None:
    renormalised = {family: mixture_of(spec_of(config)).router.renormalise for family, config in CONFIGS.items()}
    assert renormalised == {"mixtral": True, "olmoe": False, "qwen3_moe": False}
    for family in ("olmoe", "qwen3_moe"):
        assert mixture_of(spec_of(CONFIGS[family] | {"norm_topk_prob": True})).router.renormalise


def test_widths_of_experts_and_of_dense_layers() -> None:
    spec = spec_of(CONFIGS["qwen3_moe"] | {"mlp_only_layers": [0]})
    dense = spec.blocks[0].branches[-1].body
    assert isinstance(dense, GatedMLP)
    assert (dense.d_ff, mixture_of(spec).d_ff) == (10, 7)
    assert mixture_of(spec_of(CONFIGS["olmoe"])).d_ff == mixture_of(spec_of(CONFIGS["mixtral"])).d_ff == 10


@given(st.integers(1, 5), st.none() | st.lists(st.integers(0, 6)), st.integers(1, 6))
def test_which_layers_have_experts(step: int, listed: list[int] | None, layers: int) -> None:
    pattern = {"decoder_sparse_step": step, "mlp_only_layers": listed, "num_hidden_layers": layers}
    config = CONFIGS["qwen3_moe"] | pattern
    sparse = [i for i in range(layers) if i not in (listed or []) and (i + 1) % step == 0]
    if not sparse:
        with pytest.raises(InputError, match="decoder_sparse_step"):
            spec_of(config)
        return
    reading = read_config(config, "x")
    assert sparse_layers(reading.spec) == sparse
    assert {key: write_config("qwen3_moe", reading.spec, reading.carried, None)[key] for key in pattern} == pattern
    assert spec_of(write_config("qwen3_moe", reading.spec, {}, None)) == reading.spec
    stale = {"decoder_sparse_step": 1, "mlp_only_layers": [0]}  # of some other model
    assert spec_of(write_config("qwen3_moe", reading.spec, stale, None)) == reading.spec


@pytest.mark.parametrize("family", CONFIGS)
def test_every_expert_has_the_hubs_names(family: str) -> None:
    table = tensor_table(family, spec_of(CONFIGS[family]))
    names = [name for entry in table.entries for name in entry.names if ".experts." in name]
    assert len(names) == len(set(names)) == 4 * 5 * 3
    first = {"mixtral": "block_sparse_moe.experts.4.w1.weight"}.get(family, "mlp.experts.4.gate_proj.weight")
    assert f"model.layers.3.{first}" in names


@pytest.mark.parametrize("family", CONFIGS)
def test_one_token_uses_the_chosen_experts(family: str) -> None:
    spec = spec_of(CONFIGS[family])
    part = mixture_of(spec)
    idle = len(sparse_layers(spec)) * (part.n_experts - part.top_k) * 3 * part.d_ff * part.d_model
    assert cost.total_parameters(spec) - cost.active_parameters(spec) == idle > 0


GLM: Config = SIZES | {
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "moe_intermediate_size": 7,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
}


def test_dense_layers_come_first_and_shared_experts_are_one_wide_one() -> None:
    spec = spec_of(GLM | {"first_k_dense_replace": 3, "n_shared_experts": 2})
    assert sparse_layers(spec) == [3]
    part = mixture_of(spec)
    assert part.shared is not None
    assert (part.d_ff, part.shared.d_ff) == (7, 14)


@pytest.mark.parametrize(("groups", "top"), [(1, 1), (3, 3), (2, 1), (3, 2)])
def test_groups_are_a_limit_only_where_some_are_closed(groups: int, top: int) -> None:
    config = GLM | {"n_group": groups, "topk_group": top}
    reading = read_config(config, "x")
    found = mixture_of(reading.spec).router.groups
    assert found == (ExpertGroups(n_groups=groups, top_groups=top, score="two_best") if top < groups else None)
    written = write_config("glm4_moe", reading.spec, reading.carried, None)
    assert (written["n_group"], written["topk_group"]) == (groups, top)
    assert spec_of(write_config("glm4_moe", reading.spec, {}, None)) == reading.spec


def test_glm_air_as_the_hub_counts_it() -> None:
    """The safetensors metadata of zai-org/GLM-4.5-Air says 110,468,824,832: layer 46 and all corrections with it."""
    spec = find("glm-4.5-air").spec()
    extra = cost.stored_extra(spec)
    assert cost.total_parameters(spec) + sum(extra.values()) == 110_468_824_832
    assert extra["buffers"] == 45 * 128
    assert extra["predictors"] == 110_468_824_832 - 106_852_245_504 - 45 * 128
    names = {name for entry in tensor_table("glm4_moe", spec).entries for name in entry.names}
    assert {"model.layers.46.eh_proj.weight", "model.layers.46.mlp.gate.e_score_correction_bias"} <= names


def test_corrections_are_stored_and_no_parameters() -> None:
    spec = spec_of(GLM | {"num_nextn_predict_layers": 0})
    held = {path for path, _, _ in buffers(spec)}
    assert held == {f"blocks.{i}.ffn.body.router.correction" for i in (1, 2, 3)}
    assert cost.stored_extra(spec) == {"buffers": 3 * 6, "predictors": 0, "computed": 0}
    names = {name for entry in tensor_table("glm4_moe", spec).entries for name in entry.names}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_group", 4),
        ("n_group", 6),  # groups of one have no two best
        ("topk_group", 2),
        ("num_experts_per_tok", 7),
        ("first_k_dense_replace", 4),
        ("first_k_dense_replace", -1),
        ("n_shared_experts", 0),
        ("n_routed_experts", MOST_EXPERTS),
        ("routed_scaling_factor", 0),
        ("partial_rotary_factor", 0.1),
        ("mlp_bias", True),
    ],
)
def test_glm_refuses_by_name(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(GLM | {key: value})


LLAMA4: Config = SIZES | {
    "model_type": "llama4_text",
    "num_local_experts": 5,
    "head_dim": 8,
    "intermediate_size_mlp": 17,
}
GPT_OSS: Config = SIZES | {"model_type": "gpt_oss", "num_local_experts": 5, "head_dim": 8}


def attentions(spec: Model) -> list[Attention]:
    return [body for block in spec.blocks if isinstance(body := block.branches[0].body, Attention)]


def test_llama4_layers_are_told_one_by_one_or_by_interval() -> None:
    usual = spec_of(LLAMA4 | {"interleave_moe_layer_step": 2})
    assert sparse_layers(usual) == [1, 3]
    assert [layer.chunk for layer in attentions(usual)] == [8192, 8192, 8192, None]
    assert [layer.positions is None for layer in attentions(usual)] == [False, False, False, True]
    assert [layer.temperature is None for layer in attentions(usual)] == [True, True, True, False]
    dense = usual.blocks[0].branches[-1].body
    assert isinstance(dense, GatedMLP)
    assert (dense.d_ff, mixture_of(usual).d_ff) == (17, 10)
    listed = {"moe_layers": [0], "no_rope_layers": [0, 1, 0, 1], "attention_chunk_size": None}
    told = spec_of(LLAMA4 | listed)
    assert sparse_layers(told) == [0]
    assert {layer.chunk for layer in attentions(told)} == {None}
    assert [layer.positions is None for layer in attentions(told)] == [True, False, True, False]


def test_gpt_oss_without_rotary_keys_is_yarn() -> None:
    """As transformers has it: a null is not said either, and only an object of its own changes it."""
    for said in ({}, {"rope_scaling": None}, {"rope_parameters": None}):
        rotary = attentions(spec_of(GPT_OSS | said))[0].positions
        assert isinstance(rotary, Rotary)
        assert rotary.scaling == YaRN(factor=32.0, original_context=4096, truncate=False)
    plain = read_config(GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, "x")
    assert attentions(plain.spec)[0].positions == Rotary(d_rotary=8, theta=100.0)
    assert spec_of(write_config("gpt_oss", plain.spec, plain.carried, None)) == plain.spec


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LLAMA4, "no_rope_layers", [1, 1]),
        (LLAMA4, "no_rope_layers", [1, 1, 2, 1]),
        (LLAMA4, "layer_types", ["sliding_attention"] * 4),
        (LLAMA4, "layer_types", ["full_attention"] * 3),
        (LLAMA4, "moe_layers", []),
        (LLAMA4, "moe_layers", "all"),
        (LLAMA4, "interleave_moe_layer_step", 5),
        (LLAMA4, "floor_scale", 0),
        (LLAMA4, "num_experts_per_tok", 6),
        (GPT_OSS, "hidden_act", "gelu"),
        (GPT_OSS, "experts_per_token", 3),
        (GPT_OSS, "sliding_window", None),
        (GPT_OSS, "swiglu_limit", 0),
        (GPT_OSS, "layer_types", ["sliding_attention"]),
        (GPT_OSS, "quantization_config", "mxfp4"),
        (GPT_OSS, "quantization_config", {}),
    ],
)
def test_llama4_and_gpt_oss_refuse_by_name(config: Config, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(config | {key: value})


# Of all parameters those that one token uses: its experts, everything shared, embedding and head as a whole.
ACTIVE = {
    "mixtral-8x7b": 12_879_925_248,  # 46,702,792,704 - 32 layers * 6 idle experts * 3 * 4096 * 14336
    "qwen3-30b-a3b": 30_532_122_624 - 48 * 120 * 3 * 2048 * 768,
    "olmoe-1b-7b": 6_919_161_856 - 16 * 56 * 3 * 2048 * 1024,
    "glm-4.5-air": 106_852_245_504 - 45 * 120 * 3 * 4096 * 1408,
    "gpt-oss-20b": 20_914_757_184 - 24 * 28 * (3 * 2880 * 2880 + 3 * 2880),
    "llama-4-scout-text": 107_769_861_120 - 48 * 15 * 3 * 5120 * 8192,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_of_published_models(name: str) -> None:
    assert cost.active_parameters(find(name).spec()) == ACTIVE[name]


BAD: list[tuple[str, str, Config]] = [
    *(("num_experts_per_tok", family, {"num_experts_per_tok": 6}) for family in CONFIGS),
    *(("num_experts_per_tok", family, {"num_experts_per_tok": 0}) for family in CONFIGS),
    ("num_local_experts", "mixtral", {"num_local_experts": MOST_EXPERTS}),
    ("num_experts", "olmoe", {"num_experts": 0}),
    ("attention_bias", "mixtral", {"attention_bias": True}),
    ("norm_topk_prob", "mixtral", {"norm_topk_prob": True}),
    ("clip_qkv", "olmoe", {"clip_qkv": 8.0}),
    ("head_dim", "olmoe", {"head_dim": 16}),
    ("sliding_window", "olmoe", {"sliding_window": 8}),
    ("decoder_sparse_step", "qwen3_moe", {"decoder_sparse_step": 0}),
    ("mlp_only_layers", "qwen3_moe", {"mlp_only_layers": 3}),
    ("mlp_only_layers", "qwen3_moe", {"mlp_only_layers": ["0"]}),
    ("max_window_layers", "qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("shared_expert_intermediate_size", "qwen3_moe", {"shared_expert_intermediate_size": 8}),
]


@pytest.mark.parametrize(("key", "family", "more"), BAD)
def test_refused_by_name(key: str, family: str, more: Config) -> None:
    with pytest.raises(InputError, match=key):
        spec_of(CONFIGS[family] | more)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_spec_without_experts_cannot_be_written(family: str) -> None:
    dense = spec_of({key: value for key, value in SIZES.items() if "experts" not in key} | {"model_type": "llama"})
    with pytest.raises(InputError):
        write_config(family, dense, {}, None)
