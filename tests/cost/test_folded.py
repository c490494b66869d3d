"""The counted folds give what the plain ones give: for drawn specs, any batch, whole and divided."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import specs

from asbuilt import InputError, catalog, cost
from asbuilt.cost.folded import Folded, census, tree
from asbuilt.kernels.memory import memory
from asbuilt.spec import Model, Part, Pass, Weight

RUNS = st.builds(
    Pass,
    tokens=st.integers(1, 9),
    batch=st.integers(1, 7),
    past=st.integers(0, 20),
    logits=st.sampled_from(("all", "last")),
)
DTYPES = st.sampled_from(("fp32", "bf16", "int4", "q4_0"))


def held(dtype: str):  # noqa: ANN201
    found = cost.dtype(dtype)

    def nbytes(path: str, weight: Weight, owner: Part) -> Fraction:
        return Fraction(found.nbytes(weight))

    return nbytes


def same_as_the_plain_folds(spec: Model, run: Pass, dtype: str) -> None:
    folds = Folded(tree(spec, spec), held(dtype))
    assert abs(folds.total_bytes - cost.weight_bytes(spec, dtype)) <= 8  # rounded up by kind
    assert folds.active_parameters == cost.active_parameters(spec)
    assert folds.cache_numbers(run.tokens).nbytes(2) == cost.cache(spec, run.tokens, "bf16").at_seq
    steps, plain = folds.step(run, 2), cost.moved(spec, run, dtype, "bf16")
    assert {k: s.weights for k, s in steps.items() if s.weights} == {k: n for k, n in plain.weights.items() if n}
    assert math.ceil(sum(step.lookups for step in steps.values())) == plain.lookups
    assert sum(step.cache for step in steps.values()) == plain.cache
    flops = cost.flops(spec, run)
    assert sum(step.products for step in steps.values()) == flops.products
    assert sum(step.scores for step in steps.values()) == flops.scores
    assert sum(step.scores_causal for step in steps.values()) == flops.scores_causal


@given(specs(), RUNS, DTYPES)
def test_drawn_specs(spec: Model, run: Pass, dtype: str) -> None:
    same_as_the_plain_folds(spec, run, dtype)


@given(st.sampled_from(catalog.names()), RUNS)
def test_published_models(name: str, run: Pass) -> None:
    same_as_the_plain_folds(catalog.find(name).spec(), run, "bf16")


@given(specs(max_blocks=4), RUNS)
def test_a_census_keeps_the_busiest(spec: Model, run: Pass) -> None:
    found = census(spec)
    assert memory(found.small).peak_bytes(run) == memory(spec).peak_bytes(run)
    for name, order in found.order.items():
        items, once = getattr(spec, name), getattr(found.small, name)
        assert [once[i] for i in order] == list(items)
        assert len({*once}) == len(once)


@given(specs(), RUNS, st.integers(2, 4))
def test_a_device_holds_its_share(spec: Model, run: Pass, degree: int) -> None:
    try:
        own = spec.shard(degree)
    except InputError:
        return
    folds = Folded(tree(spec, own), held("fp32"))
    assert folds.total_bytes == cost.weight_bytes(own, "fp32")
    assert sum(s.products for s in folds.step(run, 2).values()) == cost.flops(own, run).products
    halves = {node.path for node, _ in folds.contracted(run)}
    assert all(path.split(".")[0] == "blocks" for path in halves)


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_experts_are_spread(expert: int) -> None:
    """A device has its share of the experts; the rest it has whole; and it sees the rows of all groups."""
    spec = catalog.find("mixtral-8x7b").spec()
    one = Folded(tree(spec, spec), held("bf16"))
    many = Folded(tree(spec, spec.shard(1, expert)), held("bf16"), expert=expert, groups=expert)
    rest = one.total_bytes - one.weight_bytes["ffn"]
    assert many.total_bytes == rest + one.weight_bytes["ffn"] / expert
    run, together = Pass(tokens=1, batch=3, past=5), Pass(tokens=1, batch=3 * expert, past=5)
    assert many.step(run, 2)["ffn"].products == one.step(together, 2)["ffn"].products / expert
    share = one.step(together, 2)["ffn"].weights / expert
    assert many.step(run, 2)["ffn"].weights == pytest.approx(share, abs=3 * spec.n_layers)  # each weight rounded up
    assert many.step(run, 2)["attention"] == one.step(run, 2)["attention"]
