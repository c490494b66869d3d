"""What each part needs while it runs, worked out by hand: which tensors are there at once, and how many bytes each has.

Measured peaks (`test_peak_bytes.py`) say that the formulas are near; here every term of them is one that decides. Sizes
are small primes, and of each pair of moments that may be the busiest one is the busier once at least.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_parts import ATTENTION, CROSS, EXPERTS, FFN, LATENT, MODEL, ROUTER, tower

from asbuilt.kernels.memory import memory
from asbuilt.kernels.memory.attention import AttentionMemory
from asbuilt.spec import (
    MLP,
    Alibi,
    Attention,
    BiasTable,
    Block,
    Branch,
    ClampedGate,
    Classifier,
    Contrast,
    ExpertGroups,
    GatedMLP,
    Head,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    MLPProjector,
    Model,
    Parallel,
    Part,
    Pass,
    PatchEmbedding,
    PooledProjector,
    Pooler,
    Projection,
    RelativeBuckets,
    RelativeProjection,
    RMSNorm,
    Rotary,
    SharedEmbedding,
    TextEncoder,
    TiedHead,
    TokenEmbedding,
    TypeEmbedding,
    Vision,
)

WIDTHS = pytest.mark.parametrize("w", [2, 4, 8])  # bytes of a number: bfloat16, float32, float64
RUN = Pass(tokens=7, batch=3)  # 21 rows


def room(part: Part, w: int, run: Pass = RUN, **more: Any) -> int:  # noqa: ANN401  any field of a run
    return memory(part).peak_bytes(replace(run, width=w, **more))


# Attention: 21 rows of 6 heads of 5 are 630 numbers of queries, of 2 heads 210 of keys and as many of values.
Q, K, V, MIXED, RESULT = 630, 210, 210, 630, 231  # the result: 21 rows of 11
SUMS = 126  # a log-sum-exp for each of 21 x 6


@WIDTHS
def test_room_of_attention(w: int) -> None:
    """q, k and v, the mixed values, and beside these a float32 for each query and head or the result."""
    sums = SUMS * max(4, w)
    assert room(ATTENTION, w) == (Q + K + V + MIXED) * w + max(sums, RESULT * w)
    assert (sums > RESULT * w) == (w == 2)
    narrow = replace(ATTENTION, d_model=5)  # 105 numbers
    assert room(narrow, w) == (Q + K + V + MIXED) * w + sums
    for near in ({"window": 6}, {"chunk": 6}):  # the library widens their mask of 7 x 7
        assert room(replace(narrow, **near), w) == (Q + K + V + MIXED) * w + sums + 49 * w
        assert room(replace(narrow, **near), w, kernel="engine") == room(narrow, w)
    images = room(narrow, w, images=1, mutual=3)
    assert images == (Q + K + V + MIXED) * w + sums + 3 * 49 * w


@WIDTHS
def test_room_of_turning(w: int) -> None:
    """Turned q and k, each beside its product with cos and with sin; or these and the result, where it is wide."""
    turned = replace(ATTENTION, positions=Rotary(d_rotary=4))
    assert room(turned, w) == (Q + K + V + 3 * (Q + K)) * w
    wide = replace(turned, d_model=101)
    assert room(wide, w) == (Q + K + V + (Q + K) + MIXED + 21 * 101) * w
    unlike = replace(turned, n_kv_heads=6)  # as many keys as queries
    assert room(unlike, w) == (3 * Q + 3 * 2 * Q) * w


@WIDTHS
def test_training_room_of_turning_a_part(w: int) -> None:
    """Heads of five numbers: three tensors of what is turned, or it and the whole; backward beside another whole.

    Less the mix, which is not saved yet, or no longer. Else the gradients of the mix, q, k and v are the most.
    """
    heads = 21 * (6 + 2)
    gradients = (MIXED + Q + K + V) * w
    for turned, forward, backward in ((2, 5 + 2, 0), (4, 3 * 4, 5 + 3 * 4)):
        part = replace(ATTENTION, positions=Rotary(d_rotary=turned))
        found = memory(part).room(replace(RUN, width=w))
        most = max(gradients, (heads * backward - MIXED) * w)
        assert found == ((heads * forward - MIXED) * w, most, heads * forward * w, 0)
        assert (most > gradients) == (turned == 4)


@WIDTHS
@pytest.mark.parametrize(("turned", "most"), [(2, 5 + 2), (4, 3 * 4)])
def test_training_room_of_turning_a_part_after_norms(w: int, turned: int, most: int) -> None:
    """Queries are turned before rotated keys are saved, then keys: where there are as many keys, these are the most."""
    norm = RMSNorm(d=5)
    for keys in (2, 6):
        part = replace(ATTENTION, n_kv_heads=keys, positions=Rotary(d_rotary=turned), q_norm=norm, k_norm=norm)
        found = memory(part).room(replace(RUN, width=w))
        turning = max(21 * 6 * most - 21 * keys * 5, 21 * keys * most)
        assert found is not None
        assert (found.forward, found.again) == ((turning - MIXED) * w, turning * w)


@WIDTHS
def test_room_of_norms_of_heads(w: int) -> None:
    """With a norm q and k are turned one after the other, and what was normed is there beside three of its size."""
    norm, rotary = RMSNorm(d=5), Rotary(d_rotary=4)
    both, one, other = {"q_norm": norm, "k_norm": norm}, {"q_norm": norm}, {"k_norm": norm}
    for norms in (both, one):
        assert room(replace(ATTENTION, positions=rotary, **norms), w) == (Q + K + V + 4 * Q) * w
    assert room(replace(ATTENTION, positions=rotary, **other), w) == (Q + K + V + 3 * Q) * w
    as_many = replace(ATTENTION, n_kv_heads=6, positions=rotary)
    for norms, keys in ((both, 4), (other, 4), (one, 3)):
        assert room(replace(as_many, **norms), w) == (3 * Q + Q + keys * Q) * w
    for norms in (both, one, other):  # not turned, the normed ones stay beside what is mixed
        least = max(SUMS * max(4, w), RESULT * w)
        assert room(replace(ATTENTION, **norms), w) == (Q + K + V + (Q + K) + MIXED) * w + least


@WIDTHS
def test_room_of_scores(w: int) -> None:
    """3 x 6 x 7 x 7 = 882 scores, once before and once after the softmax; narrow ones there twice in float32.

    After 4 tokens there are 7 x 11 for each head. To be capped they are there three times.
    """
    for past, scores in ((0, 882), (4, 1386)):
        softmax = scores * w + (2 * 4 * scores if w < 4 else scores * w + MIXED * w)
        for extra in ({}, {"softcap": 2.0}, {"sinks": True}):
            kernel = "fused" if extra else "reference"
            part = replace(ATTENTION, **extra)
            capping = 3 * scores * w if "softcap" in extra else 0
            assert room(part, w, past=past, kernel=kernel) == (Q + K + V) * w + max(softmax, capping)
            assert (capping > softmax) == ("softcap" in extra and w >= 4)
    engine = replace(ATTENTION, softcap=2.0, sinks=True)  # one kernel that keeps no scores
    assert room(engine, w, kernel="engine") == room(ATTENTION, w)
    turned = replace(ATTENTION, positions=Rotary(d_rotary=4))
    assert room(turned, w, past=4, kernel="reference") == (Q + K + V + Q + K) * w + (
        1386 * w + (2 * 4 * 1386 if w < 4 else 1386 * w + MIXED * w)
    )


@pytest.mark.parametrize("w", [4, 8])
def test_room_of_the_mask(w: int) -> None:
    """One head of one number: 7 x 13 scores twice, and as many bytes of a mask that is made in two steps."""
    one = Attention(d_model=1, n_heads=1, n_kv_heads=1, d_head=1)
    run = Pass(tokens=7, past=6, kernel="reference")
    assert room(one, w, run) == 3 * 7 * w + 2 * 91 * w + 2 * 91
    window = replace(one, window=5)  # five keys are kept, and the new ones are laid after them
    assert room(window, w, run) == 3 * 7 * w + 2 * 7 * 12 * w + 2 * 7 * 12
    wide = replace(one, window=7)  # as wide as the text: causal is enough
    assert room(wide, w, Pass(tokens=7, kernel="reference")) == 3 * 7 * w + 2 * 49 * w + 2 * 49
    ahead = replace(one, causal=False)  # nothing is masked: the probabilities and what they mix
    assert room(ahead, w, run) == 3 * 7 * w + 2 * 91 * w + 7 * w
    alone = Pass(tokens=1, past=8, kernel="reference")  # a single query sees all that is there
    assert room(one, w, alone) == 3 * w + 2 * 9 * w + w
    chunk = replace(one, chunk=9)  # but not where its run of 9 may begin after some of it
    assert room(chunk, w, alone) == 3 * w + 2 * 9 * w + 2 * 9
    images = Pass(tokens=7, batch=3, images=1, mutual=4, kernel="reference")  # a mask for each text
    assert room(one, w, images) == 3 * 21 * w + 2 * 3 * 49 * w + 2 * 3 * 49


MASKS = Attention(d_model=3, n_heads=5, n_kv_heads=1, d_head=2)  # 21 rows: q 210, k and v 42


@WIDTHS
def test_room_of_making_masks(w: int) -> None:
    """Beside q, k and v: two bytes of a pair, of which one stays, and for strides two numbers in int64.

    See the measured peaks.
    """
    projected = (210 + 42 + 42) * w
    run = replace(RUN, width=w)
    assert AttentionMemory(MASKS).mask_peak(run)[1:] == (0, 0)
    assert AttentionMemory(replace(MASKS, window=7)).mask_peak(run)[1:] == (0, 0)
    for near, each in (
        (replace(MASKS, window=6), 1),
        (replace(MASKS, chunk=6), 1),
        (replace(MASKS, window=6, causal=False), 1),
        (replace(MASKS, stride=3), 8 + 8 + 1),
    ):
        assert AttentionMemory(near).mask_peak(run)[1:] == (49, projected + each * 49)
        assert AttentionMemory(near).mask_peak(replace(run, kernel="engine"))[1:] == (0, 0)
    after = replace(run, past=4)  # 7 x 11 pairs, of a window 7 x (4 + 7), of one of three 7 x (3 + 7)
    assert AttentionMemory(replace(MASKS, window=6)).mask_peak(after)[1:] == (77, projected + 77)
    assert AttentionMemory(replace(MASKS, window=3)).mask_peak(after)[1:] == (70, projected + 70)
    seen = replace(run, images=1, mutual=3)
    assert AttentionMemory(MASKS).mask_peak(seen)[1:] == (3 * 49, projected + 3 * 49)
    assert AttentionMemory(replace(MASKS, causal=False)).mask_peak(seen)[1:] == (0, 0)
    projection = replace(MASKS, positions=RelativeProjection(d_model=4, n_heads=5, d_head=2))
    made = 5 * 49 * (4 + (w if w < 4 else 0)) + 17 * 49
    assert AttentionMemory(projection).mask_peak(run)[1:] == (5 * 49 * w, projected + made)


@WIDTHS
@pytest.mark.parametrize("sees", [{}, {"causal": False}, {"window": 6}, {"window": 6, "causal": False}])
def test_room_of_making_slopes(w: int, sees: dict[str, Any]) -> None:
    """Distances (int64) twice, then times each head's slope in float32, then in the run's own width; see as above."""
    run = replace(RUN, width=w)
    for heads, float32, cast in ((1, 4 + 8 + 4 + 1, (4 + w) + 9), (5, 5 * 4 + 13, 5 * (4 + w) + 9)):
        sloped = Attention(d_model=3, n_heads=heads, n_kv_heads=1, d_head=2, positions=Alibi(n_heads=heads))
        seeing = 8 + 8 + 1 + (sees == {"window": 6, "causal": False})
        most = max(seeing, float32, cast if w != 4 else 0)
        projected = 21 * 2 * (heads + 2) * w
        found = AttentionMemory(replace(sloped, **sees)).mask_peak(run)[1:]
        assert found == (heads * 49 * w, projected + 49 * (most - heads * w))


@WIDTHS
@pytest.mark.parametrize(("causal", "both_ways"), [(True, True), (True, False), (False, True), (False, False)])
def test_room_of_finding_buckets(w: int, causal: bool, both_ways: bool) -> None:
    """With one head finding the buckets takes most of it, with 31 looking their numbers up; see the measured peaks."""
    run, buckets = replace(RUN, width=w), RelativeBuckets(n_buckets=8, max_distance=16, both_ways=both_ways)
    one = Attention(d_model=3, n_heads=1, n_kv_heads=1, d_head=2, positions=buckets, causal=causal)
    finding = 46 + (8 if both_ways else 0) + (1 if causal else 0)
    assert AttentionMemory(one).mask_peak(run)[1:] == (49 * w, 3 * 42 * w + 49 * finding - 49 * w)
    many = replace(one, n_heads=31, n_kv_heads=1)
    looked_up = 31 * w * 2 + 10 if causal else 31 * w + 17
    assert AttentionMemory(many).mask_peak(run)[1:] == (31 * 49 * w, (31 + 2) * 42 * w + 49 * looked_up - 31 * 49 * w)


def test_layers_that_see_alike_share_a_mask() -> None:
    def name(**more: Any) -> str:  # noqa: ANN401  any field
        return AttentionMemory(replace(MASKS, **more)).mask_peak(RUN)[0]

    buckets = RelativeBuckets(n_buckets=8, max_distance=16, both_ways=True)
    unlike = [{}, {"window": 6}, {"window": 5}, {"chunk": 6}, {"causal": False}, {"positions": Alibi(n_heads=5)}]
    unlike += [{"positions": buckets}, {"positions": replace(buckets, max_distance=32)}]
    assert len({name(**more) for more in unlike}) == len(unlike)
    assert name(positions=Rotary(d_rotary=2)) == name()
    assert name(window=6, positions=Rotary(d_rotary=2)) == name(window=6)


# Latent attention, 21 rows of 3 heads: 3 x (2 + 5) numbers of a query, 5 of them turned; 7 + 5 are cached.
TURNED = {"positions": Rotary(d_rotary=4), "d_rope": 4}


@WIDTHS
def test_room_of_making_latent_queries(w: int) -> None:
    """One row of one token: what the maps down give, queries, a normed latent; or queries turned, thrice the turned.

    A norm of 211 widens a narrow input.
    """
    one = Pass(tokens=1, kernel="reference")
    norm = RMSNorm(d=211)
    # 3 x (2 + 4) numbers of a query, of which 12 are turned: each beside its products with cos and with sin
    turned = replace(LATENT, d_model=2, q_rank=211, **TURNED, kv_norm=RMSNorm(d=7))
    assert room(turned, w, one) == (7 + 4 + 211 + 18 + 3 * 12) * w
    # with 11 of 15 not turned all of a query, and what was turned, are put together
    apart = replace(turned, d_nope=11)
    assert room(apart, w, one) == (7 + 4 + 211 + 45 + 45 + 12) * w
    assert room(apart, w, replace(RUN, kernel="fused")) == 21 * (7 + 4 + 211 + 45 + 45 + 12) * w
    # the norm's result beside its input: as its queries are made, or as its narrow input is there once more
    normed = replace(apart, q_norm=norm)
    assert room(normed, w, one) == (7 + 4 + 211) * w + max((45 + 211) * w, 211 * (w + (4 if w < 4 else 0)))
    assert (45 * w < 211 * 4 and w < 4) == (w == 2)
    assert (
        room(replace(turned, q_rank=None, d_nope=1, d_rope=8, positions=Rotary(d_rotary=8)), w, one)
        == (7 + 8 + 27 + 3 * 24) * w
    )


@WIDTHS
def test_room_of_latents_that_are_kept(w: int) -> None:
    """Where the stream is wide the result decides: 2 x 3 mixed numbers and 503 beside 6 of a query and its latents.

    Latents of 7 and keys of 4, normed and turned; else both are views of what the maps down gave, with 13 of a query.
    """
    one = Pass(tokens=1)
    part = replace(LATENT, d_model=503, **TURNED, kv_norm=RMSNorm(d=7))
    above = 3 * (2 + 4) + 3 * 3 + 503
    assert room(part, w, one) == (7 + 4 + above) * w
    ranked = replace(part, q_rank=13)
    assert room(ranked, w, one) == (7 + 4 + above) * w
    assert room(replace(ranked, kv_norm=None), w, one) == (13 + 7 + 4 + 4 + above) * w
    assert room(replace(ranked, positions=None), w, one) == (13 + 7 + 4 + 7 + above) * w
    assert room(replace(ranked, kv_norm=None, positions=None), w, one) == (13 + 7 + 4 + above) * w
    assert room(ranked, w, replace(one, batch=3)) == 3 * (7 + 4 + above) * w


@WIDTHS
def test_room_of_expanding_latents(w: int) -> None:
    """Queries and latents of 21 rows; keys of 7 and values of 3 of 3 heads for all tokens; what comes out; a float32.

    The fused kernel takes one width: values of 3 are filled up to 7, or queries and keys of 7 to values of 11.
    """
    kept, sums = 21 * (21 + 12), 21 * 3 * max(4, w)
    for past, seen in ((0, 21), (4, 33)):
        keys_and_values = seen * 3 * (7 + 3)
        assert room(LATENT, w, past=past) == (kept + keys_and_values + seen * 3 * 7 + 21 * 3 * 7) * w + sums
        even = replace(LATENT, d_value=7)
        assert room(even, w, past=past) == (kept + seen * 3 * (7 + 7) + 21 * 3 * 7) * w + sums
        wide = replace(LATENT, d_value=11)
        filled = (seen + 21) * 3 * 11
        assert room(wide, w, past=past) == (kept + seen * 3 * (7 + 11) + filled + 21 * 3 * 11) * w + sums
    # 17 of 18 numbers of a key come of the latent, and are put beside the last: of many tokens the busiest moment
    apart = replace(LATENT, d_nope=17, d_rope=1, d_value=1)
    long = Pass(tokens=1, batch=3, kernel="reference")
    assert room(apart, w, long) == (3 * (54 + 8) + 9 * (18 + 17)) * w
    after = replace(RUN, tokens=2, batch=1, past=90)
    assert room(apart, w, after) == (2 * (54 + 8) + 92 * 3 * (18 + 1 + 18) + 2 * 3 * 18) * w + 2 * 3 * max(4, w)


@WIDTHS
def test_room_of_latent_scores(w: int) -> None:
    """9 x 7 x 7 = 441 scores of 3 texts and 3 heads: twice, with the mask or what is mixed; narrow ones in float32."""
    kept = 21 * (21 + 12)
    for past, seen, scores in ((0, 21, 441), (4, 33, 693)):
        softmax = scores * w + (2 * 4 * scores if w < 4 else scores * w)
        mixing = 2 * scores * w + 21 * 3 * 3 * w
        largest = softmax if w < 4 else mixing
        found = room(LATENT, w, past=past, kernel="reference")
        assert found == (kept + seen * 3 * (7 + 3)) * w + largest
        assert largest == max(softmax, mixing)
    # one head of values of one number: 7 x 7 twice, and twice as many bytes of the mask, outweigh 7 x 1
    one = replace(LATENT, n_heads=1, d_value=1)
    masking = max(2 * 49 * w + 2 * 49, 49 * w + 8 * 49 if w < 4 else 0)
    assert room(one, w, Pass(tokens=7, kernel="reference")) == (7 * (7 + 12) + 7 * (7 + 1)) * w + masking
    two = room(one, w, Pass(tokens=2, kernel="reference"))
    scores = max(2 * 4 * w + 2 * 4, 2 * 4 * w + 2 * w, 4 * w + 8 * 4 if w < 4 else 0)
    assert two == (2 * (7 + 12) + 2 * (7 + 1)) * w + scores
    alone = room(one, w, Pass(tokens=1, batch=3, past=0, kernel="reference"))  # nothing is masked for a single token
    assert alone == (3 * (7 + 12) + 3 * (7 + 1)) * w + max((2 * 3 + 3) * w, 3 * w + 8 * 3 if w < 4 else 0)


@WIDTHS
@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_room_of_absorbed_latents(w: int, kernel: Any) -> None:  # noqa: ANN401
    """One token after 4, of 3 texts and 3 heads: queries as wide as the latent, 12, twice; 7 mixed; 45 scores."""
    run = Pass(tokens=1, past=4, batch=3, kernel=kernel)
    softmax = 45 * w + (8 * 45 if w < 4 else 45 * w)
    assert room(LATENT, w, run) == (3 * (21 + 12) + 9 * (2 * 12 + 7)) * w + softmax


@WIDTHS
def test_room_of_cross_attention(w: int) -> None:
    """21 rows of 15 look at 3 x 17 of the source; 21 x 3 x 17 scores twice, narrow ones there twice in float32 too."""
    scores = 21 * 3 * 17 * (2 * w + (2 * 4 if w < 4 else 0))
    assert room(CROSS, w, source=17, kernel="reference") == (315 + 2 * 3 * 17 * 15) * w + scores + 231 * w
    assert room(CROSS, w, source=17) == (315 + 2 * 3 * 17 * 15 + 315 + 231) * w
    assert room(CROSS, w, past=6) == (315 + 2 * 3 * 13 * 15 + 315 + 231) * w  # as long as the text by then
    assert room(CROSS, w, source=1, kernel="reference") == (315 + 2 * 3 * 15 + 315 + 231) * w + (
        (63 * 12 - 315 * 2) if w < 4 else max(0, 63 * 2 * w - 315 * w)
    )


@WIDTHS
def test_room_of_feed_forwards(w: int) -> None:
    """The activation's input and output, quick_gelu's product too, or its output and the result."""
    wide: dict[str, Any] = {"d_model": 11, "d_ff": 29}
    narrow: dict[str, Any] = {"d_model": 29, "d_ff": 11}
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        assert room(MLP(**wide, activation=activation), w) == 21 * (29 + 29) * w
        assert room(MLP(**narrow, activation=activation), w) == 21 * (11 + 29) * w
        assert room(GatedMLP(**wide, activation=activation), w) == 21 * (3 * 29 + 11) * w
    assert room(MLP(**wide, activation="quick_gelu"), w) == 21 * 3 * 29 * w
    assert room(MLP(**narrow, activation="quick_gelu"), w) == 21 * (11 + 29) * w
    assert room(MLP(d_model=13, d_ff=11, activation="quick_gelu"), w) == 21 * 3 * 11 * w


@WIDTHS
def test_room_of_a_router(w: int) -> None:
    """21 rows: 8 logits, as many scores in float32, once more corrected and once more of groups; 3 chosen, int64."""
    wide = max(4, w)
    groups = ExpertGroups(n_groups=4, top_groups=2)
    for correction, grouped, choosing in ((False, None, 0), (True, None, 1), (False, groups, 1), (True, groups, 2)):
        part = replace(ROUTER, correction=correction, groups=grouped)
        assert room(part, w) == 21 * (8 * (w + wide * (1 + choosing)) + 3 * (wide + 8))


@WIDTHS
def test_room_of_experts(w: int) -> None:
    """63 rows sorted by expert, for each 24 bytes and a weight; then rows, gate and product, or all three and results.

    A row is 5 numbers, and 13 inside.
    """
    chosen = 63 * (24 + w)
    assert room(EXPERTS, w) == chosen + 63 * (2 * 5 + 3 * 13) * w
    plain = replace(EXPERTS, gating="none")
    assert room(plain, w) == chosen + 63 * (5 + 2 * 13) * w
    clamped = replace(EXPERTS, gating=ClampedGate(alpha=1.7, limit=7.0))
    assert room(clamped, w) == chosen + 63 * (5 + 5 * 13) * w
    # of 11 numbers and 5 inside: 2 x 11 + 3 x 5 are more than 11 + 5 x 5, and than 3 x 11 and a third of 11
    wide = replace(clamped, d_model=11, d_ff=5, router=replace(ROUTER, d_model=11))
    assert room(wide, w) == chosen + 63 * (2 * 11 + 3 * 5) * w
    # what is narrow inside: sorted rows, results as sorted and in order or weighted, and their sum
    for narrow in (replace(EXPERTS, d_ff=1), replace(plain, d_ff=1), replace(clamped, d_ff=1)):
        assert room(narrow, w) == chosen + (63 * 3 * 5 + 105) * w
        assert room(replace(narrow, weighs="inputs"), w) == chosen + 63 * 3 * 5 * w


@WIDTHS
def test_room_of_many_experts(w: int) -> None:
    """211 experts one number wide: the router's; with a capacity a byte and two int64 for each row and expert."""
    router = replace(ROUTER, n_experts=211)
    many = replace(EXPERTS, n_experts=211, router=router, d_ff=1)
    routed = 21 * (211 * (w + max(4, w)) + 3 * (max(4, w) + 8))
    assert room(router, w) == routed
    assert room(many, w) == routed
    assert room(replace(many, capacity=2), w) == 63 * (24 + w) + (1 + 8 + 8) * 63 * 211


@WIDTHS
def test_room_of_a_shared_expert(w: int) -> None:
    """The experts' result beside the shared one's own room, where that is more than theirs."""
    shared = replace(EXPERTS, shared=GatedMLP(d_model=5, d_ff=401, activation="silu"))
    assert room(shared, w) == 21 * 5 * w + 21 * (3 * 401 + 5) * w
    assert room(replace(EXPERTS, shared=MLP(d_model=5, d_ff=1, activation="relu")), w) == room(EXPERTS, w)


@WIDTHS
def test_room_of_norms(w: int) -> None:
    """The result; an RMSNorm widens its narrow input."""
    assert room(RMSNorm(d=5), w) == 105 * (w + (4 if w < 4 else 0))
    assert room(LayerNorm(d=5), w) == 105 * w


@WIDTHS
def test_room_of_tables_and_heads(w: int) -> None:
    """Of 21 rows of 5 numbers, by tables of 3, over 13 tokens."""
    assert room(TokenEmbedding(n_vocab=13, d_model=5), w) == 105 * w
    assert room(TokenEmbedding(n_vocab=13, d_model=5, d_table=3), w) == (105 + 63) * w
    assert room(SharedEmbedding(n_vocab=13, d_model=5), w) == 105 * w
    assert room(TypeEmbedding(n_types=2, d_model=5), w) == 105 * w
    assert room(LearnedPositions(n_positions=16, d_model=5), w) == 0
    assert room(BiasTable(n_buckets=8, n_heads=3), w) == 0
    assert room(Rotary(d_rotary=4), w) == 2 * 7 * 4 * w  # cos and sin of 7 positions
    for kind in (Head, TiedHead):
        head = kind(d_model=5, n_vocab=13)
        logits = 21 * 13
        assert room(head, w) == room(replace(head, bias=True), w) == logits * w
        assert room(replace(head, d_table=3), w) == (63 + logits) * w
        for again in ({"scale": 0.5}, {"shift": True}, {"scale": 0.5, "shift": True}):
            assert room(replace(head, **again), w) == 2 * logits * w
        assert room(replace(head, softcap=2.0, scale=0.5), w) == 3 * logits * w
        transform = HeadTransform(d_model=5, activation="gelu")
        assert room(replace(head, transform=transform), w) == (105 + logits) * w
        assert room(replace(head, transform=transform, n_vocab=2), w) == 2 * 105 * w
    assert room(HeadTransform(d_model=5, activation="gelu"), w) == 2 * 105 * w
    assert room(Pooler(d_model=5), w, logits="pooled") == 2 * 105 * w
    assert room(Pooler(d_model=5), w) == 2 * 105 * w


@WIDTHS
def test_room_of_patches_and_what_reads_them(w: int) -> None:
    """3 images of 2 x 2 patches of 2 x 3 x 3 = 18 numbers, to vectors of 5 or of 23."""
    patches = PatchEmbedding(image_size=7, patch_size=3, channels=2, d_model=5)
    assert room(patches, w) == 3 * 4 * (18 + 5) * w
    wide = replace(patches, d_model=23)
    assert room(wide, w) == 3 * 4 * (23 + 18) * w
    for where in ("first", "last"):  # once more, with the class token
        assert room(replace(patches, class_token=where), w) == 3 * 4 * (5 + 18) * w
        assert room(replace(wide, class_token=where), w) == 3 * (4 * 23 + 5 * 23) * w
    assert room(replace(wide, class_token="first", n_registers=3), w) == 3 * (4 * 23 + 8 * 23) * w
    assert room(Classifier(d_model=5, n_labels=11), w) == 21 * 11 * w
    pooled = Classifier(d_model=5, n_labels=11, transform=Pooler(d_model=5))
    assert room(pooled, w) == (105 + 21 * 11) * w
    assert room(replace(pooled, n_labels=2), w) == 2 * 105 * w
    assert room(Projection(d_model=5, d_out=11), w) == 21 * 11 * w
    # 12 tokens are 3 squares of 2 x 2: 9 vectors
    merged = MLPProjector(widths=(20, 7, 11), activation="gelu", merge=2)
    assert room(merged, w, tokens=12) == 3 * 3 * (20 + 7) * w
    assert room(replace(merged, widths=(20, 23, 11)), w, tokens=12) == 3 * 3 * (23 + 23) * w
    assert room(replace(merged, widths=(20, 7, 29)), w, tokens=12) == 3 * 3 * (29 + 29) * w
    assert room(replace(merged, widths=(20, 7), merge=1), w) == 21 * (20 + 7) * w
    # 5 x 5 patches are 2 x 2 means: means, normed, and what their norm takes
    pooled = PooledProjector(d_in=5, d_out=11, n_side=5, pool=2, norm=RMSNorm(d=5))
    assert room(pooled, w, tokens=25) == 3 * 4 * (2 * 5 + 11) * w + 3 * 4 * 5 * (w + (4 if w < 4 else 0))


NORM = LayerNorm(d=11)


@WIDTHS
def test_room_of_side_by_side(w: int) -> None:
    """Attention; its result of 231 beside the feed-forward; or both results and their sum."""
    own = 231 * w
    attention = replace(ATTENTION, positions=Rotary(d_rotary=4))  # 1050 + 3 x 840 numbers
    both = Parallel(attention=attention, ffn=MLP(d_model=11, d_ff=2, activation="relu"))
    assert room(both, w) == (1050 + 2520) * w
    busy = replace(both, ffn=GatedMLP(d_model=11, d_ff=101, activation="silu"))
    assert room(busy, w) == own + 21 * (3 * 101 + 11) * w
    little = Attention(d_model=11, n_heads=1, n_kv_heads=1, d_head=1)
    assert room(replace(both, attention=little), w) == 3 * own


@WIDTHS
def test_room_of_branches_and_blocks(w: int) -> None:
    """What is normed, 231 numbers, stays beside the body; the sum is beside what is added; norms after have the sum."""
    own = 231 * w
    body = GatedMLP(d_model=11, d_ff=13, activation="silu")
    inside = 21 * (3 * 13 + 11) * w
    branch = Branch(name="x", body=body)
    assert room(branch, w) == inside
    assert room(replace(branch, norm=NORM), w) == own + inside
    for after in ("post_norm", "sum_norm"):
        assert room(replace(branch, **{after: NORM}), w) == inside
    thin = Branch(name="y", body=MLP(d_model=11, d_ff=1, activation="relu"))  # 21 x 12
    assert room(thin, w) == 2 * own
    rms = RMSNorm(d=11)
    widened = 231 * (w + (4 if w < 4 else 0))
    assert room(replace(thin, norm=rms), w) == max(own + 21 * 12 * w, widened)
    for after in ("post_norm", "sum_norm"):
        assert room(replace(thin, **{after: rms}), w) == own + widened
    # the second branch's stream is there beside the block's
    assert room(Block(branches=(branch,)), w) == inside
    assert room(Block(branches=(branch, thin)), w) == inside
    assert room(Block(branches=(thin, branch)), w) == inside + own
    assert room(Block(branches=(branch, replace(branch, name="z"))), w) == inside + own


# A model of 21 rows of 11: the stream is 231 numbers, positions 7 int64.
INSIDE = 21 * (3 * 13 + 11)
HEADED: dict[str, Any] = {"n_vocab": 211, "d_model": 11}


@WIDTHS
def test_room_of_a_model(w: int) -> None:
    """7 positions in int64, the stream, and the busiest of embedding, blocks, norm, and head with what it reads."""
    base = 7 * 8 + 231 * w
    assert room(MODEL, w) == base + INSIDE * w
    headed = replace(MODEL, embedding=TokenEmbedding(**HEADED), head=Head(**HEADED))
    assert room(headed, w) == base + 21 * 211 * w
    normed = replace(headed, norm=RMSNorm(d=11))
    assert room(normed, w) == base + (231 + 21 * 211) * w
    assert room(normed, w, logits="last") == base + INSIDE * w  # 3 rows alone
    table = MODEL.changed(embedding=TokenEmbedding(n_vocab=5, d_model=11, d_table=97), head=None)
    assert room(table, w) == base + 21 * (11 + 97) * w
    thin = replace(
        MODEL, blocks=(Block(branches=(Branch(name="x", body=MLP(d_model=11, d_ff=1, activation="relu")),)),)
    )
    widened = 231 * (w + (4 if w < 4 else 0))
    assert room(thin, w) == base + 2 * 231 * w
    assert room(thin.changed(head=None, norm=RMSNorm(d=11)), w) == base + max(widened, 2 * 231 * w)
    assert room(replace(thin, norm=RMSNorm(d=11)), w) == base + max(widened, 2 * 231 * w)


@WIDTHS
def test_room_of_a_model_that_stops_early(w: int) -> None:
    """Of two blocks the second is busier; one deep it does not run."""
    busy = Block(branches=(Branch(name="ffn", body=GatedMLP(d_model=11, d_ff=17, activation="silu")),))
    two = replace(MODEL, blocks=(FFN, busy))
    assert room(two, w) == 56 + 231 * w + 21 * (3 * 17 + 11) * w
    assert room(two, w, depth=1) == room(MODEL, w)
    assert room(two, w, depth=0) == 56 + 231 * w + 231 * w  # the embedding's


@WIDTHS
def test_room_of_a_pooled_pass(w: int) -> None:
    """The pooler runs on 3 rows in place of the head."""
    headed = MODEL.changed(embedding=TokenEmbedding(**HEADED), head=Head(**HEADED), pooler=Pooler(d_model=11))
    assert room(headed, w, logits="pooled") == 56 + 231 * w + INSIDE * w
    one = Pass(tokens=1, batch=3)
    thin = replace(
        headed,
        norm=LayerNorm(d=11),
        blocks=(Block(branches=(Branch(name="x", body=MLP(d_model=11, d_ff=1, activation="relu")),)),),
    )
    assert room(thin, w, one, logits="pooled") == 8 + 33 * w + (33 + 2 * 33) * w


@WIDTHS
def test_room_of_tables_and_masks_that_stay(w: int) -> None:
    """Tables of cos and sin and masks, once for layers that are alike; making the largest may be the busiest moment."""

    def stack(*bodies: Attention) -> Model:
        blocks = tuple(Block(branches=(Branch(name="attention", body=body),)) for body in bodies)
        return MODEL.changed(blocks=blocks, head=None)

    wide = replace(ATTENTION, d_model=11)
    attending = (Q + K + V + MIXED) * w + max(SUMS * max(4, w), RESULT * w)
    assert room(stack(wide), w) == 56 + 231 * w + attending
    for rotaries, tables in (((4,), 4), ((4, 4), 4), ((4, 2), 6)):
        turned = [replace(wide, positions=Rotary(d_rotary=d)) for d in rotaries]
        assert room(stack(*turned), w) == 56 + 231 * w + (1050 + 3 * 840) * w + 2 * 7 * tables * w
    near, nearer = replace(wide, window=6), replace(wide, window=5)
    for bodies, masks in (((near,), 1), ((near, near), 1), ((near, nearer), 2), ((near, wide), 1)):
        making = 231 * w + 1050 * w + 49
        with_mask = (Q + K + V + MIXED) * w + max(SUMS * max(4, w) + 49 * w, RESULT * w)
        assert room(stack(*bodies), w) == 56 + 231 * w + masks * 49 + max(with_mask, making)
        assert with_mask > making
    # one head of one number: 7 x 7 pairs take more to make than all else, but where numbers are wide
    tiny = Attention(d_model=11, n_heads=1, n_kv_heads=1, d_head=1, stride=3)
    making = 231 * w + 3 * 21 * w + 17 * 49
    assert room(stack(tiny), w) == 56 + 231 * w + 49 + max(making, 2 * 231 * w)
    # of two masks the one that takes more is what counts: slopes, 7 x 7 numbers and 17 bytes of each pair
    sloped = replace(tiny, stride=None, positions=Alibi(n_heads=1))
    making = 231 * w + 3 * 21 * w + 49 * ((17 if w <= 4 else 21) - w)
    assert room(stack(tiny, sloped), w) == room(stack(sloped, tiny), w)
    assert room(stack(tiny, sloped), w) == 56 + 231 * w + 49 + 49 * w + max(
        making, 231 * w + 63 * w + 17 * 49, 2 * 231 * w
    )


@WIDTHS
def test_room_of_an_encoder(w: int) -> None:
    """It runs before: alone, or what it made, 3 x 13 x 7 numbers, beside all that comes after."""
    encoder = TextEncoder(
        embedding=TokenEmbedding(n_vocab=5, d_model=7),
        blocks=(Block(branches=(Branch(name="ffn", body=GatedMLP(d_model=7, d_ff=3, activation="silu")),)),),
        max_positions=16,
    )
    both = MODEL.changed(encoder=encoder)
    alone = 13 * 8 + 3 * 13 * 7 * w + 3 * 13 * (3 * 3 + 7) * w
    assert room(encoder, w, tokens=13) == alone
    after = 56 + 231 * w + INSIDE * w
    assert room(both, w, source=13) == 3 * 13 * 7 * w + after
    assert room(both, w, source=13, past=1) == after  # it has been read
    busy = Block(branches=(Branch(name="ffn", body=GatedMLP(d_model=7, d_ff=101, activation="silu")),))
    assert room(replace(both, encoder=replace(encoder, blocks=(busy,))), w, source=13) == (
        13 * 8 + 3 * 13 * 7 * w + 3 * 13 * (3 * 101 + 7) * w
    )


@WIDTHS
def test_room_of_images(w: int) -> None:
    """3 texts of 2 images each: 6 of 5 tokens of 7. The tower; what is selected, twice, while it is projected to 11."""
    projector = MLPProjector(widths=(7, 11), activation="gelu")
    seen = Vision(tower=tower(3), projector=projector, placeholder=1)
    run = replace(RUN, images=2)
    inside = 5 * 8 + 6 * 5 * 7 * w + 6 * 5 * (3 * 3 + 7) * w  # the tower's own
    patches = 5 * 8 + 6 * 5 * 7 * w + 6 * (4 * 7 + max(4 * 12, 5 * 7)) * w
    projecting = 2 * 6 * 4 * 7 * w + 6 * 4 * (11 + 11) * w
    of_images = replace(run, batch=6, tokens=7)
    assert room(seen, w, of_images) == max(inside, patches, projecting) == projecting
    whole = MODEL.changed(vision=seen)
    after = 56 + 231 * w + INSIDE * w
    assert room(whole, w, run) == 6 * 4 * 11 * w + after  # what the images became stays
    assert room(whole, w) == after  # no image
    kept = replace(seen, keep_class=True)
    assert room(kept, w, of_images) == (2 * 6 * 5 * 7 + 6 * 5 * 22) * w
    assert room(replace(whole, vision=kept), w, run) == 6 * 5 * 11 * w + after
    busy = 5 * 8 + 6 * 5 * 7 * w + 6 * 5 * (3 * 401 + 7) * w
    heavy = replace(seen, tower=tower(401))
    assert room(heavy, w, of_images) == busy
    assert room(replace(whole, vision=heavy), w, run) == busy
    assert room(replace(heavy, layers=0), w, of_images) == max(projecting, patches)


@WIDTHS
def test_room_of_vectors_that_are_compared(w: int) -> None:
    """2 images for each of 3 texts: 9 vectors of 97, three times; or the tower's."""
    projected = tower(3, head=Projection(d_model=7, d_out=97))
    pair = Contrast(tower=projected)
    run = replace(RUN, batch=6, images=2)
    assert room(pair, w, run) == 3 * (6 + 3) * 97 * w
    small = Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2)))
    patches = 5 * 8 + 6 * 5 * 7 * w + 6 * (4 * 7 + 4 * 12) * w
    inside = 5 * 8 + 6 * 5 * 7 * w + 6 * 5 * (3 * 3 + 7) * w
    assert room(small, w, run) == max(patches, inside)
    text = MODEL.changed(head=Projection(d_model=11, d_out=97), vision=pair)
    after = 56 + 231 * w + INSIDE * w
    assert room(text, w, images=2) == max(3 * 9 * 97 * w, after)
