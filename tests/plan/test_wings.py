"""Serving and training read one view of a device: what both count of it is the same."""

from __future__ import annotations

import strategies
from formulas import every_section
from hypothesis import assume, given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.plan import Options, Subject
from asbuilt.plan.devices import device
from asbuilt.plan.placement import arrange, served
from asbuilt.plan.precision import precision
from asbuilt.spec import Model, Pass


@given(
    strategies.specs(max_blocks=3) | strategies.translators() | strategies.adapted(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(2, 9),
)
def test_a_stage_holds_and_multiplies_the_same_in_both(spec: Model, tp: int, pp: int, batch: int, seq: int) -> None:
    """Bytes of weights in bf16, and FLOPs of a pass over whole sequences, less what only a cache asks for."""
    assume(pp <= spec.n_layers and (pp == 1 or "source" not in spec.reads))
    options = Options(gpus=tp * pp, tp=tp, pp=pp, batch=batch, seq=seq, sequence_parallel=False)
    try:
        view = device(spec, served(tp * pp, tp=tp, pp=pp), precision("bf16"))
        shares = Subject(spec).shares(options)
    except InputError:
        return
    sections = {section.stage.number: section for section in every_section(shares, pp)}
    run = Pass(tokens=seq, batch=batch)
    for found in view.stages:
        section = sections[found.stage.number]
        assert found.folds.total_bytes == section.dense.weights + section.experts.weights
        steps = found.folds.step(run, 2).values()
        caching = sum(
            node.count * product.flops
            for node, seen in found.folds.root.runs(run)
            for product in node.own.multiplies(seen)
            if product.caching
        )
        trained = sum(count * piece.work.forward(causal=False) for piece, count in section.counted)
        assert sum(step.products + step.scores for step in steps) - caching == trained


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from((1, 2, 4, 8)), st.integers(1, 3))
def test_a_placement_says_the_same_of_itself(tp: int, pp: int, ep: int, copies: int) -> None:
    """In serving the experts go to the tp devices first, in training to those that hold the same layers."""
    assume(max(tp, ep) % min(tp, ep) == 0)
    one = served(copies * pp * max(tp, ep), tp=tp, pp=pp, ep=ep)
    assert (one.copies, one.per_copy, one.wide) == (copies, pp * max(tp, ep), max(tp, ep))
    assert one.gpus == one.dp * tp * pp
    assert one.sharding == (tp, min(tp, ep))
    other = arrange(copies * pp * tp * ep, tp=tp, pp=pp, ep=ep)
    assert (other.copies, other.groups, other.sharding) == (copies, ep, (tp, 1))
