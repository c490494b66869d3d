"""The engine of families: keys that read and write, kin that differ in a field, and every file a family."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import families
from asbuilt.errors import InputError
from asbuilt.families import FAMILIES, mistral
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import (
    DROPPED,
    Carried,
    Choice,
    Fixed,
    Flag,
    Group,
    Number,
    Only,
    Optional,
    Size,
    Values,
)
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader

SMALL = {
    "model_type": "mistral",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def values_of(key: Any, config: dict[str, Any], values: Values | None = None) -> Values:  # noqa: ANN401
    """What one key reads of a config that says nothing else."""
    found = {} if values is None else values
    reader = ConfigReader(config, "x")
    key.read(reader, found)
    reader.finish()
    return found


def parts_of(**changes: object) -> Parts:
    spec = mistral.FAMILY.read(SMALL | changes, "x").spec
    return Parts(spec, "mistral", {})


def test_every_file_is_a_family() -> None:
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(FAMILIES) == files
    found = {name: import_module(f"asbuilt.families.{name}").FAMILY for name in FAMILIES}
    assert {name: family.name for name, family in found.items()} == {name: name for name in FAMILIES}
    assert all(isinstance(family, Family) for family in found.values())


def test_contributing_shows_a_family_whole() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert shown == Path(mistral.__file__).read_text()
    assert len(shown.splitlines()) <= 40


@given(window=st.none() | st.integers(1, 99), width=st.sampled_from([2, 16]), eps=st.floats(1e-9, 0.5))
def test_kin_differ_in_a_field(window: int | None, width: int, eps: float) -> None:
    kin = replace(
        mistral.FAMILY, name="kin", heads=("KinForCausalLM",), keys=(*mistral.FAMILY.keys, Only("own", 1, reason="so"))
    )
    config = SMALL | {"sliding_window": window, "head_dim": width, "rms_norm_eps": eps, "model_type": "kin", "own": 1}
    reading = kin.read(config, "x")
    written = kin.write(reading.spec, reading.carried, None)
    assert written["architectures"] == ["KinForCausalLM"]
    assert {key: written[key] for key in config} == config
    assert kin.read(written, "x").spec == reading.spec
    with pytest.raises(InputError, match="unknown key 'own'"):
        mistral.FAMILY.read(config, "x")


def test_a_default_may_follow_from_what_was_read() -> None:
    key = Size("b", "b", default=lambda values: 2 * values["a"], null=lambda values: values["a"])
    read = [values_of(key, config, {"a": 3})["b"] for config in ({}, {"b": None}, {"b": 5})]
    assert read == [6, 3, 5]


def test_what_a_value_must_be_names_the_key_as_it_is_spelled() -> None:
    key = Size("b", "b", also=("c",), must=(lambda values: values["b"] < values["a"], "less than a"))
    assert values_of(key, {"c": 2}, {"a": 3}) == {"a": 3, "b": 2}
    for spelled in ("b", "c"):
        with pytest.raises(InputError, match=rf"x: {spelled}: .*less than a"):
            values_of(key, {spelled: 3}, {"a": 3})


def test_a_quotient_names_both_keys_as_they_are_spelled() -> None:
    reader, values = ConfigReader({"width": 6, "parts": 4}, "x"), {}
    Size("d", "d", also=("width",)).read(reader, values)
    with pytest.raises(InputError, match=r"x: parts: .*a divisor of width = 6"):
        Size("n", "n", also=("parts",), divides="d").read(reader, values)


def test_null_missing_and_a_value_differ() -> None:
    key = Optional("w", "window", default=7)
    assert [values_of(key, config)["window"] for config in ({}, {"w": None}, {"w": 3})] == [7, None, 3]
    assert [key.write(parts_of(sliding_window=w)) for w in (None, 3)] == [{"w": None}, {"w": 3}]


def test_ways_there_and_back() -> None:
    half = Number("double", "eps", make=lambda x: x / 2, back=lambda x: x * 2)
    assert values_of(half, {"double": 0.5}) == {"eps": 0.25}
    assert half.write(parts_of(rms_norm_eps=0.25)) == {"double": 0.5}
    choice = Choice("act", "activation", choices={"a": "silu", "b": "gelu"}, written={"gelu": "b"})
    assert choice.write(parts_of()) == {"act": "a"}
    assert choice.write(parts_of(hidden_act="gelu")) == {"act": "b"}
    assert Flag("t", "tied").write(parts_of(tie_word_embeddings=True)) == {"t": True}


def test_a_group_makes_one_value_of_several_keys() -> None:
    group = Group("both", dict, (Size("a", "n_heads"), Size("b", "n_layers")), given=lambda values: {"c": values["c"]})
    assert values_of(group, {"a": 1, "b": 2}, {"c": 3})["both"] == {"n_heads": 1, "n_layers": 2, "c": 3}
    assert group.write(parts_of()) == {"a": 4, "b": 2}


class Forgotten:
    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.irrelevant("old", "no longer said")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {"old": DROPPED}


def test_what_is_said_always_carried_and_dropped() -> None:
    more = (Fixed("kind", "only", reason="so"), Carried("start", 7), Forgotten())
    family = replace(mistral.FAMILY, keys=(*mistral.FAMILY.keys, *more))
    reading = family.read(SMALL | {"old": 1}, "x")
    assert reading.carried == {"start": 7, "old": 1}
    written = family.write(reading.spec, {"old": 1}, None)
    assert written["kind"] == "only"
    assert "old" not in written
    with pytest.raises(InputError, match="x: kind: so"):
        family.read(SMALL | {"kind": "other"}, "x")
