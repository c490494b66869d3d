"""Every check of a field: what lies just outside is refused by the field's name, what lies just inside is taken."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
from small_parts import ATTENTION, CROSS, EXPERTS, LATENT, MODEL, ROUTER, tower

from asbuilt.errors import InputError
from asbuilt.spec import (
    MLP,
    AdaptiveEmbedding,
    AdaptiveHead,
    Alibi,
    BiasTable,
    Block,
    Branch,
    CentredConvolution,
    Centres,
    ClampedGate,
    Classifier,
    ClusterHead,
    Contrast,
    Disentangled,
    DistanceTable,
    DynamicNTK,
    EmbeddingProjection,
    ExpertGroups,
    FrequencyFactors,
    Head,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    Linear,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Lora,
    MLPProjector,
    Model,
    Parallel,
    Part,
    PatchEmbedding,
    PooledProjector,
    Pooler,
    Predictor,
    Projection,
    QueryTemperature,
    RelativeBuckets,
    RelativeProjection,
    RMSNorm,
    Rotary,
    ScoreBiases,
    SharedEmbedding,
    SharedHead,
    Sinusoids,
    TiedHead,
    TokenCluster,
    TokenEmbedding,
    TypeEmbedding,
    Vision,
    YaRN,
)
from asbuilt.spec.part import LARGEST_SIZE, MOST_BLOCKS, is_finite
from asbuilt.spec.whole import WHOLES

BUCKETS = RelativeBuckets(n_buckets=8, max_distance=16, both_ways=False)
EMBEDDED = Disentangled(span=4, max_distance=9)
EMBEDDING_DISTANCES = replace(ATTENTION, n_kv_heads=6, causal=False, positions=EMBEDDED)
DISTANCES = RelativeProjection(d_model=4, n_heads=6, d_head=5)
VECTORS = ScoreBiases(n_heads=6, d_head=5)
MEMORY = replace(ATTENTION, caches_input=True)
CLUSTERS = tuple(TokenCluster(n_vocab=n, d_model=11, d_table=width) for n, width in ((2, 4), (3, 2)))
IN_CLUSTERS = AdaptiveEmbedding(clusters=CLUSTERS)
OF_CLUSTERS = tuple(
    ClusterHead(d_model=11, n_vocab=n, d_table=width, cluster=i, n_clusters=1 - i)
    for i, (n, width) in enumerate(((2, 4), (3, 2)))
)
ADAPTIVE = AdaptiveHead(clusters=OF_CLUSTERS)
TIED = tuple(replace(one, tied=True, tied_map=True) for one in OF_CLUSTERS)
YARN = YaRN(factor=4.0, original_context=64)
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
LONG = LongRope(short_factors=(1.0, 1.0), long_factors=(2.0, 3.0), original_context=64, attention_factor=1.0)
TURNED = replace(ATTENTION, positions=Rotary(d_rotary=4))
BODY = MLP(d_model=11, d_ff=13, activation="relu")
BRANCH = Branch(name="ffn", body=BODY)
OTHER = Branch(name="ffn", body=replace(BODY, d_model=5))
HEAD = Head(d_model=11, n_vocab=5)
PATCHES = PatchEmbedding(image_size=7, patch_size=3, d_model=5)
REGISTERS = ((-1, "first"), (1.0, "first"), (True, "first"), (2, "none"), (2, "last"))
PROJECTOR = MLPProjector(widths=(20, 11), activation="gelu", merge=2)
POOLED = PooledProjector(d_in=5, d_out=11, n_side=5, pool=2, norm=RMSNorm(d=5))
SEEN = Vision(tower=tower(3), projector=MLPProjector(widths=(7, 11), activation="gelu"), placeholder=1)
PLAIN_TOWER = replace(tower(3), embedding=replace(tower(3).embedding, class_token="none"), max_positions=4)
TEXT = MODEL.changed(vision=SEEN)
EMBEDDING = TokenEmbedding(n_vocab=5, d_model=11)
PREDICTOR = Predictor(
    embedding=EMBEDDING,
    token_norm=RMSNorm(d=11),
    stream_norm=RMSNorm(d=11),
    block=MODEL.blocks[0],
    norm=RMSNorm(d=11),
    head=HEAD,
)
READ = MODEL.changed(head=None)  # what an encoder is
TRANSLATOR = MODEL.changed(encoder=READ)
NARROW = replace(READ, embedding=TokenEmbedding(n_vocab=5, d_model=7), blocks=tower(3).blocks)
SHARED = replace(READ, embedding=SharedEmbedding(n_vocab=5, d_model=11))


def stack(*bodies: Any) -> tuple[Block, ...]:  # noqa: ANN401  bodies of branches
    return tuple(Block(branches=(Branch(name="x", body=body),)) for body in bodies)


def altered(part: Part, changes: dict[str, Any]) -> Part:
    """The part with fields changed; a model as the whole that they then describe."""
    return part.changed(**changes) if isinstance(part, Model) else replace(part, **changes)


# A part, what of it is replaced, and the field that the message names.
REFUSED: list[tuple[Part, dict[str, Any], str]] = [
    (ATTENTION, {"n_kv_heads": 4}, "n_kv_heads"),
    (ATTENTION, {"window": 0}, "window"),
    (ATTENTION, {"chunk": 0}, "chunk"),
    (ATTENTION, {"window": 3, "chunk": 3}, "chunk"),
    (ATTENTION, {"chunk": 3, "causal": False}, "chunk"),
    (ATTENTION, {"stride": 1}, "stride"),
    (ATTENTION, {"stride": 3, "causal": False}, "stride"),
    (ATTENTION, {"stride": 3, "chunk": 3}, "stride"),
    (ATTENTION, {"positions": DISTANCES, "stride": 3}, "positions"),
    (ATTENTION, {"summary": 2}, "summary"),
    (ATTENTION, {"summary": 3, "chunk": 3}, "summary"),
    (ATTENTION, {"summary": 0, "chunk": 3}, "summary"),
    (ATTENTION, {"summary": 2, "window": 3}, "summary"),
    (ATTENTION, {"rotate_first": True}, "rotate_first"),
    (TURNED, {"rotate_first": True}, "rotate_first"),
    (ATTENTION, {"rotate_first": True, "q_norm": RMSNorm(d=5)}, "rotate_first"),
    (TURNED, {"rotate_first": True, "q_norm": RMSNorm(d=5, gain="none")}, "rotate_first"),
    (ATTENTION, {"softcap": 0.0}, "softcap"),
    (ATTENTION, {"scale": 0.0}, "scale"),
    (ATTENTION, {"positions": Rotary(d_rotary=6)}, "positions"),
    (ATTENTION, {"positions": Alibi(n_heads=5)}, "positions"),
    (ATTENTION, {"positions": replace(DISTANCES, n_heads=5)}, "positions"),
    (ATTENTION, {"positions": replace(DISTANCES, d_head=4)}, "positions"),
    (ATTENTION, {"positions": DISTANCES, "causal": False}, "positions"),
    (ATTENTION, {"positions": EMBEDDED, "n_kv_heads": 6}, "positions"),
    (ATTENTION, {"positions": EMBEDDED, "causal": False}, "n_kv_heads"),
    (EMBEDDING_DISTANCES, {"window": 3}, "positions"),
    (EMBEDDING_DISTANCES, {"q_norm": RMSNorm(d=5)}, "q_norm"),
    (EMBEDDING_DISTANCES, {"k_norm": RMSNorm(d=5)}, "k_norm"),
    (EMBEDDING_DISTANCES, {"temperature": QueryTemperature(scale=1.0, floor=8)}, "temperature"),
    (EMBEDDING_DISTANCES, {"kv_from": "early"}, "kv_from"),
    (EMBEDDED, {"span": 0}, "span"),
    (EMBEDDED, {"to_keys": False, "to_queries": False}, "to_queries"),
    (EMBEDDED, {"max_distance": 3}, "max_distance"),
    (Disentangled(span=1), {"max_distance": 9}, "max_distance"),
    (DistanceTable(n_rows=8, d_model=11), {"n_rows": 0}, "n_rows"),
    (DistanceTable(n_rows=8, d_model=11), {"eps": 0.0}, "eps"),
    (ATTENTION, {"positions": DISTANCES, "window": 3}, "positions"),
    (ATTENTION, {"positions": replace(DISTANCES, window=3)}, "positions"),
    (ATTENTION, {"positions": replace(DISTANCES, window=3), "window": 4}, "positions"),
    (ATTENTION, {"positions": DISTANCES, "chunk": 3}, "positions"),
    (MEMORY, {"causal": False}, "caches_input"),
    (MEMORY, {"cached": False}, "caches_input"),
    (MEMORY, {"positions": Rotary(d_rotary=4)}, "positions"),
    (MEMORY, {"k_norm": RMSNorm(d=5)}, "k_norm"),
    (MEMORY, {"v_norm": RMSNorm(d=5)}, "v_norm"),
    (MEMORY, {"kv_name": "early"}, "kv_name"),
    (MEMORY, {"kv_from": "early"}, "kv_from"),
    (ATTENTION, {"q_norm": RMSNorm(d=10)}, "q_norm"),
    (ATTENTION, {"k_norm": RMSNorm(d=30)}, "k_norm"),
    (LATENT, {"q_norm": RMSNorm(d=13)}, "q_norm"),
    (LATENT, {"q_norm": RMSNorm(d=12), "q_rank": 13}, "q_norm"),
    (LATENT, {"q_rank": 0}, "q_rank"),
    (LATENT, {"kv_rank": 0}, "kv_rank"),
    (LATENT, {"d_nope": 0}, "d_nope"),
    (LATENT, {"d_rope": 0}, "d_rope"),
    (LATENT, {"d_value": 0}, "d_value"),
    (LATENT, {"d_model": 0}, "d_model"),
    (LATENT, {"n_heads": 0}, "n_heads"),
    (LATENT, {"kv_norm": RMSNorm(d=8)}, "kv_norm"),
    (LATENT, {"positions": Rotary(d_rotary=4)}, "positions"),
    (LATENT, {"mscale": 1.0}, "mscale"),
    (replace(LATENT, d_rope=4), {"mscale": 1.0, "positions": Rotary(d_rotary=4)}, "mscale"),
    (replace(LATENT, d_rope=4), {"mscale": 0.0, "positions": Rotary(d_rotary=4, scaling=YARN)}, "mscale"),
    (CROSS, {"scale": 0.0}, "scale"),
    (CROSS, {"d_source": 0}, "d_source"),
    (ExpertGroups(n_groups=4, top_groups=2), {"top_groups": 4}, "top_groups"),
    (ROUTER, {"top_k": 9}, "top_k"),
    (ROUTER, {"eps": 0.5}, "eps"),
    (ROUTER, {"eps": -0.5, "renormalise": True}, "eps"),
    (ROUTER, {"scale": 0.0}, "scale"),
    (ROUTER, {"groups": ExpertGroups(n_groups=3, top_groups=2)}, "groups"),
    (ROUTER, {"groups": ExpertGroups(n_groups=16, top_groups=2)}, "groups"),
    (ROUTER, {"groups": ExpertGroups(n_groups=8, top_groups=4, score="two_best")}, "groups"),
    (ROUTER, {"groups": ExpertGroups(n_groups=4, top_groups=1)}, "top_k"),
    (EXPERTS, {"router": replace(ROUTER, d_model=6)}, "router"),
    (EXPERTS, {"router": replace(ROUTER, n_experts=7)}, "router"),
    (EXPERTS, {"gating": ClampedGate(alpha=1.0, limit=1.0), "activation": "gelu"}, "activation"),
    (EXPERTS, {"gating": "clamped"}, "gating"),
    (EXPERTS, {"capacity": 0}, "capacity"),
    (EXPERTS, {"capacity": 2, "weighs": "inputs"}, "capacity"),
    (EXPERTS, {"weighs": "both"}, "weighs"),
    (EXPERTS, {"shared": MLP(d_model=6, d_ff=7, activation="relu")}, "shared"),
    (EXPERTS, {"shared_gate": True}, "shared_gate"),
    (ClampedGate(alpha=1.0, limit=1.0), {"alpha": 0.0}, "alpha"),
    (ClampedGate(alpha=1.0, limit=1.0), {"limit": 0.0}, "limit"),
    (RMSNorm(d=5), {"eps": 0.0}, "eps"),
    (RMSNorm(d=5), {"gain": "bias"}, "gain"),
    (LayerNorm(d=5), {"eps": 0.0}, "eps"),
    (HeadTransform(d_model=5, activation="gelu"), {"eps": 0.0}, "eps"),
    (HeadTransform(d_model=5, activation="gelu"), {"d_out": 0}, "d_out"),
    (HeadTransform(d_model=5, activation="gelu"), {"d_out": 5}, "d_out"),
    (EmbeddingProjection(d_embedding=3, d_model=5), {"d_embedding": 0}, "d_embedding"),
    (EmbeddingProjection(d_embedding=3, d_model=5), {"d_embedding": 0}, "d_embedding"),
    (HeadTransform(d_model=5, activation="gelu"), {"activation": "tanh"}, "activation"),
    (LearnedPositions(n_positions=4, d_model=5), {"offset": -1}, "offset"),
    (LearnedPositions(n_positions=4, d_model=5), {"offset": LARGEST_SIZE + 1}, "offset"),
    (LearnedPositions(n_positions=4, d_model=5), {"offset": True}, "offset"),
    (Sinusoids(n_positions=4, d_model=5), {"theta": 0.0}, "theta"),
    (Sinusoids(n_positions=4, d_model=5), {"layout": "adjacent"}, "layout"),
    (LinearScaling(factor=2.0), {"factor": 0.0}, "factor"),
    (DynamicNTK(factor=2.0, original_context=64), {"factor": 0.0}, "factor"),
    (DynamicNTK(factor=2.0, original_context=64), {"original_context": 0}, "original_context"),
    *((YARN, {name: 0.0}, name) for name in ("factor", "beta_fast", "beta_slow", "attention_factor")),
    (YARN, {"original_context": 0}, "original_context"),
    (YARN, {"beta_fast": 0.5}, "beta_fast"),
    *((LLAMA3, {name: 0.0}, name) for name in ("factor", "low_freq_factor", "high_freq_factor")),
    (LLAMA3, {"original_context": 0}, "original_context"),
    (LLAMA3, {"high_freq_factor": 0.5}, "high_freq_factor"),
    *(
        (FrequencyFactors(factors=(1.0, 2.0)), {"factors": factors}, "factors")
        for factors in ((), (1.0, 0.0), (1.0, math.inf), (1, 2.0))
    ),
    *(
        (LONG, {name: factors}, name)
        for name in ("short_factors", "long_factors")
        for factors in ((), (1.0, 0.0), (1.0, math.inf), (1, 2.0), [1.0, 2.0])
    ),
    (LONG, {"original_context": 0}, "original_context"),
    (LONG, {"attention_factor": 0.0}, "attention_factor"),
    (LONG, {"long_attention_factor": 0.0}, "long_attention_factor"),
    (LONG, {"long_attention_factor": 1.0}, "long_attention_factor"),
    (Rotary(d_rotary=4), {"d_rotary": 3}, "d_rotary"),
    (Rotary(d_rotary=4), {"theta": 0.0}, "theta"),
    (Rotary(d_rotary=4), {"pairing": "interleaved"}, "pairing"),
    (Rotary(d_rotary=4), {"grid": 0}, "grid"),
    (Rotary(d_rotary=4), {"grid": 3, "d_rotary": 6}, "d_rotary"),
    (Rotary(d_rotary=4), {"grid": 3, "scaling": LinearScaling(factor=2.0)}, "scaling"),
    *(
        (Rotary(d_rotary=4), {"scaling": scaling}, "scaling")
        for scaling in (
            FrequencyFactors(factors=(1.0,)),
            FrequencyFactors(factors=(1.0, 1.0, 1.0)),
            replace(LONG, short_factors=(1.0,)),
            replace(LONG, long_factors=(1.0, 1.0, 1.0)),
        )
    ),
    (Rotary(d_rotary=4), {"scaling": YARN, "theta": 1.0}, "theta"),
    (Rotary(d_rotary=2), {"scaling": DynamicNTK(factor=2.0, original_context=64)}, "d_rotary"),
    (Alibi(n_heads=4), {"bias_max": 0.0}, "bias_max"),
    (QueryTemperature(scale=0.1, floor=8), {"scale": 0.0}, "scale"),
    (QueryTemperature(scale=0.1, floor=8), {"floor": 0}, "floor"),
    (QueryTemperature(scale=0.1, floor=8), {"from_zero": 1}, "from_zero"),
    (BUCKETS, {"n_buckets": 7}, "n_buckets"),
    (BUCKETS, {"n_buckets": 6, "both_ways": True}, "n_buckets"),
    (BUCKETS, {"max_distance": 4}, "max_distance"),
    (replace(BUCKETS, both_ways=True), {"max_distance": 2}, "max_distance"),
    (DISTANCES, {"d_model": 5}, "d_model"),
    (DISTANCES, {"n_heads": 0}, "n_heads"),
    (DISTANCES, {"window": 0}, "window"),
    (DISTANCES, {"max_distance": 0}, "max_distance"),
    (DISTANCES, {"biases": replace(VECTORS, n_heads=5)}, "biases"),
    (DISTANCES, {"biases": replace(VECTORS, d_head=4)}, "biases"),
    (VECTORS, {"n_heads": 0}, "n_heads"),
    (VECTORS, {"d_head": 0}, "d_head"),
    (VECTORS, {"weights_name": "a b"}, "weights_name"),
    (VECTORS, {"weights_from": "a.b"}, "weights_from"),
    (VECTORS, {"weights_name": "a", "weights_from": "b"}, "weights_name"),
    (CLUSTERS[0], {"n_vocab": 0}, "n_vocab"),
    (CLUSTERS[0], {"d_table": 0}, "d_table"),
    (CLUSTERS[0], {"d_model": 0}, "d_model"),
    (CLUSTERS[0], {"project": Linear(d_in=4, d_out=10, belongs="embedding")}, "project"),
    (IN_CLUSTERS, {"clusters": ()}, "clusters"),
    (IN_CLUSTERS, {"clusters": [*CLUSTERS]}, "clusters"),
    (IN_CLUSTERS, {"clusters": CLUSTERS * 33}, "clusters"),
    (IN_CLUSTERS, {"clusters": OF_CLUSTERS}, "clusters"),
    (IN_CLUSTERS, {"clusters": (CLUSTERS[0], replace(CLUSTERS[1], d_model=5))}, "clusters"),
    (IN_CLUSTERS, {"scale": 0.0}, "scale"),
    (OF_CLUSTERS[0], {"n_vocab": 0}, "n_vocab"),
    (OF_CLUSTERS[0], {"d_table": 0}, "d_table"),
    (OF_CLUSTERS[0], {"d_model": 0}, "d_model"),
    (OF_CLUSTERS[0], {"cluster": -1}, "cluster"),
    (OF_CLUSTERS[0], {"cluster": 64}, "cluster"),
    (OF_CLUSTERS[0], {"n_clusters": 64}, "n_clusters"),
    (TIED[0], {"project": Linear(d_in=11, d_out=4, belongs="head")}, "project"),
    (ADAPTIVE, {"clusters": OF_CLUSTERS[:1]}, "clusters"),
    (ADAPTIVE, {"clusters": OF_CLUSTERS[::-1]}, "clusters"),
    (ADAPTIVE, {"clusters": (OF_CLUSTERS[0], replace(OF_CLUSTERS[1], n_clusters=1))}, "clusters"),
    (ADAPTIVE, {"clusters": (OF_CLUSTERS[0], replace(OF_CLUSTERS[1], d_model=5))}, "clusters"),
    (MODEL, {"head": replace(ADAPTIVE, clusters=(OF_CLUSTERS[0], replace(OF_CLUSTERS[1], n_vocab=4)))}, "head"),
    (MODEL, {"head": replace(ADAPTIVE, clusters=(OF_CLUSTERS[0], TIED[1]))}, "head"),
    (MODEL, {"head": TiedHead(d_model=11, n_vocab=5), "embedding": IN_CLUSTERS}, "head"),
    *(
        (MODEL, {"head": AdaptiveHead(clusters=TIED), "embedding": AdaptiveEmbedding(clusters=found)}, "head")
        for found in (
            CLUSTERS[::-1],
            (CLUSTERS[0], replace(CLUSTERS[1], d_table=3)),
            (replace(CLUSTERS[0], n_vocab=5),),
            (
                replace(CLUSTERS[0], project=Lora(base=CLUSTERS[0].plain_maps()["project"], rank=1, alpha=1.0)),
                CLUSTERS[1],
            ),
        )
    ),
    (READ, {"embedding": IN_CLUSTERS}, "embedding"),
    (DISTANCES, {"d_head": 0}, "d_head"),
    (EMBEDDING, {"scale": 0.0}, "scale"),
    (EMBEDDING, {"d_table": 0}, "d_table"),
    (SharedEmbedding(n_vocab=5, d_model=11), {"scale": 0.0}, "scale"),
    (HEAD, {"scale": 0.0}, "scale"),
    (HEAD, {"softcap": 0.0}, "softcap"),
    (HEAD, {"d_table": 0}, "d_table"),
    (HEAD, {"transform": HeadTransform(d_model=5, activation="gelu")}, "transform"),
    (HEAD, {"transform": HeadTransform(d_model=11, activation="gelu"), "d_table": 3}, "d_table"),
    (HEAD, {"transform": HeadTransform(d_model=11, d_out=3, activation="gelu")}, "d_table"),
    (HEAD, {"transform": HeadTransform(d_model=11, d_out=3, activation="gelu"), "d_table": 4}, "d_table"),
    (Parallel(attention=ATTENTION, ffn=BODY), {"ffn": replace(BODY, d_model=5)}, "ffn"),
    (BRANCH, {"name": "two words"}, "name"),
    (BRANCH, {"name": ""}, "name"),
    (BRANCH, {"name": "a.b"}, "name"),
    (BRANCH, {"name": 3}, "name"),
    (BRANCH, {"scale": 0.0}, "scale"),
    (BRANCH, {"stream_scale": 0.0}, "stream_scale"),
    (BRANCH, {"normed": True}, "normed"),
    (BRANCH, {"parallel": True, "block_input": True}, "block_input"),
    (CentredConvolution(d_model=11, kernel=3), {"kernel": 4}, "kernel"),
    (CentredConvolution(d_model=11, kernel=3), {"kernel": 0}, "kernel"),
    (CentredConvolution(d_model=11, kernel=3), {"activation": "swish"}, "activation"),
    *((BRANCH, {name: RMSNorm(d=5)}, name) for name in ("norm", "post_norm", "sum_norm")),
    (MODEL.blocks[0], {"branches": ()}, "branches"),
    (MODEL.blocks[0], {"branches": (BRANCH, BRANCH)}, "branches"),
    (MODEL.blocks[0], {"branches": (replace(BRANCH, parallel=True),)}, "branches"),
    (MODEL.blocks[0], {"branches": (replace(BRANCH, block_input=True),)}, "branches"),
    (PREDICTOR, {"head": replace(HEAD, n_vocab=6)}, "head"),
    (PATCHES, {"patch_size": 8}, "patch_size"),
    (PATCHES, {"channels": 0}, "channels"),
    (PATCHES, {"image_size": 0}, "image_size"),
    (PATCHES, {"class_token": "middle"}, "class_token"),
    *((PATCHES, {"n_registers": n, "class_token": where}, "n_registers") for n, where in REGISTERS),
    *((Centres(n_side=2, n_before=1), {name: -1}, name) for name in ("n_side", "n_before")),
    (Rotary(d_rotary=8, axes=Centres(n_side=2, n_before=0)), {"d_rotary": 6}, "d_rotary"),
    (Rotary(d_rotary=8, axes=Centres(n_side=2, n_before=0)), {"grid": 2}, "axes"),
    (Rotary(d_rotary=8, axes=Centres(n_side=2, n_before=0)), {"scaling": LinearScaling(factor=2.0)}, "scaling"),
    (Classifier(d_model=5, n_labels=3), {"n_labels": 0}, "n_labels"),
    (Classifier(d_model=5, n_labels=3), {"labels": "highest"}, "labels"),
    (Classifier(d_model=5, n_labels=3), {"labels": "span"}, "n_labels"),
    (Classifier(d_model=5, n_labels=3), {"padding": 0}, "padding"),
    (Classifier(d_model=5, n_labels=3, labels="last"), {"padding": -1}, "padding"),
    (Classifier(d_model=5, n_labels=3), {"transform": Pooler(d_model=6)}, "transform"),
    (
        Classifier(d_model=5, n_labels=3),
        {"transform": HeadTransform(d_model=5, d_out=6, activation="gelu")},
        "transform",
    ),
    (Pooler(d_model=5), {"activation": "softmax"}, "activation"),
    (Projection(d_model=5, d_out=3), {"d_out": 0}, "d_out"),
    (Projection(d_model=5, d_out=3), {"reads": "mean"}, "reads"),
    (Projection(d_model=5, d_out=3), {"end": 0}, "end"),
    (Projection(d_model=5, d_out=3), {"reads": "highest", "end": 0}, "end"),
    *(
        (Projection(d_model=5, d_out=3), {"reads": "end", "end": end}, "end")
        for end in (None, -1, LARGEST_SIZE + 1, True, 1.0)
    ),
    *(
        (PROJECTOR, {"widths": widths}, "widths")
        for widths in ((20,), (20, 0), (20, LARGEST_SIZE + 1), (20, True), (20, 1.0), ())
    ),
    (PROJECTOR, {"merge": 0}, "merge"),
    (PROJECTOR, {"merge": 3}, "merge"),
    (PROJECTOR, {"widths": (10, 11)}, "merge"),
    (POOLED, {"pool": 6}, "pool"),
    (POOLED, {"norm": RMSNorm(d=6)}, "norm"),
    (SEEN, {"tower": READ}, "tower"),
    (SEEN, {"tower": tower(3, head=Classifier(d_model=7, n_labels=3))}, "tower"),
    (SEEN, {"placeholder": -1}, "placeholder"),
    (SEEN, {"placeholder": True}, "placeholder"),
    (SEEN, {"placeholder": 1.0}, "placeholder"),
    (SEEN, {"layers": -1}, "layers"),
    (SEEN, {"layers": 3}, "layers"),
    (SEEN, {"layers": True}, "layers"),
    (SEEN, {"tower": PLAIN_TOWER, "keep_class": True}, "keep_class"),
    (SEEN, {"projector": MLPProjector(widths=(8, 11), activation="gelu")}, "projector"),
    (SEEN, {"projector": MLPProjector(widths=(28, 11), activation="gelu", merge=2), "keep_class": True}, "projector"),
    (Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2))), {"tower": tower(3)}, "tower"),
    (
        Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2))),
        {"tower": replace(READ, head=Projection(d_model=11, d_out=2))},
        "tower",
    ),
    (MODEL, {"max_positions": 0}, "max_positions"),
    (MODEL, {"name": 3}, "name"),
    (MODEL, {"blocks": ()}, "blocks"),
    (MODEL, {"blocks": list(MODEL.blocks)}, "blocks"),
    (MODEL, {"blocks": MODEL.blocks * (MOST_BLOCKS + 1)}, "blocks"),
    (MODEL, {"predictors": (PREDICTOR,) * (MOST_BLOCKS + 1)}, "predictors"),
    (MODEL, {"predictors": [PREDICTOR]}, "predictors"),
    (SharedHead(d_model=11, n_vocab=5), {"n_vocab": 0}, "n_vocab"),
    (MODEL, {"predictors": (replace(PREDICTOR, head=SharedHead(d_model=11, n_vocab=5, tied=True)),)}, "predictors"),
    (
        MODEL,
        {
            "head": replace(HEAD, d_table=3),
            "predictors": (replace(PREDICTOR, head=SharedHead(d_model=11, n_vocab=5)),),
        },
        "predictors",
    ),
    (
        MODEL,
        {
            "embedding": replace(EMBEDDING, d_table=3),
            "predictors": (replace(PREDICTOR, embedding=SharedEmbedding(d_model=11, n_vocab=5)),),
        },
        "predictors",
    ),
    (READ, {"head": replace(HEAD, n_vocab=6)}, "head"),
    (MODEL, {"head": TiedHead(d_model=11, n_vocab=6)}, "head"),
    (MODEL, {"head": TiedHead(d_model=11, n_vocab=5, d_table=3)}, "head"),
    (READ, {"head": replace(HEAD, d_model=12)}, "head"),
    (MODEL, {"positions": LearnedPositions(n_positions=16, d_model=5)}, "positions"),
    (MODEL, {"positions": LearnedPositions(n_positions=15, d_model=11)}, "max_positions"),
    (MODEL, {"types": TypeEmbedding(n_types=2, d_model=5)}, "types"),
    (READ, {"embedding_projection": EmbeddingProjection(d_embedding=3, d_model=11)}, "embedding_projection"),
    (READ, {"embedding_projection": EmbeddingProjection(d_embedding=11, d_model=3)}, "blocks"),
    (MODEL, {"pooler": Pooler(d_model=5)}, "pooler"),
    (MODEL, {"embedding_norm": RMSNorm(d=5)}, "embedding_norm"),
    (MODEL, {"norm": RMSNorm(d=5)}, "norm"),
    (MODEL, {"blocks": (*MODEL.blocks, Block(branches=(OTHER,)))}, "blocks"),
    (MODEL, {"blocks": (Block(branches=(BRANCH, replace(OTHER, name="y"))),)}, "blocks"),
    (MODEL, {"embedding": SharedEmbedding(n_vocab=5, d_model=11)}, "embedding"),
    (
        MODEL,
        {"predictors": (replace(PREDICTOR, embedding=replace(EMBEDDING, n_vocab=6), head=replace(HEAD, n_vocab=6)),)},
        "predictors",
    ),
    (
        replace(MODEL, blocks=NARROW.blocks, embedding=NARROW.embedding, head=Head(d_model=7, n_vocab=5)),
        {"predictors": (PREDICTOR,)},
        "predictors",
    ),
    (MODEL, {"encoder": MODEL}, "encoder"),
    (MODEL, {"encoder": READ.changed(encoder=READ)}, "encoder"),
    (MODEL, {"encoder": replace(READ, pooler=Pooler(d_model=11))}, "encoder"),
    (MODEL, {"encoder": replace(MODEL, predictors=(PREDICTOR,))}, "encoder"),
    (MODEL, {"encoder": replace(SHARED, embedding=SharedEmbedding(n_vocab=6, d_model=11))}, "encoder"),
    (MODEL, {"encoder": replace(NARROW, embedding=SharedEmbedding(n_vocab=5, d_model=7))}, "encoder"),
    (MODEL, {"encoder": SHARED, "embedding": replace(EMBEDDING, d_table=3)}, "encoder"),
    (MODEL, {"blocks": stack(replace(CROSS, d_source=11))}, "blocks"),
    (TRANSLATOR, {"blocks": stack(replace(CROSS, d_source=12))}, "blocks"),
    (MODEL, {"relative": BiasTable(n_buckets=8, n_heads=6)}, "relative"),
    (MODEL, {"relative": DistanceTable(n_rows=8, d_model=11)}, "relative"),
    (MODEL, {"blocks": stack(EMBEDDING_DISTANCES)}, "relative"),
    (MODEL, {"blocks": stack(EMBEDDING_DISTANCES), "relative": BiasTable(n_buckets=8, n_heads=11)}, "relative"),
    (MODEL, {"blocks": stack(EMBEDDING_DISTANCES), "relative": DistanceTable(n_rows=6, d_model=11)}, "relative"),
    (MODEL, {"blocks": stack(replace(ATTENTION, positions=BUCKETS))}, "relative"),
    *(
        (MODEL, {"blocks": stack(replace(ATTENTION, positions=BUCKETS)), "relative": table}, "relative")
        for table in (BiasTable(n_buckets=8, n_heads=5), BiasTable(n_buckets=6, n_heads=6))
    ),
    (tower(3), {"max_positions": 4}, "max_positions"),
    (tower(3), {"max_positions": 6}, "max_positions"),
    (tower(3), {"encoder": NARROW}, "encoder"),
    (tower(3), {"vision": SEEN}, "vision"),
    (tower(3), {"head": Head(d_model=7, n_vocab=5)}, "head"),
    (tower(3), {"head": Projection(d_model=7, d_out=2, reads="highest")}, "head"),
    (tower(3), {"head": Classifier(d_model=7, n_labels=2, labels="last")}, "head"),
    (MODEL, {"vision": Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2)))}, "head"),
    (
        MODEL.changed(head=Projection(d_model=11, d_out=3)),
        {"vision": Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2)))},
        "vision",
    ),
    (MODEL, {"vision": replace(SEEN, projector=MLPProjector(widths=(7, 12), activation="gelu"))}, "vision"),
    *(
        (MODEL, {"vision": replace(SEEN, both_ways=True), "blocks": stack(ATTENTION, body)}, "vision")
        for body in (
            replace(ATTENTION, causal=False),
            replace(ATTENTION, chunk=3),
            Parallel(attention=replace(ATTENTION, causal=False), ffn=BODY),
            replace(ATTENTION, positions=Alibi(n_heads=6)),
            replace(ATTENTION, positions=DISTANCES),
            replace(LATENT, d_model=11),
        )
    ),
]


@pytest.mark.parametrize(
    ("part", "changed", "field"), REFUSED, ids=[f"{i}-{type(p).__name__}-{f}" for i, (p, _, f) in enumerate(REFUSED)]
)
def test_outside_is_refused_by_name(part: Part, changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        altered(part, changed)
    where, _, name = refused.value.field.partition(".")
    assert name == field
    assert where == type(part).__name__ or (isinstance(part, Model) and where in ("Model", *map(_name, WHOLES)))


def _name(kind: type[Part]) -> str:
    return kind.__name__


TAKEN: list[tuple[Part, dict[str, Any]]] = [
    (ATTENTION, {"n_kv_heads": 6}),
    (ATTENTION, {"n_kv_heads": 1}),
    (ATTENTION, {"window": 1}),
    (ATTENTION, {"chunk": 1}),
    (ATTENTION, {"window": 3, "causal": False}),
    (TURNED, {"rotate_first": True, "q_norm": RMSNorm(d=5)}),
    (TURNED, {"rotate_first": True, "k_norm": LayerNorm(d=5)}),
    (TURNED, {"rotate_first": True, "k_norm": RMSNorm(d=5, gain="offset"), "q_norm": RMSNorm(d=5, gain="none")}),
    (ATTENTION, {"softcap": 1e-9, "scale": 1e-9}),
    (replace(ATTENTION, d_head=4), {"positions": Rotary(d_rotary=4)}),
    (ATTENTION, {"positions": Alibi(n_heads=6)}),
    (ATTENTION, {"positions": DISTANCES}),
    (ATTENTION, {"positions": replace(DISTANCES, window=3, biases=VECTORS), "window": 3}),
    (DISTANCES, {"window": 1, "max_distance": 1}),
    (MEMORY, {"positions": Alibi(n_heads=6), "q_norm": RMSNorm(d=5), "chunk": 3}),
    (MEMORY, {"positions": DISTANCES, "d_input": 5}),
    (VECTORS, {"weights_name": "a"}),
    (VECTORS, {"weights_from": "a"}),
    (IN_CLUSTERS, {"clusters": CLUSTERS * 32, "scale": 1e-9}),
    (IN_CLUSTERS, {"clusters": CLUSTERS[:1]}),
    (OF_CLUSTERS[0], {"cluster": 63, "n_clusters": 63}),
    (ADAPTIVE, {"clusters": (replace(OF_CLUSTERS[0], n_clusters=0),)}),
    (MODEL, {"head": ADAPTIVE}),
    (MODEL, {"head": ADAPTIVE, "embedding": IN_CLUSTERS}),
    (MODEL, {"head": AdaptiveHead(clusters=TIED), "embedding": IN_CLUSTERS}),
    (MODEL, {"head": AdaptiveHead(clusters=(OF_CLUSTERS[0], TIED[1])), "embedding": IN_CLUSTERS}),
    (MODEL, {"embedding": IN_CLUSTERS}),
    (ATTENTION, {"q_norm": RMSNorm(d=30), "k_norm": RMSNorm(d=10)}),
    (LATENT, {"q_norm": RMSNorm(d=13), "q_rank": 13, "kv_norm": LayerNorm(d=7)}),
    (replace(LATENT, d_rope=4), {"mscale": 1e-9, "positions": Rotary(d_rotary=4, scaling=YARN)}),
    (CROSS, {"scale": 1e-9}),
    (ExpertGroups(n_groups=4, top_groups=2), {"top_groups": 3, "score": "two_best"}),
    (ROUTER, {"top_k": 8}),
    (ROUTER, {"renormalise": True, "eps": 1e-9}),
    (ROUTER, {"renormalise": True}),
    (ROUTER, {"groups": ExpertGroups(n_groups=8, top_groups=3)}),
    (ROUTER, {"groups": ExpertGroups(n_groups=4, top_groups=2, score="two_best")}),
    (EXPERTS, {"gating": ClampedGate(alpha=1e-9, limit=1e-9)}),
    (EXPERTS, {"gating": "none", "activation": "gelu", "weighs": "inputs"}),
    (EXPERTS, {"capacity": 1}),
    (EXPERTS, {"shared": MLP(d_model=5, d_ff=7, activation="relu"), "shared_gate": True}),
    (LearnedPositions(n_positions=4, d_model=5), {"offset": LARGEST_SIZE}),
    (YARN, {"beta_fast": 1.0, "attention_factor": 1e-9}),
    (LLAMA3, {"high_freq_factor": 1.0}),
    (Rotary(d_rotary=4), {"grid": 1}),
    (Rotary(d_rotary=4), {"scaling": LONG}),
    (Rotary(d_rotary=4), {"scaling": FrequencyFactors(factors=(1e-9, 2.0))}),
    (Rotary(d_rotary=4), {"scaling": YARN, "theta": 1.1}),
    (Rotary(d_rotary=4), {"scaling": DynamicNTK(factor=2.0, original_context=1), "theta": 1.0}),
    (BUCKETS, {"n_buckets": 2, "max_distance": 2}),
    (BUCKETS, {"max_distance": 5}),
    (BUCKETS, {"n_buckets": 4, "both_ways": True, "max_distance": 2}),
    (BUCKETS, {"n_buckets": 6, "max_distance": 4}),
    (DISTANCES, {"d_model": 2}),
    (EMBEDDING, {"d_table": 1, "scale": 1e-9}),
    (HEAD, {"transform": HeadTransform(d_model=11, activation="gelu"), "softcap": 1e-9}),
    (BRANCH, {"name": "x_1"}),
    (MODEL.blocks[0], {"branches": (BRANCH, replace(BRANCH, name="y", parallel=True))}),
    (PATCHES, {"patch_size": 7}),
    (Projection(d_model=5, d_out=3), {"reads": "end", "end": 0}),
    (Projection(d_model=5, d_out=3), {"reads": "end", "end": LARGEST_SIZE}),
    (PROJECTOR, {"widths": (4, 1)}),
    (PROJECTOR, {"widths": (4, LARGEST_SIZE)}),
    (POOLED, {"pool": 5}),
    (SEEN, {"placeholder": 0, "layers": 0, "keep_class": True}),
    (SEEN, {"layers": 2}),
    (SEEN, {"projector": MLPProjector(widths=(28, 11), activation="gelu", merge=2)}),
    (MODEL, {"blocks": MODEL.blocks * MOST_BLOCKS}),
    (MODEL, {"predictors": (PREDICTOR,) * 2}),
    (MODEL, {"predictors": (replace(PREDICTOR, head=SharedHead(d_model=11, n_vocab=5)),)}),
    (MODEL, {"predictors": (replace(PREDICTOR, embedding=SharedEmbedding(d_model=11, n_vocab=5)),)}),
    (MODEL, {"positions": LearnedPositions(n_positions=16, d_model=11)}),
    (MODEL, {"embedding": replace(EMBEDDING, d_table=3), "head": TiedHead(d_model=11, n_vocab=5, d_table=3)}),
    (MODEL, {"embedding": replace(EMBEDDING, d_table=3), "head": replace(HEAD, d_table=4)}),
    (READ, {"embedding": SharedEmbedding(n_vocab=5, d_model=11)}),
    (MODEL, {"encoder": SHARED}),
    (MODEL, {"encoder": NARROW}),
    (TRANSLATOR, {"blocks": stack(replace(CROSS, d_source=11))}),
    (MODEL, {"blocks": stack(replace(ATTENTION, positions=BUCKETS)), "relative": BiasTable(n_buckets=8, n_heads=6)}),
    (READ, {"blocks": stack(EMBEDDING_DISTANCES), "relative": DistanceTable(n_rows=8, d_model=11, eps=1e-9)}),
    (EMBEDDED, {"max_distance": 4}),
    (EMBEDDED, {"span": 1, "max_distance": None}),
    (MODEL, {"head": Projection(d_model=11, d_out=3, reads="highest")}),
    (tower(3), {"head": Classifier(d_model=7, n_labels=3), "pooler": Pooler(d_model=7)}),
    (
        MODEL.changed(head=Projection(d_model=11, d_out=2)),
        {"vision": Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2)))},
    ),
    (MODEL, {"vision": replace(SEEN, both_ways=True), "blocks": stack(ATTENTION, TURNED)}),
    (MODEL, {"vision": replace(SEEN, both_ways=True), "blocks": stack(replace(ATTENTION, window=3))}),
    (MODEL, {"vision": SEEN, "blocks": stack(replace(LATENT, d_model=11))}),
]


@pytest.mark.parametrize(("part", "changed"), TAKEN, ids=[f"{i}-{type(p).__name__}" for i, (p, _) in enumerate(TAKEN)])
def test_inside_is_taken(part: Part, changed: dict[str, Any]) -> None:
    made = altered(part, changed)
    assert {name: getattr(made, name) for name in changed} == changed


@pytest.mark.parametrize("value", [0, -1, LARGEST_SIZE + 1, 2**63, 1.0, "1", True, None])
def test_sizes_are_whole_numbers_from_1(value: Any) -> None:  # noqa: ANN401
    for part, names in (
        (ATTENTION, ("d_model", "n_heads", "n_kv_heads", "d_head")),
        (BODY, ("d_model", "d_ff")),
        (CROSS, ("d_model", "d_source", "n_heads", "d_head")),
        (MODEL, ("max_positions",)),
        (RMSNorm(d=5), ("d",)),
        (ROUTER, ("d_model", "n_experts", "top_k")),
        (PATCHES, ("image_size", "patch_size", "channels", "d_model")),
        (POOLED, ("d_in", "d_out", "n_side", "pool")),
        (BUCKETS, ("n_buckets", "max_distance")),
    ):
        for name in names:
            with pytest.raises(InputError, match=rf"{type(part).__name__}\.{name}\b.*whole number from 1 to 2\^31-1"):
                replace(part, **{name: value})


def test_the_largest_size_is_taken() -> None:
    assert RMSNorm(d=LARGEST_SIZE).d == 2147483647
    assert RMSNorm(d=1).d == 1
    assert MOST_BLOCKS == 1024


def test_numbers_are_finite() -> None:
    largest = int(sys.float_info.max)
    for value in (1, -1, 0, 0.5, -0.5, largest, -largest, sys.float_info.max):
        assert is_finite(value)
    for other in (largest * 2, -largest * 2, math.inf, -math.inf, math.nan, True, False, "1", None):
        assert not is_finite(other)
    for refused in (0, -1.0, math.inf, math.nan, "1", True, None, largest * 2):
        with pytest.raises(InputError, match=r"RMSNorm\.eps.*a finite number above 0"):
            RMSNorm(d=5, eps=refused)  # type: ignore[arg-type]
    assert RMSNorm(d=5, eps=1).eps == 1


def test_what_messages_say_is_allowed() -> None:
    for make, said in (
        (lambda: replace(LATENT, q_norm=RMSNorm(d=5)), "none without q_rank"),
        (lambda: replace(LATENT, q_rank=13, q_norm=RMSNorm(d=5)), "a norm over 13"),
        (lambda: replace(MODEL, blocks=()), "got 0"),
        (lambda: replace(MODEL, blocks=()), "1 to 1024"),
        (lambda: replace(MODEL, predictors=(PREDICTOR,) * 1025), "got 1025"),
        (lambda: replace(MODEL, predictors=(PREDICTOR,) * 1025), "none to 1024"),
        (lambda: replace(MODEL, blocks=stack(replace(ATTENTION, positions=BUCKETS))), r"table for \[\(8, 6\)\]"),
        (lambda: replace(MODEL, relative=BiasTable(n_buckets=8, n_heads=6)), "a table for nothing"),
        (lambda: replace(MODEL, norm=RMSNorm(d=5)), "norm has 5"),
        (lambda: RMSNorm(d=5, gain="bias"), "weight, offset or none"),  # type: ignore[arg-type]
        (lambda: LayerNorm(d=5, gain="no"), "true or false"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=said):
            make()
