"""The engine of families: keys that read and write, kin that differ in a field, and every file a family."""

from __future__ import annotations

import re
from collections.abc import Callable
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
    but,
    defaults,
)
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope, TwoRopes
from asbuilt.families.shared.sizes import CHUNKED, LayerWindows
from asbuilt.spec import LinearScaling, Rotary

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
    found = {name: import_module(f"asbuilt.families.{name}").FAMILY for name in files}
    assert {family.name for family in found.values()} == set(FAMILIES)
    assert {name: family.name.replace("-", "_") for name, family in found.items()} == {name: name for name in files}
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


def test_keys_but_for_some() -> None:
    keys = (Size("a", "n_heads", default=1), Only("b", 1, reason="so"), Size("c", "n_layers", default=2), Rope())
    kept = but(
        keys,
        n_heads=lambda key: replace(key, key="z"),
        n_layers=Flag("d", "tied", default=True),
        rotary={"theta": 7.0},
    )
    assert [getattr(key, "key", None) for key in kept] == ["z", "b", "d", None]
    assert (kept[0].default, kept[3].theta) == (1, 7.0)  # type: ignore[attr-defined]  # pyright: ignore
    assert but(keys, rotary=None, n_heads=None) == keys[1:3]
    assert [key.default for key in defaults(keys[::2], n_heads=5)] == [5, 2]  # type: ignore[attr-defined]  # pyright: ignore
    assert keys[0].default == 1
    with pytest.raises(AssertionError, match=r"no key goes into \['d_ff'\]"):
        defaults(keys, d_ff=3)


def test_a_path_leads_to_what_a_key_says() -> None:
    parts = parts_of(tie_word_embeddings=True)
    assert parts.at("d_ff") == parts.at("ffn.d_ff") == parts.at("last.body.d_ff") == 96
    assert parts.at("model.embedding.n_vocab") == parts.at("embedding.n_vocab") == 100
    assert parts.at("max_positions") == parts.at("model.max_positions") == 128
    assert parts.at("positions") is None
    for path, field in (
        ("positions.offset", "positions"),
        ("ffn.body.up", "ffn"),
        ("head.transform.bias", "head.transform"),
    ):
        with pytest.raises(
            InputError, match=rf"^{field}: mistral needs a part with {path.split('.')[field.count('.') + 1]} "
        ):
            parts.at(path)
    with pytest.raises(InputError, match=r"^nothing: mistral needs a part with nothing here"):
        parts.at("nothing")
    for path in ("mixture.d_ff", "encoder.n_layers"):
        with pytest.raises(InputError, match=r"^(blocks|model): mistral"):
            parts.at(path)


LAYERS = {"n_layers": 4}


def windows(key: LayerWindows, config: dict[str, Any]) -> Any:  # noqa: ANN401
    return values_of(key, config, dict(LAYERS))[key.into]


def test_windows_by_layer() -> None:
    first: Callable[..., list[bool]] = lambda reader, values: [i == 0 for i in range(values["n_layers"])]  # noqa: E731
    plain, required = (LayerWindows(default=7, usual=first, required=needed) for needed in (False, True))
    switched = LayerWindows(default=None, usual=first, switch="on")
    chunked = LayerWindows(default=5, usual=first, key="chunk", kind=CHUNKED)
    none, one, last = [None] * 4, [7, None, None, None], ["full_attention"] * 3 + ["sliding_attention"]
    assert [list(windows(key, {})) for key in (plain, required, switched)] == [one, one, none]
    assert list(windows(plain, {"sliding_window": None})) == none
    assert list(windows(plain, {"sliding_window": 3, "layer_types": last})) == [None, None, None, 3]
    assert list(windows(switched, {"sliding_window": 3})) == none
    assert list(windows(switched, {"sliding_window": 3, "on": True})) == [3, None, None, None]
    assert list(windows(chunked, {"chunk": 9})) == [9, None, None, None]
    assert list(windows(chunked, {"layer_types": ["chunked_attention"] * 4})) == [5] * 4
    refused = [
        (required, {"sliding_window": None}, r"x: sliding_window: sliding_attention needs a sliding_window"),
        (plain, {"sliding_window": None, "layer_types": last}, r"x: sliding_window: sliding_attention needs"),
        (switched, {"sliding_window": 3, "layer_types": last}, r"x: layer_types: sliding_attention needs on and a"),
        (chunked, {"layer_types": last}, r"x: layer_types: .*full_attention or chunked_attention"),
    ]
    for key, config, message in refused:
        with pytest.raises(InputError, match=message):
            windows(key, config)


def test_windows_are_carried_where_no_layer_has_one() -> None:
    key = LayerWindows(default=7, usual=lambda reader, values: [False] * 4, switch="on")
    for said in ({}, {"sliding_window": 3}, {"on": True, "sliding_window": None}):
        reader = ConfigReader(dict(said), "x")
        key.read(reader, dict(LAYERS))
        assert reader.carried == said
    spec = mistral.FAMILY.read(SMALL | {"sliding_window": None}, "x").spec
    types = {"layer_types": ["full_attention"] * 2}
    assert key.write(Parts(spec, "x", {})) == types | {"on": False, "sliding_window": None}
    assert key.write(Parts(spec, "x", {"sliding_window": 3})) == types | {"on": False, "sliding_window": 3}
    plain = LayerWindows(default=7, usual=key.usual)
    assert plain.write(Parts(spec, "x", {"sliding_window": 3})) == types
    assert key.write(parts_of(sliding_window=4)) == {
        "layer_types": ["sliding_attention"] * 2,
        "on": True,
        "sliding_window": 4,
    }


OWN = {"d_head": 8, "max_positions": 64}


def test_two_bases() -> None:
    key = TwoRopes(("rope_theta", 100.0), ("local_base", 10.0))
    newer = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}
    linear = {"rope_type": "linear", "factor": 2.0}
    bases = [
        ({}, (100.0, 10.0)),
        ({"rope_theta": 7.0}, (7.0, 10.0)),
        ({"local_base": 7.0}, (100.0, 7.0)),
        ({"rope_parameters": newer}, (5.0, 6.0)),
        ({"rope_parameters": {"sliding_attention": {}}, "local_base": 7.0}, (100.0, 7.0)),
    ]
    for config, both in bases:
        values = values_of(key, config, dict(OWN))
        assert (values["rotary"].theta, values["local"].theta) == both
        assert values["rotary"].scaling is values["local"].scaling is None
    values = values_of(key, {"rope_scaling": linear}, dict(OWN))
    assert values["local"] == Rotary(d_rotary=8, theta=10.0)
    assert values["rotary"] == Rotary(d_rotary=8, theta=100.0, scaling=LinearScaling(factor=2.0))
    refused = {
        "rope_scaling: given together": {"rope_scaling": linear, "rope_parameters": newer},
        "rope_theta: disagrees with local_base outside": {"rope_parameters": newer, "local_base": 7.0},
        "partial_rotary_factor: RoPE covers whole heads": {
            "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}
        },
        "unknown key 'other'": {"rope_parameters": {"other": {}}},
    }
    for message, config in refused.items():
        with pytest.raises(InputError, match=message):
            values_of(key, config, dict(OWN))
    # without a rope_theta nothing says that a rope_scaling is that of full attention
    with pytest.raises(InputError, match="unknown key 'rope_scaling'"):
        values_of(TwoRopes(("global_base", 100.0), ("local_base", 10.0)), {"rope_scaling": linear}, dict(OWN))


def test_two_bases_are_written_in_the_older_spelling_where_it_can_say_them() -> None:
    older, newer = (TwoRopes((name, 100.0), ("local_base", 10.0)) for name in ("rope_theta", "global_base"))
    full = parts_of(sliding_window=None, rope_theta=7.0)
    assert older.write(full) == {"rope_theta": 7.0, "rope_scaling": None, "local_base": 10.0}
    local = parts_of(sliding_window=4, rope_theta=7.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    objects = {
        "full_attention": {"rope_theta": 100.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0},
    }
    assert older.write(local) == newer.write(local) == {"rope_parameters": objects}
