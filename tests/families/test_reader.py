"""ConfigReader: every key consumed, declared irrelevant or refused; config files from strangers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.families.shared.reader import ConfigReader, load_config_file

JSON_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


def test_missing_null_and_value_are_three_things() -> None:
    reader = ConfigReader({"b": None, "c": 3}, "x")
    assert [reader.size(key, default=1, null=2) for key in "abc"] == [1, 2, 3]
    reader.finish()


def test_missing_without_default_and_null_without_meaning_are_refused() -> None:
    reader = ConfigReader({"b": None}, "x")
    with pytest.raises(InputError, match="x: a: missing"):
        reader.size("a")
    with pytest.raises(InputError, match=r"x: b: .*null"):
        reader.size("b", default=1)


@given(JSON_VALUES)
def test_size_takes_whole_numbers_and_nothing_else(value: object) -> None:
    reader = ConfigReader({"a": value}, "x")
    if type(value) is int and 1 <= value <= 2**31 - 1:
        assert reader.size("a") == value
    else:
        with pytest.raises(InputError, match="x: a: "):
            reader.size("a", default=1)


@given(JSON_VALUES)
def test_number_takes_finite_numbers_and_nothing_else(value: object) -> None:
    reader = ConfigReader({"a": value}, "x")
    if type(value) in (int, float) and 0 < value <= 1e15:  # type: ignore[operator]
        assert reader.number("a") == value
    else:
        with pytest.raises(InputError, match="x: a: "):
            reader.number("a", default=1.0)


@given(JSON_VALUES)
def test_flag_and_text_convert_nothing(value: object) -> None:
    for getter, kind in (("flag", bool), ("text", str)):
        reader = ConfigReader({"a": value}, "x")
        if type(value) is kind:
            assert getattr(reader, getter)("a") == value
        else:
            with pytest.raises(InputError, match="x: a: "):
                getattr(reader, getter)("a")


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, math.nan, "1", True, [1], {}])
def test_hostile_numbers(value: object) -> None:
    for getter in ("size", "number"):
        with pytest.raises(InputError, match="x: a: "):
            getattr(ConfigReader({"a": value}, "x"), getter)("a")


def test_spellings_must_agree() -> None:
    assert ConfigReader({"new": 4, "old": 4}, "x").size("new", "old") == 4
    assert ConfigReader({"old": 4}, "x").size("new", "old") == 4
    with pytest.raises(InputError, match="old: disagrees with new"):
        ConfigReader({"new": 4, "old": 5}, "x").size("new", "old")
    with pytest.raises(InputError, match="old: disagrees with new"):
        ConfigReader({"new": 1, "old": True}, "x").size("new", "old")


def test_unread_keys_are_named_with_the_nearest_known() -> None:
    reader = ConfigReader({"hidden_siez": 4, "zzz": 1}, "x")
    reader.size("hidden_size", default=1)
    with pytest.raises(InputError, match=r"'hidden_siez' did you mean 'hidden_size'\?, 'zzz'"):
        reader.finish()


def test_only_distinguishes_false_from_zero() -> None:
    reader = ConfigReader({"a": False}, "x")
    reader.only("a", False, reason="why")
    assert reader.carried == {"a": False}
    with pytest.raises(InputError, match="a: why"):
        ConfigReader({"a": 0}, "x").only("a", False, reason="why")


def test_nested_objects_are_read_totally_and_named_by_path() -> None:
    inner = ConfigReader({"a": {"b": 1, "c": 2}}, "x").nested("a")
    assert inner is not None
    assert inner.size("b") == 1
    with pytest.raises(InputError, match="x: a: unknown key 'c'"):
        inner.finish()
    with pytest.raises(InputError, match="x: a: must be a JSON object"):
        ConfigReader({"a": 7}, "x").nested("a")


@pytest.mark.parametrize("config", [None, [], "llama", 3, {1: 2}])
def test_config_that_is_no_object(config: object) -> None:
    with pytest.raises(InputError, match="must be a JSON object"):
        ConfigReader(config, "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1, "a": 1}', "duplicate key: 'a'"),
        (b'{"a": {"b": 1, "b": 2}}', "duplicate key: 'b'"),
        (b'{"a": Inf}', "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b"[1]", "must be a JSON object"),
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 10**6, "too many values"),
        (b'{"a":' * 10**6, "too many values"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested too deeply"),
        (b" " * (16 * 2**20 + 1), "too large"),
    ],
)
def test_config_files_that_are_refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=said) as caught:
        load_config_file(path)
    assert str(path) in str(caught.value)


def test_config_file_missing_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(InputError, match=r"must be a regular file|cannot be read"):
            load_config_file(path)
    with pytest.raises(InputError):
        load_config_file("a\0b")


def test_infinity_is_read_and_refused_by_name_where_a_size(tmp_path: Path) -> None:
    """Published configs write what has no limit as Python does; carried keys may hold it, sizes and factors may not."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "summary_first_dropout": Infinity, "temperature": NaN}')
    carried = read_config(load_config_file(path), "x").carried
    assert (carried["summary_first_dropout"], math.isnan(carried["temperature"])) == (math.inf, True)
    for key in ("n_embd", "layer_norm_epsilon", "n_inner"):
        for said in ("Infinity", "-Infinity", "NaN", "1e999"):
            path.write_text(f'{{"model_type": "gpt2", "{key}": {said}}}')
            with pytest.raises(InputError, match=f"x: {key}: must be"):
                read_config(load_config_file(path), "x")


@given(st.dictionaries(st.text(max_size=4), st.integers() | st.booleans() | st.text(max_size=4)))
def test_config_file_round_trip(tmp_path_factory: pytest.TempPathFactory, config: dict[str, object]) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config))
    assert load_config_file(path) == config


@pytest.mark.parametrize("kind", [None, "lama", 3, ["llama"], "xlnet"])
def test_unknown_family(kind: object) -> None:
    config = {} if kind is None else {"model_type": kind}
    with pytest.raises(InputError, match=r"x: model_type: .*must be .*gpt2.*llama"):
        read_config(config, "x")


def test_what_can_be_done_without_a_family() -> None:
    """A slip is corrected; anything else is told of its kin, if any, and of what describes or plans it all the same."""

    def said(kind: str) -> str:
        with pytest.raises(InputError) as refused:
            read_config({"model_type": kind}, "x")
        return str(refused.value)

    assert said("lama").endswith("did you mean 'llama'?")
    for kind in ("qwen4_exp", "rwkv8", "xlnet"):
        text = said(kind)
        assert "did you mean" not in text
        for way in ("spec JSON", "--parameters", "--allow-unread passes over keys, not families"):
            assert way in text
        assert ("akin" in text) == (kind != "xlnet")
    assert "theirs: qwen2, qwen3," in said("qwen4_exp")


def test_sizes_that_a_config_does_not_say_are_listed() -> None:
    """transformers' LlamaConfig and its defaults; keys heads are as many as heads unless they are said."""
    llama = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "tie_word_embeddings": False,
    }
    assert read_config({"model_type": "llama"}, "x").defaults == llama
    assert read_config({"model_type": "llama", **llama}, "x").defaults == {}
    for key, value in llama.items():
        said = {name: llama[name] for name in llama if name != key}
        assert read_config({"model_type": "llama", **said}, "x").defaults == {key: value}
    qwen = read_config({"model_type": "qwen2"}, "x")
    assert qwen.defaults["num_key_value_heads"] == 32
    assert "max_window_layers" not in qwen.defaults  # no layer has a window
    windowed = read_config({"model_type": "qwen2", "use_sliding_window": True}, "x").defaults
    assert windowed["max_window_layers"] == 28
    listed = read_config({"model_type": "gemma3_text", "layer_types": ["full_attention"] * 26}, "x").defaults
    assert "sliding_window_pattern" not in listed
    assert read_config({"model_type": "gemma3_text"}, "x").defaults["sliding_window_pattern"] == 6
    nested = read_config({"model_type": "llava", "text_config": {"vocab_size": 32064}}, "x").defaults
    assert (nested["text_config.num_hidden_layers"], nested["vision_config.num_hidden_layers"]) == (32, 24)
    assert not any(key.endswith(("token_id", "token_index")) for key in nested)


# Qwen2-72B, arXiv 2407.10671, table 1
QWEN2_72B = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"]
)
def test_a_default_of_another_model_is_refused(key: str) -> None:
    """Class defaults are the sizes of one model (7B here): beside others a missing one is no answer but a guess."""
    config = {name: value for name, value in QWEN2_72B.items() if name != key}
    with pytest.raises(InputError, match=rf"x: {key}: missing, and \d+, the class's default, is that of a model with"):
        read_config(config, "x")
    assert read_config(QWEN2_72B, "x").defaults == {}


def test_a_default_that_goes_for_a_whole_family_or_lies_in_an_object_is_taken_and_said() -> None:
    """Published Gemma-2 configs lack the vocabulary that all of them have, and those of Gemma 3 hold differences."""
    no_vocabulary = {name: value for name, value in QWEN2_72B.items() if name != "vocab_size"}
    assert read_config(no_vocabulary, "x").defaults == {"vocab_size": 151936}
    no_groups = {n: v for n, v in QWEN2_72B.items() if n != "num_key_value_heads"} | {"model_type": "llama"}
    assert read_config(no_groups, "x").defaults == {"num_key_value_heads": 64}
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    gemma = {
        "model_type": "gemma3",
        "text_config": text,
        "mm_tokens_per_image": 196,
        "vision_config": {"vision_use_head": False},
    }
    defaults = read_config(gemma, "x").defaults
    assert (defaults["text_config.num_attention_heads"], defaults["text_config.num_key_value_heads"]) == (8, 4)
