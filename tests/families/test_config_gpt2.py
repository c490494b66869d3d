"""The gpt2 config reader and writer: what each key means and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from families_drawn import gpt2_configs
from hypothesis import given

from asbuilt.errors import InputError
from asbuilt.families import families_that_write, read_config, write_config
from asbuilt.spec import MLP, Attention, Head, Model, TiedHead

BASE: dict[str, Any] = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 32}


def spec_of(**changes: object) -> Model:
    return read_config(BASE | changes, "x").spec


def scales(model: Model) -> list[float | None]:
    bodies = [block.branches[0].body for block in model.blocks]
    return [body.scale for body in bodies if isinstance(body, Attention)]


def d_ff(model: Model) -> int:
    body = model.blocks[0].branches[1].body
    assert isinstance(body, MLP)
    return body.d_ff


def test_class_defaults() -> None:
    spec = read_config({"model_type": "gpt2"}, "x").spec
    assert spec == read_config({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}, "x").spec
    assert (spec.n_vocab, spec.max_positions, d_ff(spec)) == (50257, 1024, 4 * 768)
    assert isinstance(spec.head, TiedHead)
    assert isinstance(spec_of(tie_word_embeddings=False).head, Head)


def test_inner_width_null_is_four_times() -> None:
    assert d_ff(spec_of()) == d_ff(spec_of(n_inner=None)) == 4 * 64
    assert d_ff(spec_of(n_inner=100)) == 100


def test_score_scales() -> None:
    usual = 16**-0.5
    assert scales(spec_of()) == [None] * 3
    assert scales(spec_of(scale_attn_weights=False)) == [1.0] * 3
    assert scales(spec_of(scale_attn_by_inverse_layer_idx=True)) == [None, usual / 2, usual / 3]
    both = spec_of(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    assert scales(both) == [1.0, 1 / 2, 1 / 3]


def test_other_spellings() -> None:
    config = {"model_type": "gpt2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    assert read_config(config | {"max_position_embeddings": 32}, "x").spec == spec_of()


def test_irrelevant_keys_are_carried_verbatim() -> None:
    carried = {"summary_type": "cls_index", "resid_pdrop": 0.1, "task_specific_params": {"a": {"b": 1}}}
    carried |= {"reorder_and_upcast_attn": True, "add_cross_attention": False, "eos_token_id": 50256}
    assert read_config(BASE | carried, "x").carried == carried


BAD: list[tuple[str, dict[str, Any]]] = [
    *(("n_embd", {"n_embd": value}) for value in (0, -64, 64.0, "64", True, None, 2**31 - 1)),
    *(("n_head", {"n_head": value}) for value in (0, 5, 128)),
    ("num_attention_heads", {"num_attention_heads": 2}),
    *(("n_layer", {"n_layer": value}) for value in (0, 10**9, None)),
    *(("n_inner", {"n_inner": value}) for value in (0, -1, 256.0)),
    *(("n_positions", {"n_positions": value}) for value in (0, None)),
    *(("n_ctx", {"n_ctx": value}) for value in (0, 33)),
    *(("vocab_size", {"vocab_size": value}) for value in (0, "50257")),
    *(("layer_norm_epsilon", {"layer_norm_epsilon": value}) for value in (0, -1, float("nan"), 2)),
    ("activation_function", {"activation_function": "tanh"}),
    ("scale_attn_weights", {"scale_attn_weights": 1}),
    ("scale_attn_by_inverse_layer_idx", {"scale_attn_by_inverse_layer_idx": None}),
    ("add_cross_attention", {"add_cross_attention": True}),
    ("tie_word_embeddings", {"tie_word_embeddings": 0}),
    ("architectures", {"architectures": ["GPT2DoubleHeadsModel"]}),
    ("rope_theta", {"rope_theta": 10000.0}),
    ("quantization_config", {"quantization_config": {}}),
]


@pytest.mark.parametrize(("key", "changes"), BAD)
def test_bad_values_are_one_message_naming_the_key(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read_config(BASE | changes, "folder/config.json")
    assert key in str(caught.value)
    assert str(caught.value).startswith("folder/config.json: ")


@given(gpt2_configs())
def test_what_is_written_reads_back_equal(config: dict[str, Any]) -> None:
    first = read_config(config, "x")
    written = write_config("gpt2", first.spec, first.carried, first.dtype)
    assert read_config(json.loads(json.dumps(written)), "x") == first
    assert families_that_write(first.spec)[0] == "gpt2"


@pytest.mark.parametrize("wrong", ["llama", "gpt2"])
def test_a_family_refuses_the_other_ones_spec(wrong: str) -> None:
    specs = {"llama": spec_of(), "gpt2": read_config({"model_type": "llama"}, "x").spec}
    with pytest.raises(InputError, match=r"blocks\.0\."):
        write_config(wrong, specs[wrong], {}, None)
