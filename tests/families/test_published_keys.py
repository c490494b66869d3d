"""Keys that published configs carry beside those that transformers' classes have today: known, and without effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN, XIELUActivation

from asbuilt.catalog import find
from asbuilt.cost import total_parameters
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.registry import module
from asbuilt.spec import XIELU, Router, VisionLanguageModel, walk

LLAMA4_TEXT = {
    "attn_temperature_tuning": 4,
    "cache_implementation": "hybrid",
    "_attn_implementation_autoset": True,
    "for_llm_compressor": False,
}
KEYS: list[tuple[str, dict[str, Any]]] = [
    ("gemma-2-2b", {"sliding_window_size": 4096, "cache_implementation": "hybrid", "_attn_implementation": "eager"}),
    (
        "starcoder2-3b",
        {
            "attention_softmax_in_fp32": True,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    ("transformer-base", {"_num_labels": 3, "add_bias_logits": False, "normalize_embedding": False}),
    ("switch-base-8", {"batch_prioritized_routing": False, "num_selected_experts": 1}),
    (
        "clip-vit-base-patch32",
        {"text_config": {"tie_word_embeddings": True}, "vision_config": {"tie_word_embeddings": True, "num_beams": 1}},
    ),
    ("gpt2", {"n_special": 0, "predict_special_tokens": True}),
    ("qwen2.5-7b", {"attention_bias": True, "qkv_bias": True, "use_mrope": False, "is_causal": True}),
    ("qwen3-8b", {"qkv_bias": False, "use_qk_norm": True}),
    ("qwen3-30b-a3b", {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
    ("phi-3-mini", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}),
    ("phi-2", {"attention_bias": False, "rotary_dim": 32}),
    (
        "llama-3-8b",
        {
            "internal_version": "7b-alpha-v2.33",
            "activation": "swiglu",
            "transformers.js_config": {"a": 1},
            "model_max_length": 8192,
            "rope_scaling": {"type": "default", "factor": 1.0},
        },
    ),
    ("opt-1.3b", {"learned_embeddings": True, "scale_embeddings": False}),
    (
        "mamba-130m",
        {"d_model": 768, "d_inner": 1536, "n_layer": 24, "rms_norm": True, "ssm_cfg": {}, "fused_add_norm": True}
        | {"pad_vocab_size_multiple": 8},
    ),
    ("mamba2-2.7b", {"intermediate_size": 5120, "norm_before_gate": True, "rms_norm": True}),
    ("jamba-v0.1", {"mamba_inner_layernorms": True, "calc_logits_for_entire_prompt": False, "n_ctx": 262144}),
    ("olmo-1b", {"pretraining_tp": 1}),
    ("mistral-7b-v0.1", {"output_router_logits": False, "padding_idx": 0}),
    ("gpt-neox-20b", {"custom_pipelines": {"text-generation": {"impl": "x.X"}}}),
    ("bert-base-uncased", {"is_causal": False}),
    ("falcon-7b", {"ff_factor": 4}),
    ("t5-base", {"scalable_attention": True}),
    ("llama-4-scout", {"text_config": LLAMA4_TEXT, "vision_config": {"_attn_implementation_autoset": True}}),
]


@pytest.mark.parametrize(("name", "keys"), KEYS, ids=[name for name, _ in KEYS])
def test_keys_of_published_configs_are_known(name: str, keys: dict[str, Any]) -> None:
    entry = find(name)
    config = write_config(entry.family, entry.spec(), {}, None)
    more = {key: {**(config.get(key) or {}), **said} if isinstance(said, dict) else said for key, said in keys.items()}
    assert read_config(config | more, name).spec == entry.spec()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("switch-base-8", "num_selected_experts", 2),
        ("switch-base-8", "batch_prioritized_routing", True),
        ("starcoder2-3b", "scale_attn_weights", False),
        ("gpt2", "n_special", 3),
        ("qwen2.5-7b", "attention_bias", False),
        ("qwen2.5-7b", "qkv_bias", False),
        ("qwen2.5-7b", "use_mrope", True),
        ("qwen2.5-7b", "is_causal", False),
        ("qwen3-8b", "qkv_bias", True),
        ("qwen3-8b", "use_qk_norm", False),
        ("llama-3-8b", "is_causal", False),
        ("qwen3-30b-a3b", "shared_expert_intermediate_size", 768),
        ("phi-3-mini", "full_attn_mod", 2),
        ("phi-3-mini", "interpolate_factor", 2),
        ("phi-3-mini", "lm_head_bias", True),
        ("phi-3-mini", "mlp_bias", True),
        ("phi-2", "rotary_dim", 64),
        ("llama-3-8b", "activation", "geglu"),
        ("falcon-7b", "ff_factor", 2),
        ("bert-base-uncased", "is_causal", True),
        ("mamba-130m", "d_inner", 3072),
        ("mamba-130m", "ssm_cfg", {"d_state": 32}),
        ("mamba2-2.7b", "intermediate_size", 2560),
        ("mamba2-2.7b", "rms_norm", False),
        ("jamba-v0.1", "mamba_inner_layernorms", False),
    ],
)
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


# Qwen2.5-14B-Instruct-1M; Qwen3-8B as published for 128k tokens by others
CHUNKED = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b"])
def test_what_only_other_programs_read_is_noted(name: str) -> None:
    """Within 262,144 - 8,192 tokens attention by chunks is plain attention, and transformers knows of no other."""
    entry = find(name)
    config = write_config(entry.family, entry.spec(), {}, None)
    reading = read_config(config | {"dual_chunk_attention_config": CHUNKED}, name)
    assert reading.spec == entry.spec()
    assert "beyond 253952 tokens" in reading.notes["dual_chunk_attention_config"]
    again = write_config(entry.family, reading.spec, reading.carried, None)
    assert again["dual_chunk_attention_config"] == CHUNKED
    assert read_config(config | {"dual_chunk_attention_config": None}, name).notes == {}
    for wrong in ({}, {**CHUNKED, "chunk_size": 0}, {**CHUNKED, "local_size": 262144}, {**CHUNKED, "odd": 1}, [1]):
        with pytest.raises(InputError, match="dual_chunk_attention_config"):
            read_config(config | {"dual_chunk_attention_config": wrong}, name)


def test_an_attn_factor_changes_nothing_and_is_noted() -> None:
    entry = find("qwen3-8b")
    config = write_config(entry.family, entry.spec(), {}, None)
    plain = read_config(config | {"rope_scaling": YARN}, "x")
    noted = read_config(config | {"rope_scaling": YARN | {"attn_factor": 0.878}}, "x")
    assert (noted.spec, list(noted.notes), plain.notes) == (plain.spec, ["rope_scaling.attn_factor"], {})


def test_keys_of_starcoder_paligemma_and_internvl() -> None:
    """Keys of their published configs; what a tower's own `architectures` says counts for nothing."""
    runner = {"pad_key_length": True, "runner_max_sequence_length": None}
    code = {"model_type": "gpt_bigcode"}
    assert read_config(code | runner, "x").spec == read_config(code, "x").spec
    sees = {"model_type": "paligemma"}
    assert read_config(sees | {"_vocab_size": 257152}, "x").spec == read_config(sees, "x").spec
    tower = {"model_type": "internvl_vision", "architectures": ["InternVisionModel"]}
    text = {"vocab_size": 151936, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 64}
    seen = {"model_type": "internvl", "text_config": text, "image_token_id": 151667}
    reading = read_config(seen | {"vision_config": tower}, "x")
    assert reading.spec == read_config(seen | {"vision_config": {}}, "x").spec
    assert (
        write_config("internvl", reading.spec, reading.carried, None)["vision_config"]["architectures"]
        == tower["architectures"]
    )


def test_opt_350m_and_phi_4_mini_as_published() -> None:
    """Totals of the published checkpoints. OPT-350M: tables 512 wide, a matrix to 1024, one from it, no last norm."""
    opt = {
        "model_type": "opt",
        "do_layer_norm_before": False,
        "ffn_dim": 4096,
        "hidden_size": 1024,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "word_embed_proj_dim": 512,
        "_remove_final_layer_norm": False,
    }
    block = 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 2 * 2 * 1024
    assert 50272 * 512 + 2 * 512 * 1024 + 2050 * 1024 + 24 * block == 331_196_416
    assert total_parameters(read_config(opt, "x").spec) == 331_196_416
    factors = [1.0] * 48
    phi = {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": factors, "long_factor": factors},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
    }
    block = 3072 * 128 * (24 + 2 * 8 + 24) + 3 * 3072 * 8192 + 2 * 3072
    assert 200064 * 3072 + 32 * block + 3072 == 3_836_021_760
    assert total_parameters(read_config(phi, "x").spec) == 3_836_021_760


def test_a_placeholder_beyond_the_vocabulary_is_read_where_nothing_is_looked_up_for_it() -> None:
    """Gemma 3 as others publish it, with the 262,144 tokens of the text alone."""
    config = write_config("gemma3", find("gemma-3-4b-mm").spec(), {}, None)
    config["text_config"]["vocab_size"] = config["image_token_index"] = 262144
    read = read_config(config, "x").spec
    assert isinstance(read, VisionLanguageModel)
    assert (read.vision.placeholder, read.n_vocab) == (262144, 262144)


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_each_spelling_of_an_activation_is_transformers_own(name: str) -> None:
    """`gelu_python` is the exact one, `gelu_python_tanh` the other: the two part by 5e-4."""
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    assert torch.allclose(ACTIVATIONS[ACTIVATION_NAMES[name]](x), ACT2FN[name](x), rtol=0, atol=1e-8)


def test_a_learned_activation_is_transformers_own() -> None:
    own, x = module(XIELU(), ""), torch.linspace(-6, 6, 1001, dtype=torch.float64)
    theirs = XIELUActivation(dtype=torch.float64)
    given = {"alpha_p": 0.7, "alpha_n": -0.4, "beta": 0.3, "eps": -0.1}
    with torch.no_grad():
        for one in (own.double(), theirs):
            for name, value in given.items():
                getattr(one, name).fill_(value)
    assert torch.allclose(own(x), theirs._xielu_python(x), rtol=0, atol=1e-12)


def test_deepseek_adds_an_epsilon_to_the_sum_of_the_chosen() -> None:
    """DeepseekV3TopkRouter divides by the sum and 1e-20, where it divides."""
    for said, eps in ((True, 1e-20), (False, 0.0)):
        spec = read_config({"model_type": "deepseek_v3", "norm_topk_prob": said}, "x").spec
        routers = [part for _, part in walk(spec) if isinstance(part, Router)]
        assert {(router.renormalise, router.eps) for router in routers} == {(said, eps)}
