"""How parts are found and divided, and which run each of a model's parts sees, one by one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from small_parts import ATTENTION, BODY, CROSS, EXPERTS, LATENT, MODEL, tower
from test_bounds import BRANCH, BUCKETS, DISTANCES, PREDICTOR, READ, SEEN, SHARED, TEXT, TRANSLATOR, stack

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.spec import (
    MLP,
    Alibi,
    BiasTable,
    Block,
    Branch,
    Classifier,
    Contrast,
    GatedMLP,
    Head,
    LayerNorm,
    Parallel,
    Part,
    Pass,
    Pooler,
    Projection,
    Remembered,
    RMSNorm,
    Rotary,
    Router,
    SharedEmbedding,
    TiedHead,
    TokenEmbedding,
    Weight,
    buffers,
    runs,
    stored_weights,
    walk,
    walk_stored,
    weights,
)
from asbuilt.spec.part import Product, divided, divided_vocabulary

RUN = Pass(tokens=7, batch=3, past=4)


def seen(model: Part, run: Pass) -> dict[str, Pass]:
    return {path: of for path, _, of in runs(model, run)}


def test_what_a_run_counts() -> None:
    assert (RUN.rows, RUN.source_tokens, replace(RUN, source=5).source_tokens) == (21, 11, 5)
    assert replace(RUN, source=0).source_tokens == 0
    plain = Pass(tokens=7)
    assert (plain.batch, plain.past, plain.images, plain.mutual, plain.width) == (1, 0, 0, 0, 2)
    assert (plain.source, plain.depth, plain.logits, plain.kernel) == (None, None, "all", "fused")


def test_what_a_product_takes() -> None:
    product = Product(name="x", a=2, b=3, c=5, n=7)
    assert (product.flops, product.causal_flops) == (2 * 2 * 3 * 5 * 7, 420)
    assert (replace(product, needed=0).causal_flops, replace(product, needed=11).causal_flops) == (0, 11)
    assert Product(name="x", a=2, b=3, c=5).flops == 60


def test_what_is_remembered_and_held_takes() -> None:
    cached = Remembered(name="x", shape=(2, 3))
    assert (cached.size, cached.expanded, cached.tokens_kept(9)) == (6, 6, 9)
    assert replace(cached, stands_for=0).expanded == 0
    assert [replace(cached, window=4).tokens_kept(n) for n in (3, 4, 5)] == [3, 4, 4]
    assert Weight(shape=(), role="gain").size == 1
    assert Weight(shape=(2, 3), role="gain").size == 6


def test_a_part_says_nothing_unless_it_does() -> None:
    part = Part()
    assert (part.holds(), part.buffers(), part.multiplies(RUN), part.remembers()) == ({}, {}, (), ())
    assert (part.share("x", RUN), part.spreads(), part.child_run("x", RUN)) == (1, {}, RUN)
    assert ([*part.children()], [*part.extras()]) == ([], [])
    assert part.shard(3) == part
    assert part.kind == "other"


def test_parts_are_found_parents_first() -> None:
    both = Branch(name="x", norm=RMSNorm(d=11), body=Parallel(attention=ATTENTION, ffn=BODY))
    model = replace(MODEL, blocks=(Block(branches=(both, replace(BRANCH, parallel=True))),), norm=RMSNorm(d=11))
    paths = [
        "",
        "embedding",
        "blocks.0",
        "blocks.0.x",
        "blocks.0.x.norm",
        "blocks.0.x.body",
        "blocks.0.x.body.attention",
        "blocks.0.x.body.ffn",
        "blocks.0.ffn",
        "blocks.0.ffn.body",
        "norm",
        "head",
    ]
    assert [path for path, _ in walk(model) if path in paths] == paths
    assert [path for path, _ in walk(RMSNorm(d=4), "at")] == ["at"]
    assert dict(walk(model, "at"))["at.blocks.0.x.norm"] == RMSNorm(d=11)
    assert dict(walk(model))["blocks.0.ffn"].parallel  # type: ignore[attr-defined]
    assert [name for name, _ in model.blocks[0].children()] == ["x", "ffn"]


def test_what_a_checkpoint_holds_beside() -> None:
    model = replace(MODEL, predictors=(PREDICTOR, replace(PREDICTOR, norm=LayerNorm(d=11))))
    assert [*walk(model)][1:] == [*walk(MODEL)][1:]
    beside = {path.split(".")[1] for path, _ in walk_stored(model) if path.startswith("predictors.")}
    assert beside == {"0", "1"}
    assert dict(walk_stored(model, "at"))["at.predictors.1.norm"] == LayerNorm(d=11)
    assert [name for name, _ in model.extras()] == ["predictors.0", "predictors.1"]
    own, stored = {path for path, *_ in weights(model)}, {path for path, *_ in stored_weights(model)}
    assert own == {path for path, *_ in weights(MODEL)}
    assert {"predictors.0.join.weight", "predictors.1.norm.bias", "embedding.weight"} <= stored
    join = {path: weight for path, weight, _ in stored_weights(model)}["predictors.0.join.weight"]
    assert (join.shape, join.role) == ((11, 22), "matrix")
    (product,) = (x.product for x in cost.products(PREDICTOR, RUN) if x.weight_path == "join.weight")
    assert (product.a, product.b, product.c, product.n) == (21, 22, 11, 1)
    shifted = replace(model, head=replace(MODEL.head, shift=True))  # type: ignore[type-var]
    assert [path for path, *_ in buffers(shifted)] == ["head.shift"]
    in_predictor = replace(MODEL, predictors=(replace(PREDICTOR, head=replace(PREDICTOR.head, shift=True)),))
    assert [path for path, *_ in buffers(in_predictor)] == ["predictors.0.head.shift"]
    assert [path for path, *_ in stored_weights(shifted)][-1] == "head.shift"
    assert [path for path, *_ in buffers(replace(MODEL.head, shift=True))] == ["shift"]  # type: ignore[type-var]


def test_norms_of_heads_see_a_row_for_each() -> None:
    of_head = replace(ATTENTION, q_norm=RMSNorm(d=5), k_norm=RMSNorm(d=5), positions=Rotary(d_rotary=4))
    found = seen(of_head, RUN)
    assert (found["q_norm"], found["k_norm"]) == (replace(RUN, tokens=42), replace(RUN, tokens=14))
    assert found["positions"] == RUN
    of_all = replace(ATTENTION, q_norm=RMSNorm(d=30), k_norm=RMSNorm(d=10))
    assert {found for path, found in seen(of_all, RUN).items() if path} == {RUN}


def test_runs_of_a_models_parts() -> None:
    model = MODEL.changed(norm=RMSNorm(d=11), pooler=Pooler(d_model=11), embedding_norm=RMSNorm(d=11))
    above, one = ("norm", "head"), replace(RUN, tokens=1)
    found = seen(model, RUN)
    assert {found[name] for name in (*above, "embedding", "embedding_norm", "blocks.0")} == {RUN}
    assert "pooler" not in found
    last = seen(model, replace(RUN, logits="last"))
    assert {last[name] for name in above} == {replace(one, logits="last")}
    assert last["blocks.0"] == replace(RUN, logits="last")
    pooled = seen(model, replace(RUN, logits="pooled"))
    assert "head" not in pooled
    assert pooled["norm"] == pooled["pooler"] == replace(one, logits="pooled")
    for head in (Projection(d_model=11, d_out=2), Classifier(d_model=11, n_labels=3)):
        reads_one = seen(replace(model, head=head), RUN)
        assert reads_one["norm"] == reads_one["head"] == one
    mean = seen(replace(model, head=Classifier(d_model=11, n_labels=3, labels="mean")), RUN)
    assert (mean["norm"], mean["head"]) == (RUN, one)
    every = seen(replace(model, head=Classifier(d_model=11, n_labels=3, labels="all")), RUN)
    assert every["norm"] == every["head"] == RUN


def test_runs_of_a_stack_that_stops_early() -> None:
    model = MODEL.changed(blocks=MODEL.blocks * 12, norm=RMSNorm(d=11), pooler=Pooler(d_model=11))
    for depth in (0, 1, 2, 11, 12):
        found = seen(model, replace(RUN, depth=depth))
        assert {path for path in found if path.count(".") < 2} - {"", "embedding"} == {
            f"blocks.{i}" for i in range(depth)
        }
        assert all(of == RUN for path, of in found.items() if path)


def test_runs_of_an_encoder() -> None:
    first = replace(RUN, past=0, source=13, images=1, logits="last")
    found = seen(TRANSLATOR, first)
    assert found["encoder"] == Pass(tokens=13, batch=3, source=0)
    assert found["head"].tokens == 1
    assert seen(TRANSLATOR, replace(first, source=None))["encoder"].tokens == 7
    assert "encoder" not in seen(TRANSLATOR, RUN)


def test_runs_of_images() -> None:
    """3 texts of 2 images each: 6 images of 5 tokens, from the first, whatever came before in the text."""
    run = replace(RUN, images=2, logits="last")
    found = seen(TEXT, run)
    assert found["vision"] == Pass(tokens=7, batch=6, images=2)
    assert found["vision.tower"] == Pass(tokens=7, batch=6)
    assert found["vision.tower.embedding"] == found["vision.tower.blocks.0"] == Pass(tokens=5, batch=6)
    assert found["vision.projector"] == Pass(tokens=4, batch=6)
    assert found["blocks.0"] == run
    assert not {"vision", "vision.tower"} & {*seen(TEXT, RUN)}
    both_ways = replace(TEXT, vision=replace(SEEN, both_ways=True), blocks=stack(ATTENTION))
    mutual = seen(both_ways, run)
    assert mutual["blocks.0"] == replace(run, mutual=4)
    assert mutual["vision"] == Pass(tokens=7, batch=6, images=2)
    assert seen(both_ways, RUN)["blocks.0"] == RUN
    images = tower(3)
    for logits in ("all", "last", "pooled"):
        of_image = seen(replace(images, pooler=Pooler(d_model=7)), replace(RUN, logits=logits))  # type: ignore[arg-type]
        kept: Any = "pooled" if logits == "pooled" else "all"
        assert of_image["blocks.1"] == Pass(tokens=5, batch=3, logits=kept)
    pair = MODEL.changed(
        head=Projection(d_model=11, d_out=2),
        vision=Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2))),
    )
    compared = seen(pair, run)
    assert compared["vision"].images == 2
    assert compared["vision.tower"] == Pass(tokens=7, batch=6)
    assert compared["blocks.0"].mutual == 0


def test_what_a_model_says_of_itself() -> None:
    assert (MODEL.d_model, MODEL.n_layers, MODEL.n_vocab, MODEL.language_head) == (11, 1, 5, MODEL.head)
    tied = TiedHead(d_model=11, n_vocab=5)
    assert replace(MODEL, head=tied).language_head == tied
    assert READ.language_head is replace(READ, head=Projection(d_model=11, d_out=2)).language_head is None
    assert tower(3).n_vocab == 0
    assert SHARED.n_vocab == 5
    assert MODEL.decodes
    assert replace(MODEL, blocks=stack(ATTENTION, LATENT_OF_11)).decodes
    assert not replace(MODEL, blocks=stack(ATTENTION, replace(ATTENTION, causal=False))).decodes
    assert not replace(MODEL, blocks=stack(replace(ATTENTION, cached=False), ATTENTION)).decodes
    assert Parallel(attention=ATTENTION, ffn=BODY).d_model == PREDICTOR.d_model == 11


LATENT_OF_11 = replace(LATENT, d_model=11)


def test_order_of_norms_and_turning() -> None:
    both = replace(ATTENTION, q_norm=RMSNorm(d=5), k_norm=RMSNorm(d=5), positions=Rotary(d_rotary=4))
    normed_first = [name for name, _ in both.children()]
    assert normed_first.index("q_norm") < normed_first.index("k_norm") < normed_first.index("positions")
    turned_first = [name for name, _ in replace(both, rotate_first=True).children()]
    assert turned_first.index("positions") < turned_first.index("q_norm") < turned_first.index("k_norm")


# What one of several devices holds.


def test_a_vocabulary_is_padded_where_it_is_divided() -> None:
    """To a multiple of 64 and of the degree: 1,000 in 3 is 1,152 / 3, in 7 1,344 / 7; what is smaller stays whole."""
    assert [divided_vocabulary(n, d) for n, d in ((1000, 1), (1000, 4), (1000, 3), (1000, 7))] == [1000, 250, 384, 192]
    assert [divided_vocabulary(n, d) for n, d in ((5, 2), (64, 3), (65, 64), (63, 2), (131, 2))] == [5, 64, 2, 32, 96]
    for part in (
        TokenEmbedding(n_vocab=131, d_model=4),
        SharedEmbedding(n_vocab=131, d_model=4),
        Head(n_vocab=131, d_model=4),
        TiedHead(n_vocab=131, d_model=4),
    ):
        assert part.shard(2) == replace(part, n_vocab=96)


def test_heads_are_divided() -> None:
    assert divided(ATTENTION, "n_heads", 3) == 2
    with pytest.raises(InputError, match=r"Attention\.n_heads.*a multiple of 4, the number of devices that share it"):
        divided(ATTENTION, "n_heads", 4)
    assert ATTENTION.shard(2) == replace(ATTENTION, n_heads=3, n_kv_heads=1)
    four = replace(ATTENTION, n_heads=12)
    assert four.shard(4) == replace(ATTENTION, n_heads=3, n_kv_heads=1)
    assert four.shard(6) == replace(ATTENTION, n_heads=2, n_kv_heads=1)
    three = replace(ATTENTION, n_heads=12, n_kv_heads=4)
    with pytest.raises(InputError, match=r"n_kv_heads.*a multiple of 3"):
        three.shard(3)
    with pytest.raises(InputError, match=r"n_kv_heads.*a multiple of 6"):
        three.shard(6)
    assert replace(ATTENTION, positions=Alibi(n_heads=6)).shard(2).positions == Alibi(n_heads=3)
    assert replace(ATTENTION, positions=DISTANCES).shard(2).positions == replace(DISTANCES, n_heads=3)
    for whole in (Rotary(d_rotary=4), BUCKETS, None):
        assert replace(ATTENTION, positions=whole).shard(2).positions == whole
    assert LATENT.shard(3) == replace(LATENT, n_heads=1)
    assert CROSS.shard(3) == replace(CROSS, n_heads=1)
    assert BiasTable(n_buckets=8, n_heads=6).shard(2) == BiasTable(n_buckets=8, n_heads=3)
    assert DISTANCES.shard(3) == replace(DISTANCES, n_heads=2)
    for part in (LATENT, CROSS, BiasTable(n_buckets=8, n_heads=6), DISTANCES):
        with pytest.raises(InputError, match="n_heads"):
            part.shard(7)


def test_norms_of_all_heads_are_divided_as_they_are() -> None:
    of_all = replace(ATTENTION, q_norm=RMSNorm(d=30), k_norm=RMSNorm(d=10))
    own = of_all.shard(2)
    assert (own.q_norm, own.k_norm) == (RMSNorm(d=15), RMSNorm(d=5))
    each = replace(ATTENTION, q_norm=RMSNorm(d=5), k_norm=RMSNorm(d=5)).shard(2)
    assert (each.q_norm, each.k_norm) == (RMSNorm(d=5), RMSNorm(d=5))
    one = replace(ATTENTION, n_kv_heads=1, k_norm=RMSNorm(d=5)).shard(2)
    assert one.k_norm == RMSNorm(d=5)


def test_feed_forwards_are_divided() -> None:
    twelve, eight = MLP(d_model=5, d_ff=12, activation="relu"), GatedMLP(d_model=5, d_ff=8, activation="silu")
    assert (twelve.shard(3).d_ff, eight.shard(4).d_ff) == (4, 2)
    for part in (twelve, eight):
        with pytest.raises(InputError, match=r"d_ff.*a multiple of 5"):
            part.shard(5)
    experts = replace(EXPERTS, d_ff=12)
    for tensor, expert, d_ff in ((1, 1, 12), (2, 1, 6), (6, 2, 4), (2, 4, 12), (1, 8, 12), (4, 1, 3)):
        assert experts.shard(tensor, expert) == replace(experts, d_ff=d_ff)
    assert experts.shard(2).d_ff == 6
    with pytest.raises(InputError, match=r"n_experts.*a multiple of 3, the expert parallel degree"):
        experts.shard(1, 3)
    shared = replace(experts, shared=twelve)
    assert shared.shard(6, 2) == replace(experts, d_ff=4, shared=replace(twelve, d_ff=2))
    # a whole model passes both degrees on
    model = MODEL.changed(embedding=TokenEmbedding(n_vocab=6, d_model=5), head=None, blocks=stack(experts, experts))
    own = model.shard(6, 2)
    assert [own.blocks[i].branches[0].body for i in (0, 1)] == [experts.shard(6, 2)] * 2
    assert own.embedding == TokenEmbedding(n_vocab=1, d_model=5)
    assert model.shard(3).blocks[0].branches[0].body == experts.shard(3, 1)
    assert replace(model, norm=RMSNorm(d=5)).shard(2).norm == RMSNorm(d=5)
    named = Branch(name="x", body=Parallel(attention=replace(ATTENTION, d_model=5), ffn=experts))
    assert named.shard(2).body == Parallel(attention=replace(ATTENTION, d_model=5).shard(2), ffn=experts.shard(2))


def test_experts_that_are_read() -> None:
    router = Router(d_model=5, n_experts=4, top_k=4)
    every = replace(EXPERTS, n_experts=4, router=router)
    assert every.touched(Pass(tokens=3)) == every.touched(Pass(tokens=1)) == 4
    assert every.share("gate", Pass(tokens=2)) == Fraction(1)
    # keys and values of a source are made in the first pass alone
    assert CROSS.child_run("k", RUN) is CROSS.child_run("v", RUN) is None
    assert CROSS.child_run("k", replace(RUN, past=0, source=11)) == replace(RUN, past=0, source=11, tokens=11)
    assert CROSS.child_run("q", RUN) == CROSS.child_run("o", RUN) == RUN
