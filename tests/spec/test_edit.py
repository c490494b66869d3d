"""Parts found and changed by path: what is not named stays, what is named is checked as if written by hand."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

import asbuilt
from asbuilt.errors import InputError
from asbuilt.spec import (
    MLP,
    Attention,
    GatedMLP,
    LayerNorm,
    Model,
    Part,
    RMSNorm,
    Rotary,
    dumps,
    loads,
    walk,
    walk_stored,
)
from asbuilt.spec.edit import matches

SPECS = st.one_of(strategies.specs(), strategies.translators(), strategies.encoders(), strategies.seers())


def small(**more: Any) -> Model:  # noqa: ANN401
    return asbuilt.decoder(d_model=32, n_layers=4, n_heads=4, n_vocab=50, **more)


@given(spec=SPECS)
def test_every_path_leads_to_its_part(spec: Model) -> None:
    for path, part in walk_stored(spec):
        assert spec.at(path) is part


@given(spec=SPECS)
def test_changing_a_field_to_what_it_is_changes_nothing(spec: Model) -> None:
    """At every path, and at all of them at once: the whole tree is taken apart and put together again."""
    path, part = random.choice([*walk_stored(spec)])
    own = {field.name: getattr(part, field.name) for field in fields(part)}
    assert spec.edit(path, **own) == spec
    assert spec.replace_where(Part, lambda part: replace(part)) == spec
    assert spec.replace_where(lambda _, part: isinstance(part, Part), lambda part: part) is spec


@given(spec=SPECS)
def test_one_part_is_changed_and_no_other(spec: Model) -> None:
    """The edited spec differs from the first in one field of one part, and its JSON says so too.

    Parts whose weights several depths use are left out: one of them alone cannot change.
    """
    shared = {*spec.holders, *spec.holders.values()}
    found = [path for path, part in walk(spec) if isinstance(part, RMSNorm | LayerNorm) and path not in shared]
    if not found:
        return
    path = random.choice(found)
    edited = spec.edit(path, eps=0.25)
    for (a, before), (b, after) in zip(walk_stored(spec), walk_stored(edited), strict=True):
        assert (a, type(before)) == (b, type(after))
        told = {f.name: getattr(before, f.name) for f in fields(before)}
        now = {f.name: getattr(after, f.name) for f in fields(after)}
        if a == path:
            assert now == told | {"eps": 0.25}
        elif not path.startswith(f"{a}." if a else ""):
            assert now == told
    assert loads(dumps(edited)) == edited
    assert edited.edit(path, eps=spec.at(path).eps) == spec  # type: ignore[attr-defined]


def test_a_star_is_one_segment_and_a_range_its_numbers() -> None:
    spec = small()
    every = spec.edit("blocks.*.attention.body", window=7)
    assert [every.at(f"blocks.{i}.attention.body").window for i in range(4)] == [7] * 4  # type: ignore[attr-defined]
    some = spec.edit("blocks.1-2.attention.body", window=7)
    assert [some.at(f"blocks.{i}.attention.body").window for i in range(4)] == [None, 7, 7, None]  # type: ignore[attr-defined]
    assert some.at("blocks.1") is some.at("blocks.2")
    assert some.at("blocks.0") is spec.at("blocks.0")
    norms = spec.edit("blocks.*.*.norm", eps=0.5)
    assert {part.eps for path, part in walk(norms) if isinstance(part, RMSNorm) and path != "norm"} == {0.5}
    assert norms.norm == spec.norm


def test_patterns() -> None:
    yes = [("", ""), ("a.*", "a.b"), ("*.*", "a.b"), ("b.0-10.c", "b.9.c"), ("b.0-10.c", "b.10.c"), ("b.0-3", "b.0-3")]
    no = [("*", "a.b"), ("a.*", "a"), ("b.2-3", "b.1"), ("b.2-3", "b.4"), ("b.x-3", "b.2"), ("b.2-", "b.2"), ("a", "")]
    assert all(matches(*pair) for pair in yes)
    assert not any(matches(*pair) for pair in no)


def test_the_root_is_the_empty_path() -> None:
    assert small().edit("", name="other", max_positions=99) == small(name="other", max_positions=99)


def test_what_belongs_together_is_changed_at_once() -> None:
    """A width that stands in many parts is changed in all before any of what holds them is checked."""
    wide = small().replace_where(
        lambda _, part: bool({"d_model", "d"} & names(part)),
        lambda part: replace(part, **{name: 64 for name in ("d_model", "d") if name in names(part)}),
    )
    assert {part.d for _, part in walk(wide) if isinstance(part, RMSNorm)} == {64}
    assert wide == asbuilt.decoder(d_model=64, n_layers=4, n_heads=4, d_head=8, d_ff=128, n_vocab=50)


def names(part: Part) -> set[str]:
    return {field.name for field in fields(part)}


def test_parts_of_a_type_are_replaced() -> None:
    spec = small()
    plain = spec.replace_where(GatedMLP, MLP(d_model=32, d_ff=128, activation="gelu"))
    assert {type(part) for path, part in walk(plain) if path.endswith("ffn.body")} == {MLP}
    layered = spec.replace_where(RMSNorm, lambda part: LayerNorm(d=part.d))  # type: ignore[attr-defined]
    assert not any(isinstance(part, RMSNorm) for _, part in walk(layered))
    scaled = spec.replace_where((Rotary,), theta=5e5)
    assert scaled == small(theta=5e5)
    shared = spec.replace_where(lambda path, part: isinstance(part, Attention) and "3" in path, n_kv_heads=1)
    assert shared == spec.edit("blocks.3.attention.body", n_kv_heads=1)


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [
        ("blocks.4.attention.body", {"window": 7}, r"no part at this path.*'blocks.\d.attention.body'"),
        ("blocks.*.attnetion.body", {"window": 7}, r"no part at this path.*'blocks.0.attention.body'"),
        ("quite.another", {}, r"no part at this path.*paths begin embedding, blocks.0, "),
        (
            "blocks.*.attention.body",
            {"windw": 7},
            r"blocks.0.attention.body.windw: unknown field of Attention.*'window'",
        ),
        ("blocks.*.*.body", {"window": 7}, r"blocks.0.ffn.body.window: unknown field of GatedMLP"),
        ("blocks.2.attention.body", {"window": 0}, r"^blocks.2.attention.body: Attention.window: must be"),
        ("blocks.2.attention.body", {"n_heads": "4"}, r"^blocks.2.attention.body: "),
        ("blocks.2.attention", {"body": RMSNorm(d=32)}, r"blocks.2.attention.body: wrong part for Branch"),
        ("blocks.2.ffn", {"body": 7}, r"blocks.2.ffn.body: wrong part for Branch"),
        ("embedding", {"d_model": 64}, r"^LanguageModel: LanguageModel.head"),
        ("", {"nmae": "x"}, r"LanguageModel.nmae: unknown field of LanguageModel.*'name'"),
    ],
)
def test_what_is_refused(path: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        small().edit(path, **changes)


def test_what_is_nowhere() -> None:
    with pytest.raises(InputError, match="no part at this path"):
        small().at("blocks.0.attention.body.q.weight.x")
    with pytest.raises(InputError, match=r"no part is of this kind .*LayerNorm"):
        small().replace_where(LayerNorm, eps=1.0)
    with pytest.raises(InputError, match="give either a replacement or fields"):
        small().replace_where(RMSNorm, RMSNorm(d=32), eps=1.0)


def test_an_edit_is_shared_by_equal_blocks() -> None:
    """What is done once for each kind of block is done once after an edit too: equal ones are one object."""
    made = small().edit("blocks.*.ffn.body", d_ff=64)
    assert len({id(block) for block in made.blocks}) == 1
