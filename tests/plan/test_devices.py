"""How a model lies over devices: which layout is chosen, which degrees are allowed, what cannot be planned."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt import InputError
from asbuilt.kernels.memory import Memory, memory_of
from asbuilt.plan.devices import device, unplanned
from asbuilt.plan.placement import served
from asbuilt.plan.precision import precision
from asbuilt.plan.serve.place import place
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    Classifier,
    GatedMLP,
    Head,
    MixtureOfExperts,
    Model,
    Part,
    Pass,
    Product,
    Remembered,
    RMSNorm,
    Router,
    TokenEmbedding,
    Weight,
)

ATTENTION = Attention(d_model=24, n_heads=12, n_kv_heads=12, d_head=4)
MLP = GatedMLP(d_model=24, d_ff=48, activation="silu")


def experts(many: int) -> MixtureOfExperts:
    return MixtureOfExperts(
        d_model=24, d_ff=48, n_experts=many, activation="silu", router=Router(d_model=24, n_experts=many, top_k=2)
    )


def model(*feedforward: Any, attention: Attention = ATTENTION) -> Model:  # noqa: ANN401
    blocks = tuple(
        Block(
            branches=tuple(
                Branch(name=name, norm=RMSNorm(d=24), body=body)
                for name, body in (("attention", attention), ("ffn", ffn))
            )
        )
        for ffn in feedforward
    )
    return Model(
        name="twelve",
        embedding=TokenEmbedding(n_vocab=48, d_model=24),
        blocks=blocks,
        norm=RMSNorm(d=24),
        head=Head(d_model=24, n_vocab=48),
        max_positions=64,
    )


# Twelve heads and six layers; of the sparse one twelve experts a layer.
DENSE, SPARSE = model(*[MLP] * 6), model(*[experts(12)] * 6)


def brief(value: object) -> str:
    return "sparse" if value is SPARSE else "model" if isinstance(value, Model) else str(value)


# model, gpus, tp, pp, ep, node; the layout: gpus, tp, pp, ep, and how many copies
LAYOUTS = [
    (DENSE, (None, None, None, None, 8), (1, 1, 1, 1), 1),
    (DENSE, (6, None, None, None, 8), (6, 6, 1, 1), 1),
    (DENSE, (12, None, None, None, 8), (12, 4, 3, 1), 1),  # 6 divides 12, but not the node of 8
    (DENSE, (12, None, None, None, 12), (12, 12, 1, 1), 1),
    (DENSE, (12, None, 3, None, 8), (12, 4, 3, 1), 1),
    (DENSE, (12, None, 6, None, 8), (12, 2, 6, 1), 1),
    (DENSE, (16, None, None, None, 8), (16, 4, 4, 1), 1),  # 8 does not divide 12 heads
    (DENSE, (24, 2, None, None, 8), (24, 2, 1, 1), 12),  # twelve stages of six layers there are not
    (DENSE, (None, 3, 2, None, 8), (6, 3, 2, 1), 1),
    (DENSE, (6, 3, 2, None, 8), (6, 3, 2, 1), 1),
    (DENSE, (1, None, None, None, 8), (1, 1, 1, 1), 1),
    (SPARSE, (None, None, None, 4, 8), (4, 4, 1, 4), 1),
    (SPARSE, (None, 1, None, 4, 8), (4, 1, 1, 4), 1),
    (SPARSE, (6, None, None, 2, 8), (6, 6, 1, 2), 1),
    (SPARSE, (8, None, None, 4, 8), (8, 4, 2, 4), 1),
    (SPARSE, (12, None, None, 3, 4), (12, 1, 4, 3), 1),  # of 1, 2 and 4 in a node, 2 and 4 do not go with 3
    (SPARSE, (12, 2, 1, 4, 8), (12, 2, 1, 4), 3),
]


@pytest.mark.parametrize(("spec", "asked", "layout", "copies"), LAYOUTS, ids=brief)
def test_which_layout_is_chosen(
    spec: Model, asked: tuple[int | None, ...], layout: tuple[int, ...], copies: int
) -> None:
    gpus, tp, pp, ep, node = asked
    made = place(spec, gpus=gpus, tp=tp, pp=pp, ep=ep, node=node or 8)
    assert (made.gpus, made.tp, made.pp, made.ep) == layout
    assert made.copies == copies


REFUSED = [
    (DENSE, (0, None, None, None), "gpus", "1 to 1,048,576"),
    (DENSE, (1_048_577, 1, 1, None), "gpus", "1 to 1,048,576"),
    (DENSE, (2.0, None, None, None), "gpus", "1 to 1,048,576"),
    (DENSE, (None, True, None, None), "tp", "1 to 1,048,576"),
    (DENSE, (None, None, "2", None), "pp", "1 to 1,048,576"),
    (SPARSE, (None, None, None, 0), "ep", "1 to 1,048,576"),
    (DENSE, (None, 5, None, None), "tp", "1, 2, 3, 4, 6 or 12"),
    (DENSE, (None, 1, 7, None), "pp", "1 to 6"),
    (DENSE, (7, 2, None, None), "gpus", "a multiple of 2, "),
    (DENSE, (None, None, None, 2), "ep", "1"),
    (SPARSE, (None, 1, None, 5), "ep", "1, 2, 3, 4, 6 or 12"),
    (SPARSE, (None, 2, None, 3), "ep", "a divisor or a multiple of 2"),
    (SPARSE, (None, 3, None, 2), "ep", "a divisor or a multiple of 3"),
    (model(experts(4), experts(6)), (None, 1, None, 3), "ep", "1 or 2"),
    (model(experts(6), experts(4)), (None, 1, None, 4), "ep", "1 or 2"),
]


@pytest.mark.parametrize(("spec", "asked", "field", "allowed"), REFUSED, ids=brief)
def test_degrees_that_are_refused(spec: Model, asked: tuple[Any, ...], field: str, allowed: str) -> None:
    gpus, tp, pp, ep = asked
    with pytest.raises(InputError) as refused:
        place(spec, gpus=gpus, tp=tp, pp=pp, ep=ep)
    assert refused.value.field == field
    assert refused.value.allowed.startswith(allowed)
    assert len(refused.value.allowed) == len(allowed) or not allowed[-1].isdigit()


def test_as_many_devices_as_there_may_be() -> None:
    assert place(DENSE, gpus=1_048_576, tp=1, pp=1, ep=None).copies == 1_048_576


def test_experts_alone_are_divided() -> None:
    """Two of four experts of 3 x 48 x 24 numbers of two bytes; all else is there whole."""
    spec = model(experts(4))
    one, half = (device(spec, served(n, ep=n), precision("bf16")).stages[0].folds.total_bytes for n in (1, 2))
    assert one - half == 2 * 3 * 48 * 24 * 2


class Silent(GatedMLP):
    """Does not say what room it works in."""


memory_of(Silent)(Memory)


class Forgetful(Attention):
    """Looks at other tokens and remembers none."""

    def remembers(self) -> tuple[Remembered, ...]:
        """Nothing."""
        return ()


class Plain(Part):
    """Of no kind: multiplies and says nothing more."""

    kind = "other"
    d_model: int = 24

    def holds(self) -> dict[str, Weight]:
        """A square."""
        return {"weight": Weight(shape=(24, 24), role="matrix")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each row with it."""
        return (Product(name="square", a=run.rows, b=24, c=24, weight="weight"),)


def test_what_cannot_be_planned_is_named() -> None:
    """Once for the part, not for the maps within it; equal blocks once."""
    assert unplanned(DENSE) == unplanned(SPARSE) == ()
    silent = Silent(d_model=24, d_ff=48, activation="silu")
    assert [row[:3] for row in unplanned(model(silent, silent, MLP))] == [
        ("blocks.0.ffn.body", "Silent", "activations"),
    ]
    forgetful = Forgetful(d_model=24, n_heads=12, n_kv_heads=12, d_head=4)
    assert [row[:3] for row in unplanned(model(MLP, attention=forgetful))] == [
        ("blocks.0.attention.body", "Forgetful", "decode"),
    ]
    assert [row[1:3] for row in unplanned(model(Plain()))] == [("Plain", "activations")]
    (row,) = unplanned(DENSE.changed(head=None))
    assert row[:3] == ("", "TextEncoder", "decode")
    labels = DENSE.changed(head=Classifier(d_model=DENSE.d_model, n_labels=2, labels="last"))
    assert unplanned(labels) == (("", "TextEncoder", "decode", "its head gives labels, so it does not generate"),)
