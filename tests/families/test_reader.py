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
from asbuilt.families.reader import ConfigReader, load_config_file

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
    with pytest.raises(InputError, match="x: a: not a JSON object"):
        ConfigReader({"a": 7}, "x").nested("a")


@pytest.mark.parametrize("config", [None, [], "llama", 3, {1: 2}])
def test_config_that_is_no_object(config: object) -> None:
    with pytest.raises(InputError, match="not a JSON object"):
        ConfigReader(config, "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1, "a": 1}', "key given twice: 'a'"),
        (b'{"a": {"b": 1, "b": 2}}', "key given twice: 'b'"),
        (b'{"a": Infinity}', "Infinity is not a finite"),
        (b'{"a": -Infinity}', "-Infinity is not a finite"),
        (b'{"a": NaN}', "NaN is not a finite"),
        (b'{"a": 1e999}', "1e999 is not a finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"a":' * 10**6, "nested too deeply"),
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
        with pytest.raises(InputError, match="not a file"):
            load_config_file(path)
    with pytest.raises(InputError):
        load_config_file("a\0b")


@given(st.dictionaries(st.text(max_size=4), st.integers() | st.booleans() | st.text(max_size=4)))
def test_config_file_round_trip(tmp_path_factory: pytest.TempPathFactory, config: dict[str, object]) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config))
    assert load_config_file(path) == config


@pytest.mark.parametrize("kind", [None, "lama", 3, ["llama"], "xlnet"])
def test_unknown_family(kind: object) -> None:
    config = {} if kind is None else {"model_type": kind}
    with pytest.raises(InputError, match=r"x: model_type: .*allowed: .*gpt2.*llama"):
        read_config(config, "x")
