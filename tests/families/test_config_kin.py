"""Kin of llama that add little: their classes' defaults, their own keys written and read back, what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import load_config_file, read_config, tensor_table, write_config

FRONTIER = Path(__file__).parents[3] / "shared" / "frontier"
FULL, SLIDING = "full_attention", "sliding_attention"
BOOL = st.booleans()
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOW = st.none() | st.integers(1, 9)
KINDS = st.lists(st.sampled_from([FULL, SLIDING]), min_size=3, max_size=3)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
RAISED = st.floats(1.0, 9.0).map(lambda alpha: {"type": "dynamic", "alpha": alpha, "factor": 1.0})
# What each family's configs may say beside the sizes: of these keys any number is drawn.
OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "minimax_m2": {"rotary_dim": st.sampled_from([2, 4, 6]), "num_experts_per_tok": st.integers(1, 5)},
    "ministral3": {
        "head_dim": st.sampled_from([None, 6, 8]),
        "sliding_window": WINDOW,
        "rope_parameters": st.floats(0.0, 2.0).map(lambda beta: YARN | {"llama_4_scaling_beta": beta}),
    },
    "olmo3": {
        "layer_types": KINDS,
        "attention_bias": BOOL,
        "rope_theta": st.sampled_from([1e4, 5e5]),
        "rope_scaling": st.sampled_from([None, YARN]),
    },
    "qwen2_moe": {
        "qkv_bias": BOOL,
        "norm_topk_prob": BOOL,
        "mlp_only_layers": st.lists(st.integers(0, 1)),
        "use_sliding_window": BOOL,
        "max_window_layers": st.integers(0, 4),
        "shared_expert_intermediate_size": st.integers(1, 9),
    },
    "cohere2": {"layer_types": KINDS, "sliding_window_pattern": st.integers(1, 4), "attention_bias": BOOL},
    "diffllama": {"head_dim": st.sampled_from([None, 8]), "attention_bias": BOOL},
    "seed_oss": {
        "head_dim": st.sampled_from([None, 8]),
        "attention_bias": BOOL,
        "attention_out_bias": BOOL,
        "mlp_bias": BOOL,
    },
    "glm": {"head_dim": st.sampled_from([None, 8]), "partial_rotary_factor": st.sampled_from([0.34, 1.0])},
    "glm4": {"attention_bias": BOOL, "rope_scaling": st.sampled_from([None, YARN])},
    "ernie4_5": {"head_dim": st.sampled_from([None, 8]), "use_bias": BOOL},
    "ernie4_5_moe": {
        "moe_layer_start_index": st.integers(0, 1),
        "moe_layer_end_index": st.sampled_from([-1, 1, 2, 7]),
        "moe_layer_interval": st.integers(1, 2),
        "moe_num_shared_experts": st.integers(0, 2),
        "moe_norm_min": st.sampled_from([1e-12, 1e-9]),
    },
    "stablelm": {"use_qkv_bias": BOOL, "use_parallel_residual": BOOL, "partial_rotary_factor": st.just(1.0)},
    "granitemoe": {
        "attention_bias": BOOL,
        "embedding_multiplier": st.integers(1, 20),
        "logits_scaling": st.integers(1, 20) | st.floats(0.1, 50),
    },
    "arcee": {"head_dim": st.sampled_from([None, 8]), "attention_bias": BOOL, "mlp_bias": BOOL},
    "gptj": {"rotary_dim": st.sampled_from([2, 4, 6]), "n_inner": st.none() | st.integers(1, 9)},
    "gpt_bigcode": {"multi_query": BOOL, "scale_attn_weights": BOOL, "n_inner": st.none() | st.integers(1, 9)},
    "glm4_moe_lite": {
        "mlp_layer_types": st.sampled_from([["sparse"] * 3, ["sparse", "dense", "sparse"]]),
        "first_k_dense_replace": st.integers(0, 2),
        "q_lora_rank": st.none() | st.integers(1, 9),
        "rope_interleave": BOOL,
    },
    "hunyuan_v1_dense": {"head_dim": st.sampled_from([None, 8]), "attention_bias": BOOL, "rope_scaling": RAISED},
    "hunyuan_v1_moe": {
        "num_experts": st.sampled_from([3, [3, 3, 3]]),
        "moe_topk": st.sampled_from([2, [2, 2, 2]]),
        "rope_scaling": RAISED,
    },
    "solar_open": {"n_shared_experts": st.integers(1, 3), "attention_bias": BOOL, "norm_topk_prob": BOOL},
    "dots1": {
        "layer_types": KINDS,
        "max_window_layers": st.integers(0, 4),
        "first_k_dense_replace": st.integers(0, 2),
        "norm_topk_prob": BOOL,
    },
    "nanochat": {"attention_bias": BOOL, "final_logit_softcapping": st.none() | st.floats(0.5, 30.0)},
    "internlm3": {"head_dim": st.sampled_from([None, 8])},
    "mimo_v2_flash": {
        "layer_types": KINDS,
        "hybrid_layer_pattern": st.lists(st.integers(0, 1), min_size=3, max_size=3),
        "moe_layer_freq": st.sampled_from([[0, 1, 1], [1, 0, 1]]),
        "v_head_dim": st.sampled_from([6, 12, 20]),
        "sliding_window_size": st.integers(1, 9),
        "attention_value_scale": st.none() | st.floats(0.1, 2.0),
        "routed_scaling_factor": st.none() | st.floats(0.1, 2.0),
        "swa_rope_theta": st.sampled_from([1e3, 1e4]),
    },
    "apertus": {
        "hidden_act": st.sampled_from(["xielu", "silu", "gelu_new"]),
        "attention_bias": BOOL,
        "rope_scaling": st.sampled_from([YARN, {"rope_type": "default"}]),
    },
    "afmoe": {
        "layer_types": KINDS,
        "global_attn_every_n_layers": st.integers(1, 4),
        "num_dense_layers": st.integers(0, 2),
        "mup_enabled": BOOL,
        "route_scale": st.floats(0.1, 3.0),
    },
    "exaone4": {"layer_types": KINDS, "sliding_window_pattern": st.sampled_from([2, 3, "LLG"])},
}
# Sizes that a small model of the family needs beside those.
SMALL: dict[str, dict[str, Any]] = {
    "minimax_m2": {"head_dim": 6, "num_local_experts": 5, "num_experts_per_tok": 2},
    "ministral3": {"head_dim": 6},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7,
        "shared_expert_intermediate_size": 9,
    },
    "seed_oss": {"head_dim": 6},
    "ernie4_5": {"head_dim": 6},
    "afmoe": {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 7},
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7,
        "num_nextn_predict_layers": 0,
    },
    "hunyuan_v1_moe": {"num_experts": 3},
    "solar_open": {
        "head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7,
    },
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7,
    },
    "internlm3": {"head_dim": 6},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "head_dim": 12,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7,
    },
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 7},
    "stablelm": {"partial_rotary_factor": 0.34},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "glm": {"head_dim": 6, "partial_rotary_factor": 0.34},
    "glm4": {"head_dim": 6, "partial_rotary_factor": 0.34},
}
REFUSED: list[tuple[str, str, object]] = [
    ("minimax_m2", "rotary_dim", 5),
    ("minimax_m2", "rotary_dim", 8),
    ("minimax_m2", "scoring_func", "softmax"),
    ("minimax_m2", "use_qk_norm", False),
    ("minimax_m2", "attn_type_list", [1, 0, 1]),
    ("minimax_m2", "shared_intermediate_size", 8),
    ("ministral3", "llama_4_scaling_beta", {"rope_parameters": YARN | {"llama_4_scaling_beta": -0.1}}),
    ("ministral3", "original_max_position_embeddings", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}),
    ("ministral3", "layer_types", [SLIDING] * 3),
    ("olmo3", "sliding_window", None),
    ("olmo3", "layer_types", [SLIDING]),
    ("exaone4", "sliding_window_pattern", 0),
    ("exaone4", "sliding_window_pattern", "LXG"),
    ("exaone4", "attention_bias", True),
    ("qwen2_moe", "num_experts_per_tok", 6),
    ("qwen2_moe", "shared_expert_intermediate_size", 0),
    ("qwen2_moe", "layer_types", {"use_sliding_window": False, "layer_types": [SLIDING] * 3}),
    ("qwen2_moe", "decoder_sparse_step", 4),
    ("cohere2", "sliding_window", None),
    ("cohere2", "head_dim", 8),
    ("cohere2", "use_parallel_block", False),
    ("seed_oss", "attention_out_bias", None),
    ("glm", "partial_rotary_factor", 0.1),
    ("glm4", "mlp_bias", True),
    ("ernie4_5", "use_bias", None),
    ("ernie4_5_moe", "use_bias", True),
    ("ernie4_5_moe", "moe_k", 6),
    ("ernie4_5_moe", "moe_layer_start_index", 3),
    ("ernie4_5_moe", "moe_norm_min", 0.1),
    ("stablelm", "qk_layernorm", 1),
    ("stablelm", "rotary_scaling_factor", 2.0),
    ("stablelm", "partial_rotary_factor", 0.1),
    ("granitemoe", "num_experts_per_tok", 6),
    ("arcee", "head_dim", 5),
    ("glm4_moe_lite", "mlp_layer_types", ["dense"] * 3),
    ("glm4_moe_lite", "mlp_layer_types", ["sparse"]),
    ("hunyuan_v1_dense", "use_cla", True),
    ("hunyuan_v1_dense", "alpha", {"rope_scaling": {"type": "dynamic", "alpha": 0}}),
    ("hunyuan_v1_moe", "moe_topk", [1, 2, 2]),
    ("hunyuan_v1_moe", "moe_intermediate_size", 8),
    ("hunyuan_v1_moe", "num_shared_expert", [2, 2, 2]),
    ("solar_open", "first_k_dense_replace", 1),
    ("solar_open", "n_shared_experts", 0),
    ("dots1", "n_routed_experts", None),
    ("dots1", "scoring_func", "softmax"),
    ("nanochat", "final_logit_softcapping", 0),
    ("internlm3", "bias", {"qkv_bias": True}),
    ("mimo_v2_flash", "num_key_value_heads", 4),
    ("mimo_v2_flash", "swa_num_key_value_heads", 4),
    ("mimo_v2_flash", "hybrid_layer_pattern", [0, 1]),
    ("mimo_v2_flash", "moe_layer_freq", 1),
    ("mimo_v2_flash", "mlp_layer_types", ["dense"] * 3),
    ("mimo_v2_flash", "add_full_attention_sink_bias", True),
    ("mimo_v2_flash", "rope_scaling", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {}}),
    ("apertus", "qk_norm", False),
    ("apertus", "hidden_act", "xielu2"),
    ("afmoe", "attention_bias", True),
    ("afmoe", "score_func", "softmax"),
    ("afmoe", "sliding_window", None),
    ("afmoe", "num_shared_experts", 0),
    ("gptj", "rotary_dim", None),
    ("gptj", "rotary_dim", 5),
    ("gptj", "rotary_dim", 8),
    ("gpt_bigcode", "n_head", 5),
    ("gpt_bigcode", "num_key_value_heads", 2),
]


# gpt2's spelling of the sizes
OLDER: dict[str, Any] = {"vocab_size": 50, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64}


def small(family: str) -> dict[str, Any]:
    if family in ("gptj", "gpt_bigcode"):
        return OLDER | {"model_type": family} | ({"rotary_dim": 4} if family == "gptj" else {})
    return SIZES | SMALL.get(family, {}) | {"model_type": family}


@pytest.mark.parametrize("family", [family for family in OWN if family != "dots1"])  # whose class counts no experts
def test_defaults_are_those_of_the_class(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(family).to_dict()
    assert read_config({"model_type": family}, "x").spec == read_config(json.loads(json.dumps(theirs)), "x").spec


@pytest.mark.parametrize("family", OWN)
@given(data=st.data())
def test_what_is_written_reads_back_equal(family: str, data: st.DataObject) -> None:
    own = data.draw(st.fixed_dictionaries({"tie_word_embeddings": BOOL}, optional=OWN[family]))
    first = read_config(small(family) | own, "x")
    written = json.loads(json.dumps(write_config(family, first.spec, first.carried, "bfloat16")))
    again = read_config(written, "x")
    assert (again.spec, again.dtype) == (first.spec, "bfloat16")
    assert {key: again.carried.get(key) for key in first.carried} == first.carried
    assert read_config(write_config(family, first.spec, {}, None), "x").spec == first.spec
    tensor_table(family, first.spec)  # covers every weight, or raises


BAD = [(family, "some_new_key", True) for family in OWN] + REFUSED


@pytest.mark.parametrize(("family", "key", "value"), BAD)
def test_bad_values_are_one_message_naming_the_key(family: str, key: str, value: object) -> None:
    said = value if isinstance(value, dict) else {key: value}
    with pytest.raises(InputError, match=key) as caught:
        read_config(small(family) | said, "x")
    assert str(caught.value).startswith("x: ")


@pytest.mark.parametrize("family", OWN)
def test_another_familys_spec_is_refused(family: str) -> None:
    other = read_config({"model_type": "gpt_neox" if family == "gpt_bigcode" else "gpt2"}, "x").spec
    with pytest.raises(InputError):
        write_config(family, other, {}, None)


def frontier() -> list[dict[str, str]]:
    """The rows of the totals whose family is one of these; one empty row where the folder is absent."""
    if not (FRONTIER / "totals.csv").exists():
        return [{"name": ""}]
    with (FRONTIER / "totals.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["model_type"] in OWN]


@pytest.mark.parametrize("row", frontier(), ids=lambda row: row["name"] or "absent")
def test_published_totals(row: dict[str, str]) -> None:
    if not row["name"]:
        pytest.skip(f"no published models at {FRONTIER}")
    spec = read_config(load_config_file(FRONTIER / row["name"] / "config.json"), row["name"]).spec
    counted = cost.total_parameters(spec), cost.active_parameters(spec), cost.stored_extra(spec)["buffers"]
    assert counted == tuple(int(row[key]) for key in ("total", "active", "buffers"))
