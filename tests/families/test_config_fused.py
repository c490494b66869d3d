"""gpt_neox, falcon, opt, bloom and mpt: what their configs say against appearances, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table, write_config
from asbuilt.spec import Alibi, Model, Parallel, walk, weights

Config = dict[str, Any]
NAMES = ("gpt-neox-20b", "falcon-7b", "opt-1.3b", "bloom-560m", "mpt-7b")
# family -> what its reader refuses, by key; a dotted key lies in an object inside
REFUSED: list[tuple[str, str, object]] = [
    ("gpt_neox", "rotary_pct", 0.0),
    ("gpt_neox", "rotary_pct", 1.5),
    ("gpt_neox", "hidden_size", 6145),
    ("gpt_neox", "rope_theta", 10000.0),
    ("falcon", "alibi", True),
    ("falcon", "apply_residual_connection_post_layernorm", True),
    ("falcon", "num_ln_in_parallel_attn", 2),
    ("falcon", "multi_query", None),
    ("opt", "learned_embeddings", False),
    ("opt", "scale_embeddings", True),
    ("opt", "word_embed_proj_dim", 0),
    ("opt", "activation_function", "quick"),
    ("bloom", "apply_residual_connection_post_layernorm", True),
    ("bloom", "n_inner", 1000),
    ("bloom", "n_embed", 128),
    ("mpt", "attn_config.alibi", False),
    ("mpt", "attn_config.alibi_bias_max", 16),
    ("mpt", "attn_config.clip_qkv", 6.0),
    ("mpt", "attn_config.qk_ln", True),
    ("mpt", "attn_config.prefix_lm", True),
    ("mpt", "attn_config.attn_type", "multiquery_attention"),
    ("mpt", "attn_config.n_heads", 3),
    ("mpt", "no_bias", False),
    ("mpt", "logit_scale", 0.5),
    ("mpt", "expansion_ratio", 2),
]


def config_of(name: str) -> Config:
    entry = find(name)
    return write_config(entry.family, entry.spec(), {}, entry.dtype)


def reading(config: Config) -> Model:
    return read_config(config, "x").spec


def size(spec: Model) -> int:
    return sum(weight.size for _, weight, _ in weights(spec))


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_refused_by_name(family: str, key: str, value: object) -> None:
    config = next(c for c in map(config_of, NAMES) if c["model_type"] == family)
    *outer, last = key.split(".")
    place = config[outer[0]] if outer else config
    place[last] = value
    with pytest.raises(InputError, match=last):
        reading(config)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_keys_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="hiden_size"):
        reading(config_of(name) | {"hiden_size": 8})


@given(st.integers(1, 71))
def test_falcon_ignores_num_kv_heads_under_multi_query(said: int) -> None:
    config = config_of("falcon-7b")
    read = read_config(config | {"num_kv_heads": said}, "falcon-7b")
    assert read.spec == find("falcon-7b").spec()
    assert write_config("falcon", read.spec, read.carried, None)["num_kv_heads"] == said


def test_falcon_of_the_newer_generation_heeds_num_kv_heads() -> None:
    """The 40B: 8 key heads for 128 heads, a norm for each branch."""
    config = config_of("falcon-7b") | {
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "new_decoder_architecture": True,
        "num_kv_heads": 8,
    }
    del config["ffn_hidden_size"]
    spec = reading(config)
    assert not any(isinstance(part, Parallel) for _, part in walk(spec))
    per_layer = 2 * 8192 * 8192 + 2 * 8192 * 8 * 64 + 2 * 4 * 8192 * 8192 + 2 * 2 * 8192
    assert size(spec) == 60 * per_layer + 65024 * 8192 + 2 * 8192
    names = {name for entry in tensor_table("falcon", spec).entries for name in entry.names}
    assert "transformer.h.59.ln_mlp.bias" in names
    assert reading(config | {"num_ln_in_parallel_attn": 1}) != spec


def test_bloom_is_read_in_the_hub_files_spelling() -> None:
    config = config_of("bloom-560m")
    hub = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    respelled = {key: value for key, value in config.items() if key not in hub.values()}
    respelled |= {new: config[old] for new, old in hub.items()}
    assert reading(respelled) == reading(config)


def test_mpt_has_no_positions_whatever_learned_pos_emb_says() -> None:
    config = config_of("mpt-7b")
    assert reading(config | {"learned_pos_emb": True}) == reading(config | {"learned_pos_emb": False})
    assert reading(config | {"learned_pos_emb": True}).positions is None


@given(st.integers(1, 130))
def test_alibi_slopes_are_those_of_bloom_and_of_mpt(heads: int) -> None:
    """Both codes choose slopes in their own way for heads that are no power of two; it is one function."""
    slopes = torch.tensor(Alibi(n_heads=heads).slopes)
    torch.testing.assert_close(slopes, _get_alibi_slopes(heads, torch.device("cpu")), rtol=3e-6, atol=0.0)
    bias = build_mpt_alibi_tensor(heads, 2).reshape(heads, 2)  # of the token before, and of the token itself
    torch.testing.assert_close(-slopes, bias[:, 0], rtol=3e-6, atol=0.0)
