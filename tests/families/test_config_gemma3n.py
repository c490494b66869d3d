"""The gemma3n_text config reader: published sizes, what each layer is, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import Attention, GatedMLP, LanguageModel, walk

FULL, SLIDING = "full_attention", "sliding_attention"
# google/gemma-3n-E4B, its text_config
E4B: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_lr_multiplier": 1.0,
    "altup_num_inputs": 4,
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": [16384] * 35,
    "laurel_rank": 64,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}
# google/gemma-3n-E2B, its text_config, where it differs
E2B = E4B | {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "intermediate_size": [8192] * 30,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 6,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
}


def read(config: dict[str, Any]) -> LanguageModel:
    spec = read_config(config, "x").spec
    assert isinstance(spec, LanguageModel)
    return spec


def total(n_layers: int, d_ff: int) -> int:
    """The model's parameters, one after the other."""
    d, own = 2048, 20  # layers with keys and values of their own
    queries = d * 8 * 256 * 2 + 256
    keys = d * 2 * 256 * 2 + 256
    norms, laurel = 4 * d, 2 * d * 64 + d
    altup = 4 * 4 + 16 * 4 + 4 * d + d + d
    vector = 2 * d * 256 + d
    layer = queries + norms + laurel + altup + vector + 3 * d * d_ff
    tables = 262400 * d + 262144 * n_layers * 256
    outside = d * n_layers * 256 + 256 + 6 * d * d + d
    return tables + outside + n_layers * layer + own * keys


@pytest.mark.parametrize(("config", "n_layers", "d_ff"), [(E4B, 35, 16384), (E2B, 30, 8192)])
def test_published_sizes(config: dict[str, Any], n_layers: int, d_ff: int) -> None:
    """Of 4B and 2B effective parameters: 6.87 and 4.46 billion are stored of the text, unused keys and values too."""
    reading = read_config(config, "x")
    counted = cost.total_parameters(reading.spec)
    assert (
        counted == total(n_layers, d_ff) == {35: 6_835_235_568, 30: 4_435_182_688}[n_layers]
    )  # as transformers counts
    unused = config["num_kv_shared_layers"] * (2 * 2048 * 512 + 256)
    assert round((counted + unused) / 1e9, 2) == {35: 6.87, 30: 4.46}[n_layers]
    written = write_config("gemma3n_text", reading.spec, reading.carried, "bfloat16")
    assert read_config(written, "x").spec == reading.spec
    kept = (
        "altup_coef_clip",
        "intermediate_size",
        "activation_sparsity_pattern",
        "num_kv_shared_layers",
        "laurel_rank",
    )
    assert {key: written[key] for key in kept} == {key: config[key] for key in kept}


def test_keys_and_values_are_those_of_the_first_twenty_layers() -> None:
    """16 windows of 512 tokens and 4 layers of all tokens: 2 heads of 256 keys and 256 values, 2 bytes each."""
    spec = read(E4B)
    layers = [part for _, part in walk(spec) if isinstance(part, Attention)]
    assert [layer.kv_from for layer in layers] == [None] * 20 + (["sliding"] * 4 + ["full"]) * 3
    assert [i for i, layer in enumerate(layers) if layer.kv_name] == [18, 19]
    bill = cost.cache(spec, 4096, "bf16")
    assert (bill.unbounded, bill.at_seq) == (4 * 2048, 4 * 2048 * 4096 + 16 * 2048 * 512)


def test_the_first_ten_layers_cut_their_gates() -> None:
    less = {key: value for key, value in E4B.items() if key != "activation_sparsity_pattern"}
    for config in (E4B, less, less | {"activation_sparsity_pattern": None}):
        gates = [part.sparsity for _, part in walk(read(config)) if isinstance(part, GatedMLP)]
        assert gates == [0.95] * 10 + [None] * 25
    few = less | {"num_hidden_layers": 10, "intermediate_size": 16384, "layer_types": None, "num_kv_shared_layers": 5}
    assert [part.sparsity for _, part in walk(read(few)) if isinstance(part, GatedMLP)] == [None] * 10


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("altup_active_idx", 1),
        ("altup_correct_scale", False),
        ("altup_num_inputs", 1),
        ("activation_sparsity_pattern", [0.95] * 34),
        ("activation_sparsity_pattern", [1.0] * 35),
        ("intermediate_size", [16384] * 34),
        ("intermediate_size", [0] * 35),
        ("num_kv_shared_layers", 35),
        ("num_kv_shared_layers", 32),
        ("sliding_window", None),
        ("hidden_size_per_layer_input", 0),
        ("query_pre_attn_scalar", 128),
    ],
)
def test_what_is_refused_is_named(key: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        read_config(E4B | {key: value}, "x")
    assert (caught.value.field or "").startswith(f"x: {key}")
