"""Specs refuse what cannot be built, survive JSON, compare by value and read well."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    Head,
    Linear,
    Model,
    RMSNorm,
    Rotary,
    TokenEmbedding,
    dumps,
    loads,
    walk,
)
from asbuilt.spec.show import show

ANY = strategies.specs() | strategies.encoders()


@given(ANY)
def test_json_round_trip(spec: Model) -> None:
    again = loads(dumps(spec))
    assert again == spec
    assert hash(again) == hash(spec)


@given(ANY)
def test_paths_are_unique_and_lead_back(spec: Model) -> None:
    paths = [path for path, _ in walk(spec)]
    assert len(set(paths)) == len(paths)
    for path, part in walk(spec):
        at = spec
        for name, child in _descend(spec, path):
            assert child is not None, f"{path}: nothing at {name}"
            at = child
        assert at == part


def _descend(spec: Model, path: str):  # noqa: ANN202
    at = spec
    rest = path
    while rest:
        name, at = next((n, c) for n, c in at.children() if rest == n or rest.startswith(f"{n}."))  # type: ignore[assignment]
        rest = rest[len(name) + 1 :]
        yield name, at


@given(ANY, st.data())
def test_any_number_turned_bad_is_refused_by_name(spec: Model, data: st.DataObject) -> None:
    plain = json.loads(dumps(spec))
    places = [(d, k) for d in _objects(plain) for k, v in d.items() if type(v) is int and k not in ("repeat",)]
    place, key = data.draw(st.sampled_from(places))
    bad = data.draw(st.sampled_from((-1, 0, 2**40, "12", True, [1], {})))
    if (key, bad) in (("scale", 2**40), ("offset", 0)):  # are no bad ones
        return
    place[key] = bad
    with pytest.raises(InputError) as refused:
        loads(json.dumps(plain))
    assert place["part"] in str(refused.value) or key in str(refused.value)


def _objects(plain: object):  # noqa: ANN202
    if isinstance(plain, dict):
        if "part" in plain:
            yield plain
        for value in plain.values():
            yield from _objects(value)
    elif isinstance(plain, list):
        for value in plain:
            yield from _objects(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", 'must be an object with a "part" key'),
        ('{"part": "Atention"}', "did you mean 'Attention'"),
        ('{"part": "RMSNorm", "d": 4, "epsilon": 1}', "unknown field"),
        ('{"part": "RMSNorm"}', "missing field"),
        ('{"part": "RMSNorm", "d": {"part": "RMSNorm", "d": 1}}', "RMSNorm.d"),
        ("[" * 100_000, "nested too deeply"),
        ('{"part":"Block","branches":[{"repeat": 1000000000, "item": 1}]}', "invalid repeat"),
        ('{"part":"Block","branches":[1]}', "Block"),
    ],
)
def test_bad_text_is_one_message(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        loads(text)


def test_messages_name_field_value_and_what_is_allowed() -> None:
    with pytest.raises(InputError) as refused:
        Attention(d_model=8, n_heads=6, n_kv_heads=4, d_head=2)
    assert "Attention.n_kv_heads" in str(refused.value)
    assert "got 4" in str(refused.value)
    assert "a divisor of n_heads = 6" in str(refused.value)


def test_widths_that_do_not_meet_are_refused() -> None:
    body = MLP(d_model=8, d_ff=4, activation="relu")
    block = Block(branches=(Branch(name="ffn", body=body),))
    with pytest.raises(InputError, match=r"blocks\.0\.ffn has 8"):
        Model(
            embedding=TokenEmbedding(n_vocab=5, d_model=6),
            blocks=(block,),
            head=Head(d_model=6, n_vocab=5),
            max_positions=4,
        )
    with pytest.raises(InputError, match=r"Branch\.norm"):
        Branch(name="ffn", body=body, norm=RMSNorm(d=6))


@given(ANY)
def test_repr_names_every_kind_of_part_and_every_unusual_value(spec: Model) -> None:
    text = repr(spec)
    for _, part in walk(spec):
        if isinstance(part, Linear):  # which follow from the sizes of the part that they belong to
            continue
        assert type(part).__name__ in text
        for field in fields(part):  # type: ignore[arg-type]
            value = getattr(part, field.name)
            if isinstance(value, int | float) and value != field.default:
                assert f"{field.name}={value!r}" in text


def test_repr_folds_equal_blocks() -> None:
    block = Block(branches=(Branch(name="ffn", body=MLP(d_model=4, d_ff=4, activation="relu")),))
    spec = Model(
        embedding=TokenEmbedding(n_vocab=5, d_model=4),
        blocks=(block,) * 9,
        head=Head(d_model=4, n_vocab=5),
        max_positions=4,
    )
    assert "9 × Block" in repr(spec)
    assert repr(spec).count("MLP(") == 1
    assert replace(spec, blocks=(block,)) != spec


def test_rotary_refuses_what_has_no_pairs() -> None:
    with pytest.raises(InputError, match="even"):
        Rotary(d_rotary=3)


@pytest.mark.parametrize("first", [False, True])
def test_queries_and_keys_are_told_in_the_order_in_which_they_are_computed(first: bool) -> None:
    norm, rotary = RMSNorm(d=4), Rotary(d_rotary=4)
    part = Attention(
        d_model=8, n_heads=2, n_kv_heads=2, d_head=4, q_norm=norm, k_norm=norm, positions=rotary, rotate_first=first
    )
    norms = ["q_norm", "k_norm"]
    told = ["positions", *norms] if first else [*norms, "positions"]
    assert [path for path, _ in walk(part)][1:] == [*"qkvo", *told]
    shown = show(part)
    assert shown.index("k_norm=") < shown.index("positions=")
