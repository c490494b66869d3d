"""What each part holds, multiplies, remembers and keeps for the backward pass, number by number, worked out by hand.

The built model proves the sums on drawn specs (`tests/cost/test_declarations.py`); here is every tensor by its name,
so that one cannot stand in for another. Sizes are small primes: 3 texts of 7 tokens are 21 rows.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.spec import (
    ACTIVATIONS,
    LABELLED,
    MLP,
    XIELU,
    AdaptiveEmbedding,
    AdaptiveHead,
    Alibi,
    Attention,
    BiasTable,
    Block,
    Branch,
    ClampedGate,
    Classifier,
    ClusterHead,
    Contrast,
    CrossAttention,
    Disentangled,
    DistanceTable,
    EmbeddingProjection,
    GatedMLP,
    Head,
    HeadTransform,
    LanguageModel,
    LatentAttention,
    LayerNorm,
    LearnedPositions,
    MixtureOfExperts,
    MLPProjector,
    Part,
    Pass,
    PatchEmbedding,
    PerLayerEmbedding,
    PerLayerInput,
    PooledProjector,
    Pooler,
    Projection,
    QueryTemperature,
    RelativeBuckets,
    RelativeProjection,
    RMSNorm,
    Rotary,
    Router,
    ScoreBiases,
    SharedEmbedding,
    Sinusoids,
    TiedHead,
    TokenCluster,
    TokenEmbedding,
    TypeEmbedding,
    Vision,
    buffers,
    weights,
)

RUN = Pass(tokens=7, batch=3)
REFERENCE = replace(RUN, kernel="reference")


def held(part: Part) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and role of every weight, by its path; or how it starts, where that is not usual for its role."""
    return {path: (weight.shape, weight.init or weight.role) for path, weight, _ in weights(part)}


def multiplied(part: Part, run: Pass = RUN) -> dict[str, tuple[int, int, int, int]]:
    """(a, b, c, n) of every product, by the weight that is multiplied; where it is none by the product's name."""
    found = list(cost.products(part, run))
    named = {each.weight_path or each.product.name: each.product for each in found}
    assert len(named) == len(found)
    return {name: (x.a, x.b, x.c, x.n) for name, x in named.items()}


def causal(part: Part, run: Pass = RUN) -> dict[str, int]:
    """FLOPs with masked pairs skipped, where these are fewer."""
    every = (each.product for each in cost.products(part, run))
    return {x.name: x.causal_flops for x in every if x.causal_flops != x.flops}


def kept(part: Part, run: Pass = RUN) -> dict[str, int | tuple[int, str]]:
    """Numbers of every tensor that the part itself keeps; with its width, where that is not the run's."""
    found = {saved.name: saved for saved in memory(part).saves(run)}
    assert len(found) == len(memory(part).saves(run))
    return {name: x.size if x.width == "activation" else (x.size, x.width) for name, x in found.items()}


def shared(part: Part, run: Pass = RUN) -> set[str]:
    """The tensors that a whole stack keeps once."""
    return {saved.name for saved in memory(part).saves(run) if saved.shared}


def cached(part: Part) -> dict[str, tuple[tuple[int, ...], int | None, str, int | Fraction]]:
    """Shape, window, whose tokens, and the numbers that it stands for, of all that is remembered."""
    return {x.name: (x.shape, x.window, x.of, x.expanded) for x in part.remembers()}


# 6 heads of 5, 2 for keys and values: 21 rows of 30 and of 10
ATTENTION = Attention(d_model=11, n_heads=6, n_kv_heads=2, d_head=5)
ROWS = {"input": 231, "q": 630, "k": 210, "v": 210, "mixed": 630}


def test_attention() -> None:
    matrices = {
        "q.weight": ((30, 11), "matrix"),
        "k.weight": ((10, 11), "matrix"),
        "v.weight": ((10, 11), "matrix"),
        "o.weight": ((11, 30), "depth_scaled"),
    }
    assert held(ATTENTION) == matrices
    inner = {"q.bias": ((30,), "bias"), "k.bias": ((10,), "bias"), "v.bias": ((10,), "bias")}
    assert held(replace(ATTENTION, bias=True)) == matrices | inner
    assert held(replace(ATTENTION, output_bias=True)) == matrices | {"o.bias": ((11,), "bias")}
    assert held(replace(ATTENTION, sinks=True)) == matrices | {"sinks": ((6,), "bias")}
    assert cached(ATTENTION) == {"k": ((2, 5), None, "sequence", 10), "v": ((2, 5), None, "sequence", 10)}
    for reach in ({"window": 3}, {"chunk": 3}):
        assert cached(replace(ATTENTION, **reach)) == dict.fromkeys(("k", "v"), ((2, 5), 3, "sequence", 10))
    assert cached(replace(ATTENTION, causal=False)) == cached(replace(ATTENTION, cached=False)) == {}


def test_what_attention_multiplies() -> None:
    into = {"q.weight": (21, 11, 30, 1), "k.weight": (21, 11, 10, 1), "v.weight": (21, 11, 10, 1)}
    for past, keys, pairs in ((0, 7, 28), (4, 11, 56)):  # 1 + ... + 7 pairs, or 5 + ... + 11
        run = replace(RUN, past=past)
        scores = {"scores": (7, 5, keys, 18), "mix": (7, keys, 5, 18), "o.weight": (21, 30, 11, 1)}
        assert multiplied(ATTENTION, run) == into | scores
        assert causal(ATTENTION, run) == dict.fromkeys(("scores", "mix"), 2 * 18 * 5 * pairs)
    images = replace(RUN, images=2, mutual=3)  # 3 tokens that see one another: 3 more pairs for each image
    assert causal(ATTENTION, images) == dict.fromkeys(("scores", "mix"), 2 * 18 * 5 * (28 + 2 * 3))
    assert causal(replace(ATTENTION, causal=False), RUN) == {}
    assert not any(each.product.one_gradient for each in cost.products(ATTENTION, RUN))


def test_attention_whose_values_are_not_as_wide_as_keys() -> None:
    narrow = replace(ATTENTION, d_value=3)
    matrices = {"q.weight": (30, 11), "k.weight": (10, 11), "v.weight": (6, 11), "o.weight": (11, 18)}
    assert {name: shape for name, (shape, _) in held(narrow).items()} == matrices
    assert cached(narrow) == {"k": ((2, 5), None, "sequence", 10), "v": ((2, 3), None, "sequence", 6)}
    products = multiplied(narrow)
    assert (products["scores"], products["mix"]) == ((7, 5, 7, 18), (7, 7, 3, 18))
    assert causal(narrow) == {"scores": 2 * 18 * 5 * 28, "mix": 2 * 18 * 3 * 28}
    heads = {"q": 21 * 30, "k": 21 * 10, "mixed": 21 * 18}
    reference, fused = kept(narrow, REFERENCE), kept(narrow)
    assert {name: reference[name] for name in (*heads, "v")} == heads | {"v": 21 * 6}
    # the library's kernel pads values with zeros to the width of keys
    assert {name: fused[name] for name in (*heads, "v")} == heads | {"v": 21 * 10}
    assert fused["mixed and zeros"] == 21 * 30
    assert "mixed and zeros" not in reference


def test_attention_whose_values_are_its_keys() -> None:
    norm = RMSNorm(d=5)
    both = replace(ATTENTION, k_norm=norm, v_norm=replace(norm, gain="none"), values_are_keys=True)
    assert set(held(both)) == {"q.weight", "k.weight", "o.weight", "k_norm.weight"}
    assert cached(both) == cached(ATTENTION)  # after their norms they differ
    assert multiplied(ATTENTION).keys() - multiplied(both).keys() == {"v.weight"}
    for missing in ("k_norm", "v_norm"):
        with pytest.raises(InputError, match=f"{missing}: must be a norm, if values are keys"):
            replace(both, **{missing: None})


def test_attention_that_reads_the_keys_and_values_of_another_layer() -> None:
    reader = replace(ATTENTION, kv_from="early")
    assert set(held(reader)) == {"q.weight", "o.weight"}
    assert cached(reader) == {}
    assert multiplied(ATTENTION).keys() - multiplied(reader).keys() == {"k.weight", "v.weight"}
    for kernel in (RUN, REFERENCE):
        assert kept(ATTENTION, kernel).keys() - kept(reader, kernel).keys() == {"k", "v"}
    lender = replace(ATTENTION, kv_name="early")
    assert stack(lender, reader, reader).blocks[2].branches[0].body == reader
    allowed = "an earlier layer with the kv_name early"
    for wrong in ((reader,), (reader, lender), (replace(lender, window=3), reader), (ATTENTION, reader)):
        with pytest.raises(InputError, match=allowed):
            stack(*wrong)


def test_per_layer_embeddings() -> None:
    vectors = PerLayerEmbedding(n_vocab=17, n_layers=2, d=3, d_model=11, norm=RMSNorm(d=3))
    assert held(vectors) == {
        "weight": ((17, 6), "table"),
        "project.weight": ((6, 11), "matrix"),
        "norm.weight": ((3,), "gain"),
    }
    assert multiplied(vectors) == {"project.weight": (21, 11, 6, 1)}
    assert kept(vectors) == {
        "input": 21 * 11,
        "known tokens": (21, "int64"),
        "vectors": 21 * 6,
    }
    body = PerLayerInput(d_model=11, d=3, activation="silu")
    assert held(body) == {"gate.weight": ((3, 11), "matrix"), "down.weight": ((11, 3), "depth_scaled")}
    assert multiplied(body) == {"gate.weight": (21, 11, 3, 1), "down.weight": (21, 3, 11, 1)}
    assert kept(body) == {"input": 21 * 11, "gate": 63, "activated": 63, "hidden": 63}
    blocks = (Block(branches=(Branch(name="vector", body=body),)),)
    more = {"embedding": TokenEmbedding(n_vocab=13, d_model=11), "head": Head(n_vocab=13, d_model=11)}
    whole = LanguageModel(blocks=blocks * 2, per_layer=vectors, max_positions=32, **more)
    for changed in ({"per_layer": None}, {"per_layer": replace(vectors, n_layers=1)}, {"blocks": blocks * 3}):
        with pytest.raises(InputError, match="per_layer"):
            replace(whole, **changed)


def test_a_block_that_is_scaled_stores_one_number() -> None:
    block = Block(branches=(Branch(name="attention", body=ATTENTION),), scaled=True)
    assert [(path, buffer.shape, buffer.fill) for path, buffer, _ in buffers(block)] == [("scale", (1,), 1.0)]
    assert kept(block)["scale"] == 1


def stack(*bodies: Attention) -> LanguageModel:
    """A model of these attentions, one after the other."""
    blocks = tuple(Block(branches=(Branch(name="attention", body=body),)) for body in bodies)
    embedding, head = TokenEmbedding(n_vocab=13, d_model=11), Head(n_vocab=13, d_model=11)
    return LanguageModel(embedding=embedding, blocks=blocks, head=head, max_positions=32)


# (window, chunk, causal), tokens and those before: keys of each query, and pairs that are seen, counted on the fingers.
SEEN = [
    ((3, None, True), 7, 0, 7, 1 + 2 + 3 * 5),
    ((3, None, True), 7, 1, 8, 2 + 3 * 6),
    ((3, None, True), 7, 2, 9, 3 * 7),
    ((3, None, True), 7, 9, 10, 3 * 7),  # three of those before are kept
    ((7, None, True), 7, 0, 7, 28),
    ((7, None, True), 5, 3, 8, 4 + 5 + 6 + 7 + 7),
    ((3, None, True), 1, 0, 1, 1),
    ((3, None, True), 1, 1, 2, 2),
    ((3, None, True), 1, 2, 3, 3),
    ((3, None, True), 1, 9, 3, 3),
    ((None, 3, True), 7, 0, 7, 1 + 2 + 3 + 1 + 2 + 3 + 1),
    ((None, 3, True), 4, 4, 7, 2 + 3 + 1 + 2),
    ((None, 3, True), 1, 8, 3, 3),
    ((None, 3, True), 1, 9, 3, 1),
    ((None, None, True), 1, 9, 10, 10),
    ((None, None, False), 7, 0, 7, 49),
    ((None, None, False), 7, 4, 11, 77),
    ((3, None, False), 7, 0, 7, 3 + 4 + 5 + 5 + 5 + 4 + 3),
    ((9, None, False), 7, 0, 7, 49),
    ((7, None, False), 7, 0, 7, 49),
    ((2, None, False), 3, 0, 3, 2 + 3 + 2),
    ((3, None, False), 1, 0, 1, 1),
    ((3, None, False), 1, 9, 5, 1),
    ((3, None, False), 1, 3, 4, 1),
]


@pytest.mark.parametrize(("sees", "tokens", "past", "keys", "pairs"), SEEN)
def test_keys_and_pairs(sees: tuple[Any, Any, bool], tokens: int, past: int, keys: int, pairs: int) -> None:
    window, chunk, causal = sees
    part = replace(ATTENTION, window=window, chunk=chunk, causal=causal)
    run = Pass(tokens=tokens, past=past, batch=3)
    assert (part.keys(run), part.pairs(run)) == (keys, pairs)


def test_what_fused_attention_keeps() -> None:
    sums = {"logsumexp": (126, "wide")}
    assert kept(ATTENTION) == kept(replace(ATTENTION, window=7)) == ROWS | sums
    for near in ({"window": 6}, {"chunk": 6}):  # the library widens a mask to the numbers' own width
        (mask,) = shared(replace(ATTENTION, **near))  # one for all layers
        assert kept(replace(ATTENTION, **near)) == ROWS | sums | {mask: 49}
        assert kept(replace(ATTENTION, **near), replace(RUN, kernel="engine")) == ROWS | sums
    assert kept(ATTENTION, replace(RUN, images=1, mutual=3)) == ROWS | sums | {"mask True None None None None": 3 * 49}
    for both_ways in ({"causal": False}, {"causal": False, "window": 7}):
        assert kept(replace(ATTENTION, **both_ways), replace(RUN, mutual=3)) == ROWS | sums
    sloped = replace(ATTENTION, positions=Alibi(n_heads=6))
    (name,) = shared(sloped)
    assert kept(sloped) == ROWS | sums | {name: 6 * 49}
    assert shared(replace(sloped, window=5)) == {f"{sloped.positions} True 5 None None None"} != {name}
    assert shared(replace(ATTENTION, window=6)) == {"mask True 6 None None None"}
    assert shared(ATTENTION) == set()


def test_what_reference_attention_keeps() -> None:
    """3 x 6 x 7 x 7 probabilities, once more where they are cast; one more a query with sinks."""
    probabilities, narrow = {"probabilities": (882, "wide")}, {"probabilities cast": 882}
    mask = {"mask": (49, "bool")}
    assert kept(ATTENTION, REFERENCE) == ROWS | mask | probabilities | narrow
    for width in (4, 8):
        assert kept(ATTENTION, replace(REFERENCE, width=width)) == ROWS | mask | probabilities
    capped = replace(ATTENTION, softcap=2.0)  # no fused kernel has it
    for run in (RUN, REFERENCE):
        assert kept(capped, run) == ROWS | mask | {"capped": 882} | probabilities | narrow
        sunk = kept(replace(ATTENTION, sinks=True), run)
        assert sunk == ROWS | mask | {"probabilities": (882 + 126, "wide")} | narrow
    assert kept(replace(capped, sinks=True), replace(RUN, kernel="engine")) == ROWS | {"logsumexp": (126, "wide")}
    sloped = replace(ATTENTION, positions=Alibi(n_heads=6))
    assert kept(sloped, REFERENCE) == ROWS | probabilities | narrow
    assert kept(replace(ATTENTION, window=6), REFERENCE) == ROWS | mask | probabilities | narrow
    images = replace(REFERENCE, images=1, mutual=3)
    assert kept(ATTENTION, images) == ROWS | {"mask": (3 * 49, "bool")} | probabilities | narrow
    one = {name: size // 7 for name, size in ROWS.items()}
    alone = replace(REFERENCE, tokens=1)
    assert kept(ATTENTION, alone) == one | {"probabilities": (18, "wide"), "probabilities cast": 18}
    assert kept(replace(ATTENTION, chunk=3), alone) == one | {
        "mask": (1, "bool"),
        "probabilities": (18, "wide"),
        "probabilities cast": 18,
    }


def test_what_relative_buckets_keep() -> None:
    """Which bucket each pair has, for all layers that see alike; and which pairs are hidden, where some are."""
    buckets = RelativeBuckets(n_buckets=8, max_distance=16, both_ways=True)
    part = replace(ATTENTION, positions=buckets)
    scores = {"probabilities": (882, "wide"), "probabilities cast": 882}

    def tables(run: Pass = RUN, **more: Any) -> dict[str, Any]:  # noqa: ANN401  any field
        found = replace(part, **more)
        names = shared(found, run)
        assert {*kept(found, run)} - names == {*ROWS, *scores}
        return {name.split()[-1]: size for name, size in kept(found, run).items() if name in names}

    every, hidden = {"buckets": (49, "int64")}, {"hidden": (49, "bool")}
    assert tables() == every | hidden
    assert tables(causal=False) == tables(causal=False, window=7) == every
    assert tables(causal=False, window=6) == every | hidden
    assert tables(replace(RUN, tokens=2)) == {"buckets": (4, "int64"), "hidden": (4, "bool")}
    one = replace(RUN, tokens=1)
    assert tables(one) == tables(one, window=3) == {"buckets": (1, "int64")}
    assert tables(one, chunk=3) == {"buckets": (1, "int64"), "hidden": (1, "bool")}
    names = [frozenset(shared(replace(part, **more))) for more in ({}, {"window": 6}, {"chunk": 6}, {"causal": False})]
    assert len(set(names)) == 4
    other = replace(part, positions=replace(buckets, max_distance=32))
    assert not shared(other) & shared(part)
    assert held(BiasTable(n_buckets=8, n_heads=3)) == {"weight": ((8, 3), "bias")}


def test_embedded_distances() -> None:
    positions = Disentangled(span=4, max_distance=9)
    part = replace(ATTENTION, n_kv_heads=6, causal=False, positions=positions)
    found = [each.product for each in cost.products(part, RUN)]
    distant = [(one.name, one.a, one.b, one.c, one.n, one.weight) for one in found[3:7]]
    keys = [("k", 8, 11, 30, 1, "k.weight"), ("by distance", 21, 5, 8, 6, None)]
    queries = [("q", 8, 11, 30, 1, "q.weight"), ("by distance", 21, 5, 8, 6, None)]
    assert distant == keys + queries
    assert [one.name for one in found] == ["q", "k", "v", "k", "by distance", "q", "by distance", "scores", "mix", "o"]
    one_way = replace(part, positions=replace(positions, to_queries=False))
    assert [each.product.name for each in cost.products(one_way, RUN)][3:5] == ["k", "by distance"]
    met = {"queries": 630, "queries met": 8 * 30, "queries by distance": 21 * 6 * 8}
    assert met.items() <= kept(one_way).items()
    assert kept(part).items() >= (met | {"keys": 630, "keys met": 8 * 30, "keys by distance": 21 * 6 * 8}).items()
    assert kept(part)[f"{positions!r} rows"] == (49, "int64")
    assert shared(part) == {f"{positions!r} rows"}
    table = DistanceTable(n_rows=8, d_model=11)
    assert held(table) == {"weight": ((8, 11), "normal")}
    assert kept(table) == {}
    normed = replace(table, eps=0.1)
    assert held(normed) == held(table) | {"norm.weight": ((11,), "gain"), "norm.bias": ((11,), "bias")}
    assert kept(normed) == {"normed": 88, "mean": 8, "rstd": 8}


def test_projected_distances() -> None:
    part = RelativeProjection(d_model=4, n_heads=5, d_head=2)
    assert held(part) == {"weight": ((10, 4), "matrix")}
    after = replace(RUN, past=6)  # 13 distances; 7 x 6 + 28 pairs
    assert multiplied(part, after) == {"weight": (13, 4, 10, 1), "by distance": (21, 2, 13, 5)}
    assert causal(part, after) == {"by distance": 2 * 3 * 5 * 2 * 70}
    assert [each.product.one_gradient for each in cost.products(part, after)] == [True, False]
    assert kept(part, after) == {
        "sinusoids 4": 13 * 4,
        "distances": (7 * 13, "int64"),
        "ahead": (7 * 13, "bool"),
        "queries": 210,
        "projected": 130,
        "by distance": 21 * 5 * 13,
    }
    assert shared(part) == {"sinusoids 4", "distances", "ahead"}


def test_projected_distances_within_a_window() -> None:
    part = RelativeProjection(d_model=4, n_heads=5, d_head=2, window=9)
    after = replace(RUN, past=6)  # 9 distances; the queries attend to 7, 8, 9, 9, 9, 9 and 9 keys
    assert multiplied(part, after) == {"weight": (9, 4, 10, 1), "by distance": (21, 2, 9, 5)}
    assert causal(part, after) == {"by distance": 2 * 3 * 5 * 2 * 60}
    assert kept(part, after) == {
        "sinusoids 4 of 9": 9 * 4,
        "distances (9, None)": (7 * 13, "int64"),
        "ahead (9, None)": (7 * 13, "bool"),
        "queries": 210,
        "projected": 90,
        "by distance": 21 * 5 * 9,
    }
    near = replace(part, max_distance=3)  # 0, 1, 2 and 3
    assert multiplied(near, after) == {"weight": (4, 4, 10, 1), "by distance": (21, 2, 4, 5)}
    assert causal(near, after) == {}  # all of them have four keys or more behind them
    assert multiplied(near, replace(RUN, tokens=2)) == {"weight": (2, 4, 10, 1), "by distance": (6, 2, 2, 5)}
    vectors = ScoreBiases(n_heads=5, d_head=2)
    assert held(vectors) == {"keys": ((5, 2), "bias"), "distances": ((5, 2), "bias")}
    assert held(replace(part, biases=vectors)).keys() == {"weight", "biases.keys", "biases.distances"}
    assert multiplied(replace(part, biases=vectors), after) == multiplied(part, after)
    assert kept(vectors) == {}


def test_a_cached_input() -> None:
    part = replace(ATTENTION, caches_input=True, window=9)
    assert cached(part) == {"input": ((1, 11), 9, "sequence", 20)}
    assert cached(replace(part, n_kv_heads=1, window=None)) == {"input": ((1, 11), None, "sequence", 11)}
    assert cached(replace(part, d_input=4)) == {"input": ((1, 4), 9, "sequence", 20)}
    assert held(part) == held(ATTENTION)
    assert multiplied(part) == multiplied(ATTENTION)
    assert kept(part) == kept(ATTENTION)
    for past, tokens, keys in ((4, 7, 11), (20, 7, 16), (20, 1, 9), (3, 1, 4)):  # three sequences
        run, rows = replace(RUN, past=past, tokens=tokens), 3 * tokens
        found = multiplied(part, run)
        again = {"k.weight": (3 * keys, 11, 10, 1), "v.weight": (3 * keys, 11, 10, 1)}
        assert found.items() >= (again | {"q.weight": (rows, 11, 30, 1)}).items()


def test_clusters_of_tokens() -> None:
    first, rare = (TokenCluster(n_vocab=n, d_model=5, d_table=width) for n, width in ((13, 3), (17, 2)))
    assert held(first) == {"weight": ((13, 3), "table"), "project.weight": ((5, 3), "matrix")}
    assert multiplied(first) == {"project.weight": (21, 3, 5, 1)}
    assert kept(first) == {"places": (21, "int64"), "outside": (21, "bool"), "rows": 63}
    both = AdaptiveEmbedding(clusters=(first, rare))
    assert (both.n_vocab, both.d_model) == (30, 5)
    assert (kept(both), kept(replace(both, scale=2.0))) == ({}, {"scale": 1})
    head = ClusterHead(d_model=5, n_vocab=13, d_table=3, cluster=0)
    own = {"weight": ((13, 3), "matrix"), "bias": ((13,), "bias"), "project.weight": ((3, 5), "matrix")}
    assert held(head) == own
    assert multiplied(head) == {"project.weight": (21, 5, 3, 1), "weight": (21, 3, 13, 1)}
    assert kept(head) == {"input": 105, "narrow": 63, "log-probabilities": (21 * 13, "wide")}
    more = replace(head, n_clusters=4)
    assert held(more) == own | {"cluster_weight": ((4, 3), "matrix"), "cluster_bias": ((4,), "bias")}
    assert multiplied(more) == multiplied(head) | {"cluster_weight": (21, 3, 4, 1)}
    assert kept(more) == kept(head) | {"log-probabilities": (21 * 17, "wide")}
    tied = replace(head, cluster=2, tied=True, tied_map=True)
    assert held(tied) == {"bias": ((13,), "bias")}
    at = "embedding.clusters.2"
    assert multiplied(tied) == {f"{at}.project.weight": (21, 5, 3, 1), f"{at}.weight": (21, 3, 13, 1)}
    whole = AdaptiveHead(clusters=(replace(head, n_clusters=1), replace(head, n_vocab=17, cluster=1)))
    assert (whole.n_vocab, whole.n_scores, whole.d_model) == (30, 30, 5)


# 3 heads of 2 + 5 for queries and keys and of 3 for values; 7 + 5 are cached
LATENT = LatentAttention(d_model=11, n_heads=3, kv_rank=7, d_nope=2, d_rope=5, d_value=3)
RANKED = replace(LATENT, q_rank=13)


def test_latent_attention() -> None:
    below = {
        "kv_down.weight": ((7, 11), "matrix"),
        "k_rope.weight": ((5, 11), "matrix"),
        "k_up.weight": ((6, 7), "matrix"),
        "v_up.weight": ((9, 7), "matrix"),
        "o.weight": ((11, 9), "depth_scaled"),
    }
    ranked = {"q_down.weight": ((13, 11), "matrix"), "q_up.weight": ((21, 13), "matrix")}
    assert held(LATENT) == below | {"q.weight": ((21, 11), "matrix")}
    assert held(RANKED) == below | ranked
    down = {"kv_down.bias": ((7,), "bias"), "k_rope.bias": ((5,), "bias")}
    assert held(replace(LATENT, bias=True)) == held(LATENT) | down
    assert held(replace(RANKED, bias=True)) == held(RANKED) | down | {"q_down.bias": ((13,), "bias")}
    assert held(replace(LATENT, output_bias=True)) == held(LATENT) | {"o.bias": ((11,), "bias")}
    assert cached(LATENT) == {"latent": ((1, 12), None, "sequence", 3 * (7 + 3))}


def test_what_latent_attention_multiplies() -> None:
    always = {"kv_down.weight": (21, 11, 7, 1), "k_rope.weight": (21, 11, 5, 1), "o.weight": (21, 9, 11, 1)}
    for past, keys, seen, pairs in ((0, 7, 21, 28), (4, 11, 33, 56)):
        run = replace(RUN, past=past)
        expanded = always | {
            "k_up.weight": (seen, 7, 6, 1),
            "v_up.weight": (seen, 7, 9, 1),
            "scores": (7, 7, keys, 9),
            "mix": (7, keys, 3, 9),
        }
        assert multiplied(LATENT, run) == expanded | {"q.weight": (21, 11, 21, 1)}
        assert multiplied(RANKED, run) == expanded | {"q_down.weight": (21, 11, 13, 1), "q_up.weight": (21, 13, 21, 1)}
        assert causal(LATENT, run) == {"scores": 2 * 9 * 7 * pairs, "mix": 2 * 9 * 3 * pairs}
    first = multiplied(LATENT, replace(RUN, tokens=1))  # nothing before it: expanded
    assert (first["k_up.weight"], first["mix"]) == ((3, 7, 6, 1), (1, 1, 3, 9))
    absorbed = replace(RUN, tokens=1, past=4)  # k_up from its other side, for each head; scores as wide as is cached
    assert multiplied(LATENT, absorbed) == {
        "q.weight": (3, 11, 21, 1),
        "kv_down.weight": (3, 11, 7, 1),
        "k_rope.weight": (3, 11, 5, 1),
        "k_up.weight": (3, 2, 7, 3),
        "scores": (1, 12, 5, 9),
        "mix": (1, 5, 7, 9),
        "v_up.weight": (3, 7, 3, 3),
        "o.weight": (3, 9, 11, 1),
    }
    assert causal(LATENT, absorbed) == {}
    assert LATENT.absorbs(absorbed)
    assert LATENT.absorbs(replace(absorbed, past=1))
    assert not LATENT.absorbs(replace(absorbed, tokens=2))
    assert LATENT.pairs(replace(RUN, past=4)) == 56


def test_what_latent_attention_keeps() -> None:
    read = {"input": 231, "latent": 147, "mixed": 63 * 3}
    sums = {"logsumexp": (63, "wide")}
    filled = {"q": 63 * 7, "k": 63 * 7, "v": 63 * 7}
    assert kept(LATENT) == read | filled | {"mixed and zeros": 63 * 7} | sums
    assert kept(RANKED) == kept(LATENT) | {"q latent": 21 * 13}
    assert kept(replace(LATENT, d_value=7)) == read | {"mixed": 63 * 7} | filled | sums
    wide = {"q": 63 * 11, "k": 63 * 11, "v": 63 * 11}
    assert kept(replace(LATENT, d_value=11)) == read | {"mixed": 63 * 11} | wide | sums
    scores = {"probabilities": (441, "wide"), "probabilities cast": 441}
    plain = read | {"q": 63 * 7, "k": 63 * 7, "v": 63 * 3}
    assert kept(LATENT, REFERENCE) == plain | {"mask": (49, "bool")} | scores
    for width in (4, 8):
        found = kept(LATENT, replace(REFERENCE, width=width))
        assert found == plain | {"mask": (49, "bool"), "probabilities": (441, "wide")}
    one, two = kept(LATENT, replace(REFERENCE, tokens=1)), kept(LATENT, replace(REFERENCE, tokens=2))
    assert "mask" not in one
    assert (one["probabilities"], two["mask"]) == ((9, "wide"), (4, "bool"))


CROSS = CrossAttention(d_model=11, d_source=13, n_heads=3, d_head=5)


def test_cross_attention() -> None:
    matrices = {
        "q.weight": ((15, 11), "matrix"),
        "k.weight": ((15, 13), "matrix"),
        "v.weight": ((15, 13), "matrix"),
        "o.weight": ((11, 15), "depth_scaled"),
    }
    assert held(CROSS) == matrices
    inner = {f"{name}.bias": ((15,), "bias") for name in "qkv"}
    assert held(replace(CROSS, bias=True)) == matrices | inner
    assert held(replace(CROSS, output_bias=True)) == matrices | {"o.bias": ((11,), "bias")}
    assert cached(CROSS) == dict.fromkeys(("k", "v"), ((3, 5), None, "source", 15))
    run = replace(RUN, source=17)
    own = {"q.weight": (21, 11, 15, 1), "scores": (7, 5, 17, 9), "mix": (7, 17, 5, 9), "o.weight": (21, 15, 11, 1)}
    read = {"k.weight": (51, 13, 15, 1), "v.weight": (51, 13, 15, 1)}
    assert multiplied(CROSS, run) == own | read
    after = replace(run, past=4)  # they are remembered
    assert multiplied(CROSS, after) == own
    assert multiplied(CROSS, replace(run, source=0)).keys() == own.keys()
    one = {f"{name}.weight": cost.moved(CROSS, run, "int8", "int8").weights["attention"] for name in "q"}
    assert one["q.weight"] == 15 * (11 + 13 + 13 + 11)
    assert cost.moved(CROSS, after, "int8", "int8").weights["attention"] == 15 * (11 + 11)


def test_what_cross_attention_keeps() -> None:
    run = replace(RUN, source=17)
    common = {"input": 231, "source": 51 * 13, "q": 315, "k": 51 * 15, "v": 51 * 15, "mixed": 315}
    assert kept(CROSS, run) == common | {"logsumexp": (63, "wide")}
    scores = {"probabilities": (63 * 17, "wide")}
    for kernel, width, more in (
        ("reference", 2, scores | {"probabilities cast": 63 * 17}),
        ("reference", 4, scores),
        ("reference", 8, scores),
        ("engine", 2, {"logsumexp": (63, "wide")}),
    ):
        assert kept(CROSS, replace(run, kernel=kernel, width=width)) == common | more  # type: ignore[arg-type]
    assert shared(CROSS, run) == {"source"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forwards(activation: Any) -> None:  # noqa: ANN401
    plain, gated = (kind(d_model=11, d_ff=13, activation=activation) for kind in (MLP, GatedMLP))
    two = {"up.weight": ((13, 11), "matrix"), "down.weight": ((11, 13), "depth_scaled")}
    biases = {"up.bias": ((13,), "bias"), "down.bias": ((11,), "bias")}
    gate = {"gate.weight": ((13, 11), "matrix")}
    assert (held(plain), held(gated)) == (two, two | gate)
    assert held(replace(plain, bias=True)) == two | biases
    assert held(replace(gated, bias=True)) == two | gate | biases | {"gate.bias": ((13,), "bias")}
    products = {"up.weight": (21, 11, 13, 1), "down.weight": (21, 13, 11, 1)}
    assert multiplied(plain) == products
    assert multiplied(gated) == products | {"gate.weight": (21, 11, 13, 1)}
    inside = 21 * 13
    relu = activation == "relu"
    assert kept(plain) == {"input": 231, "hidden": inside} | ({} if relu else {"up": inside})
    assert kept(gated) == {"input": 231, "activated": inside, "up": inside, "hidden": inside} | (
        {} if relu else {"gate": inside}
    )


def test_a_learned_activation() -> None:
    part = MLP(d_model=11, d_ff=13, activation=XIELU())
    learned = {"activation.alpha_p": ((1,), "bias"), "activation.alpha_n": ((1,), "bias")}
    assert held(part) == {"up.weight": ((13, 11), "matrix"), "down.weight": ((11, 13), "depth_scaled")} | learned
    assert [(path, one.shape, one.fill) for path, one, _ in buffers(part)] == [
        ("activation.beta", (), 0.5),
        ("activation.eps", (), -1e-6),
    ]
    with pytest.raises(InputError, match=r"GatedMLP\.activation: must be relu"):
        GatedMLP(d_model=11, d_ff=13, activation=XIELU())  # type: ignore[arg-type]  # pyright: ignore


ROUTER = Router(d_model=5, n_experts=8, top_k=3)
EXPERTS = MixtureOfExperts(d_model=5, d_ff=13, n_experts=8, activation="silu", router=ROUTER)


def test_a_router() -> None:
    assert held(ROUTER) == {"weight": ((8, 5), "matrix")}
    assert held(replace(ROUTER, bias=True)) == {"weight": ((8, 5), "matrix"), "bias": ((8,), "bias")}
    assert list(buffers(ROUTER)) == []
    corrected = [(path, buffer.shape, buffer.role) for path, buffer, _ in buffers(replace(ROUTER, correction=True))]
    assert corrected == [("correction", (8,), "bias")]
    assert multiplied(ROUTER) == {"weight": (21, 5, 8, 1)}
    common = {"input": 105, "scores": (168, "wide"), "chosen": (63, "int64"), "weights": 63}
    assert kept(ROUTER) == common
    assert kept(replace(ROUTER, renormalise=True)) == common | {"chosen scores": (63, "wide"), "sums": (21, "wide")}
    in_turn = {"scores": (3 * 168, "wide"), "closed": (3 * 168, "bool")}
    assert kept(replace(ROUTER, nearness=0.5)) == common | in_turn


def test_experts() -> None:
    into, out = ((8, 13, 5), "matrix"), ((8, 5, 13), "depth_scaled")
    routed = {"router.weight": ((8, 5), "matrix")}
    assert held(EXPERTS) == {"gate": into, "up": into, "down": out} | routed
    plain = replace(EXPERTS, gating="none")
    assert held(plain) == {"up": into, "down": out} | routed
    clamped = replace(EXPERTS, gating=ClampedGate(alpha=1.7, limit=7.0), bias=True)
    assert held(clamped) == {
        "gate": into,
        "up": into,
        "down": out,
        "gate_bias": ((8, 13), "bias"),
        "up_bias": ((8, 13), "bias"),
        "down_bias": ((8, 5), "bias"),
    } | {"router.weight": ((8, 5), "matrix")}
    shared = replace(EXPERTS, shared=MLP(d_model=5, d_ff=7, activation="relu"), shared_gate=True)
    assert held(shared) == held(EXPERTS) | {
        "shared_gate.weight": ((1, 5), "matrix"),
        "shared.up.weight": ((7, 5), "matrix"),
        "shared.down.weight": ((5, 7), "depth_scaled"),
    }
    assert held(shared).keys() - held(replace(shared, shared_gate=False)).keys() == {"shared_gate.weight"}
    inward = (63, 5, 13, 1)
    three = {"gate": inward, "up": inward, "down": (63, 13, 5, 1), "router.weight": (21, 5, 8, 1)}
    assert multiplied(EXPERTS) == three
    assert multiplied(plain) == {name: x for name, x in three.items() if name != "gate"}
    assert multiplied(shared) == three | {
        "shared_gate.weight": (21, 5, 1, 1),
        "shared.up.weight": (21, 5, 7, 1),
        "shared.down.weight": (21, 7, 5, 1),
    }
    assert shared.spreads() == {"gate": 8, "up": 8, "down": 8}
    assert clamped.spreads() == dict.fromkeys(("gate", "up", "down", "gate_bias", "up_bias", "down_bias"), 8)


def test_what_is_read_of_experts() -> None:
    """A row hits 3 of 8; of two rows an expert is missed with (5/8)^2. The shared gate is read whole."""
    one, two = Pass(tokens=1), Pass(tokens=2)
    assert EXPERTS.touched(one) == 3
    assert EXPERTS.touched(two) == Fraction(8 * 39, 64)
    assert [EXPERTS.share(name, one) for name in ("gate", "down")] == [Fraction(3, 8), Fraction(3, 8)]
    shared = MLP(d_model=5, d_ff=3, activation="silu")
    assert replace(EXPERTS, shared=shared, shared_gate=True).maps["shared_gate"].share("weight", one) == 1
    assert EXPERTS.share("up", two) == Fraction(39, 64)


def test_what_experts_keep() -> None:
    """63 rows of 5, sorted, 13 inside."""
    ways = {"places": (63, "int64"), "order": (63, "int64"), "rows": 315}
    inside, results = 63 * 13, {"results": 315}

    def found(**more: Any) -> dict[str, Any]:  # noqa: ANN401  any field
        return kept(replace(EXPERTS, **more))

    def all_inside(*names: str) -> dict[str, int]:
        return dict.fromkeys(names, inside)

    assert found() == ways | all_inside("before", "activated", "up", "hidden") | results
    assert found(activation="relu") == ways | all_inside("activated", "up", "hidden") | results
    assert found(gating="none") == ways | all_inside("before", "hidden") | results
    assert found(gating="none", activation="relu") == ways | all_inside("hidden") | results
    clamped = all_inside("gate", "up", "gate cut", "up cut", "opened", "hidden")
    assert found(gating=ClampedGate(alpha=1.7, limit=7.0)) == ways | clamped | results
    assert found(capacity=2) == found() | {"dropped": (63, "bool")}
    assert found(weighs="inputs") == {name: size for name, size in found().items() if name != "results"} | {
        "input": 105
    }
    shared = {"shared": MLP(d_model=5, d_ff=7, activation="relu")}
    assert found(**shared) == found()
    assert found(**shared, shared_gate=True) == found() | {"openness": 21, "shared result": 105}
    # router and shared expert read what this one reads, which is kept once
    tensors = cost.saved_tensors(replace(EXPERTS, weighs="inputs", **shared), RUN, "ffn")
    assert [path for path in tensors if path.endswith(":input")] == ["ffn:input"]


def test_norms() -> None:
    assert held(RMSNorm(d=5)) == {"weight": ((5,), "gain")}
    assert held(RMSNorm(d=5, gain="offset")) == {"weight": ((5,), "zeros")}
    assert held(RMSNorm(d=5, gain="none")) == held(LayerNorm(d=5, gain=False, bias=False)) == {}
    assert held(LayerNorm(d=5)) == {"weight": ((5,), "gain"), "bias": ((5,), "bias")}
    assert kept(RMSNorm(d=5)) == {"input": 105, "rstd": (21, "wide")}
    assert kept(LayerNorm(d=5)) == {"input": 105, "mean": 21, "rstd": 21}


def test_tables() -> None:
    assert held(TokenEmbedding(n_vocab=13, d_model=5)) == {"weight": ((13, 5), "table")}
    narrow = TokenEmbedding(n_vocab=13, d_model=5, d_table=3)
    assert held(narrow) == {"weight": ((13, 3), "table"), "project.weight": ((5, 3), "matrix")}
    assert multiplied(narrow) == {"project.weight": (21, 3, 5, 1)}
    assert multiplied(replace(narrow, d_table=None)) == held(SharedEmbedding(n_vocab=13, d_model=5)) == {}
    tokens = {"tokens": (21, "int64")}
    assert kept(narrow) == tokens | {"rows": 63}
    for kind in (TokenEmbedding, SharedEmbedding):
        plain = kind(n_vocab=13, d_model=5)
        assert kept(plain) == tokens
        assert kept(replace(plain, scale=2.0)) == tokens | {"scale": 1}
        assert shared(replace(plain, scale=2.0)) == {"tokens"}
    types = TypeEmbedding(n_types=2, d_model=5)
    assert held(types) == {"weight": ((2, 5), "table")}
    assert (kept(types), shared(types)) == ({"types": (21, "int64")}, set())
    learned = LearnedPositions(n_positions=16, d_model=5, offset=2)
    assert held(learned) == {"weight": ((18, 5), "table")}
    assert (kept(learned), shared(learned)) == ({"positions": (7, "int64")}, {"positions"})
    sinusoids = Sinusoids(n_positions=16, d_model=5)
    assert held(sinusoids) == {"weight": ((16, 5), "table")}
    assert [weight.learned for _, weight, _ in weights(sinusoids)] == [False]
    assert [weight.learned for _, weight, _ in weights(learned)] == [True]
    assert kept(sinusoids) == {}
    rotary = Rotary(d_rotary=4)
    assert kept(rotary) == {f"{rotary!r} of 7": 2 * 7 * 4}
    temperature = QueryTemperature(scale=0.1, floor=8)
    assert kept(temperature) == {f"{temperature!r} of 7": 7}
    assert shared(rotary) | shared(temperature) == {f"{rotary!r} of 7", f"{temperature!r} of 7"}


def test_heads() -> None:
    matrix, bias = {"weight": ((13, 5), "matrix")}, {"bias": ((13,), "bias")}
    project = {"project.weight": ((3, 5), "matrix")}
    for kind, own, weight in ((Head, matrix, "weight"), (TiedHead, {}, "embedding.weight")):
        head = kind(d_model=5, n_vocab=13)
        assert held(head) == own
        assert held(replace(head, bias=True)) == own | bias
        assert multiplied(head) == {weight: (21, 5, 13, 1)}
        narrow = replace(head, d_table=3)
        assert held(narrow) == ({"weight": ((13, 3), "matrix")} if own else {}) | project
        assert multiplied(narrow) == {"project.weight": (21, 5, 3, 1), weight: (21, 3, 13, 1)}
        assert kept(head) == kept(replace(head, scale=0.5, shift=True)) == {"input": 105}
        assert kept(replace(head, softcap=2.0)) == {"input": 105, "capped": 21 * 13}
        assert kept(narrow) == {"input": 105, "narrow": 63}
        assert list(buffers(head)) == []
        shifted = [(path, buffer.shape, buffer.role) for path, buffer, _ in buffers(replace(head, shift=True))]
        assert shifted == [("shift", (13,), "bias")]


def test_what_encoders_have_beside() -> None:
    transform = HeadTransform(d_model=5, activation="gelu")
    dense = {"dense.weight": ((5, 5), "matrix")}
    bias, norm = {"dense.bias": ((5,), "bias")}, {"norm.weight": ((5,), "gain"), "norm.bias": ((5,), "bias")}
    assert held(transform) == dense | bias | norm
    assert held(replace(transform, bias=False)) == dense | norm
    assert held(replace(transform, norm_bias=False)) == dense | bias | {"norm.weight": ((5,), "gain")}
    assert multiplied(transform) == {"dense.weight": (21, 5, 5, 1)}
    statistics = {"mean": 21, "rstd": 21}
    assert kept(transform) == {"input": 105, "dense": 105, "activated": 105} | statistics
    assert kept(replace(transform, activation="relu")) == {"input": 105, "activated": 105} | statistics
    narrow = replace(transform, d_out=3)
    assert held(narrow)["dense.weight"] == ((3, 5), "matrix")
    assert {shape for name, (shape, _) in held(narrow).items() if name != "dense.weight"} == {(3,)}
    assert multiplied(narrow) == {"dense.weight": (21, 5, 3, 1)}
    assert kept(narrow) == {"input": 105, "dense": 63, "activated": 63} | statistics
    head = Head(d_model=5, n_vocab=13, d_table=3, transform=narrow)
    assert multiplied(head) == {"transform.dense.weight": (21, 5, 3, 1), "weight": (21, 3, 13, 1)}
    wide = EmbeddingProjection(d_embedding=3, d_model=5)
    assert held(wide) == {"dense.weight": ((5, 3), "matrix"), "dense.bias": ((5,), "bias")}
    assert (multiplied(wide), kept(wide)) == ({"dense.weight": (21, 3, 5, 1)}, {"input": 63})
    pooler, pooled = Pooler(d_model=5), replace(RUN, tokens=1, logits="pooled")
    assert held(pooler) == dense | bias
    assert (multiplied(pooler, pooled), kept(pooler, pooled)) == (
        {"dense.weight": (3, 5, 5, 1)},
        {"input": 15, "pooled": 15},
    )
    gelu = replace(pooler, activation="gelu")
    assert (multiplied(gelu), kept(gelu)) == ({"dense.weight": (21, 5, 5, 1)}, {"input": 105, "dense": 105})


def test_patches_and_what_reads_them() -> None:
    """3 images of 2 x 2 patches of 2 x 3 x 3 = 18 numbers."""
    patches = PatchEmbedding(image_size=7, patch_size=3, channels=2, d_model=5)
    matrix, bias = {"weight": ((5, 2, 3, 3), "matrix")}, {"bias": ((5,), "bias")}
    assert held(patches) == matrix
    assert held(replace(patches, bias=True)) == matrix | bias
    for where in ("first", "last"):
        assert held(replace(patches, class_token=where)) == matrix | {"class_token": ((5,), "bias")}
    three = replace(patches, class_token="first", n_registers=3)
    assert held(three) == matrix | {"class_token": ((5,), "bias"), "registers": ((3, 5), "bias")}
    assert (three.n_tokens, three.n_added, multiplied(three)) == (8, 4, multiplied(patches))
    assert multiplied(patches) == {"weight": (12, 18, 5, 1)}
    assert [each.product.one_gradient for each in cost.products(patches, RUN)] == [True]
    assert kept(patches) == {"input": 12 * 18}
    nine = replace(patches, image_size=11)
    assert (nine.n_side, nine.n_patches, nine.n_tokens, nine.d_patch) == (3, 9, 9, 18)
    assert replace(nine, class_token="last").n_tokens == 10
    assert PatchEmbedding(image_size=7, patch_size=3, d_model=5).d_patch == 27  # three colours
    labels = Classifier(d_model=5, n_labels=11)
    assert held(labels) == {"weight": ((11, 5), "matrix"), "bias": ((11,), "bias")}
    assert held(replace(labels, bias=False)) == {"weight": ((11, 5), "matrix")}
    assert (multiplied(labels), kept(labels)) == ({"weight": (21, 5, 11, 1)}, {"input": 105})
    assert kept(replace(labels, labels="last", padding=3)) == {"input": 105, "places": (42, "int64")}
    after = {name: replace(labels, transform=Pooler(d_model=5, activation=name)) for name in ("tanh", "relu", "gelu")}
    assert [kept(one) for one in after.values()] == [{}, {}, {"input": 105}]  # its own output, saved by the first two
    several = [replace(labels, n_labels=2, labels=which).per_token for which in LABELLED]
    assert several == [False, False, False, True, True]
    vector = Projection(d_model=5, d_out=11)
    assert held(vector) == {"weight": ((11, 5), "matrix")}
    assert (multiplied(vector), kept(vector)) == ({"weight": (21, 5, 11, 1)}, {"input": 105})
    for found in ({"reads": "end", "end": 2}, {"reads": "highest"}):  # its row and column
        assert kept(replace(vector, **found)) == {"input": 105, "places": (42, "int64")}


def test_projectors() -> None:
    """12 tokens of 5 are 3 squares of 2 x 2, vectors of 20; or 5 x 5 of them 2 x 2 means."""
    run = replace(RUN, tokens=12)
    merged = MLPProjector(widths=(20, 7, 13, 11), activation="gelu", merge=2)
    matrices = {
        "layers_0.weight": ((7, 20), "matrix"),
        "layers_1.weight": ((13, 7), "matrix"),
        "layers_2.weight": ((11, 13), "matrix"),
    }
    assert held(merged) == matrices
    biases = {"layers_0.bias": ((7,), "bias"), "layers_1.bias": ((13,), "bias"), "layers_2.bias": ((11,), "bias")}
    assert held(replace(merged, bias=True)) == matrices | biases
    assert multiplied(merged, run) == {
        "layers_0.weight": (9, 20, 7, 1),
        "layers_1.weight": (9, 7, 13, 1),
        "layers_2.weight": (9, 13, 11, 1),
    }
    hidden, before = {"hidden 0": 63, "hidden 1": 117}, {"activation 0": 63, "activation 1": 117}
    assert kept(merged, run) == {"input": 180} | hidden | before
    assert kept(replace(merged, activation="relu"), run) == {"input": 180} | hidden
    assert (merged.d_in, merged.d_out, merged.n_tokens(12)) == (5, 11, 3)
    pooled = PooledProjector(d_in=5, d_out=11, n_side=5, pool=2, norm=RMSNorm(d=5))
    of_25 = replace(RUN, tokens=25)
    assert held(pooled) == {"weight": ((11, 5), "matrix"), "norm.weight": ((5,), "gain")}
    assert multiplied(pooled, of_25) == {"weight": (12, 5, 11, 1)}
    assert kept(pooled, of_25) == {"input": 60}
    assert replace(pooled, n_side=7).n_tokens(49) == 9
    normed = cost.saved_tensors(pooled, of_25, "projector")
    assert normed["projector.norm:input"].size == 60
    assert [pooled.fits(patches, side) for patches, side in ((25, 5), (26, 5), (16, 4), (25, 4))] == [
        True,
        False,
        False,
        False,
    ]


def test_images_in_texts_and_beside_them() -> None:
    """2 images for each of 3 texts of 7 tokens."""
    from small_parts import tower

    run = replace(RUN, batch=6, images=2)
    projector = MLPProjector(widths=(7, 11), activation="gelu")
    seen = Vision(tower=tower(3), projector=projector, placeholder=1)
    assert kept(seen, run) == {"places": (21, "bool")}
    assert (seen.n_selected, seen.n_tokens) == (4, 4)
    with_class = replace(seen, keep_class=True)
    assert (with_class.n_selected, with_class.n_tokens) == (5, 5)
    read, projected = seen.child_run("tower", run), with_class.child_run("projector", run)
    assert (read.images, read.depth, read.tokens, projected.images, projected.tokens) == (0, None, 7, 0, 5)
    assert replace(seen, layers=1).child_run("tower", run).depth == 1
    pair = Contrast(tower=tower(3, head=Projection(d_model=7, d_out=97)))
    assert {path: w for path, w in held(pair).items() if "." not in path} == {"scale": ((), "gain")}
    assert multiplied(pair, run)["cosines"] == (6, 97, 3, 1)
    assert kept(pair, run) == {
        "images": 6 * 97,
        "texts": 3 * 97,
        "lengths": 9,
        "normed": 9 * 97,
        "cosines": 18,
        "factor": 1,
    }
    assert pair.child_run("tower", run).images == 0
