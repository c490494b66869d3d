"""Every field of every part: what it is when it is not given, and that another type is refused by its name."""

from __future__ import annotations

import math
import sys
import types
import typing
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import strategies
from hypothesis import given
from small_networks import SMALL
from small_parts import DELTA_NET, DELTA_TIME, FUSED
from small_sounds import HEARER, HEARING

from asbuilt import cost, spec
from asbuilt.catalog import find, names
from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.spec import (
    RGLRU,
    XIELU,
    AlternatingUpdates,
    Attention,
    AudioLanguageModel,
    AxialPositions,
    BlockIndexer,
    CausalConvolution,
    CentredConvolution,
    ChannelMixing,
    CompressedAttention,
    Compressor,
    ConvolutionModule,
    ConvolvedProjector,
    DeltaTimeMixing,
    DiagonalStateSpace,
    Differential,
    Disentangled,
    DistanceTable,
    DynamicNTK,
    EmbeddingProjection,
    EntryIndexer,
    FusedPredictor,
    GatedConvolution,
    GatedDeltaNet,
    HashedTable,
    HeadNorm,
    Hearing,
    HyperConnection,
    Laurel,
    LayerNorm,
    LightningAttention,
    Linear,
    LinearAttention,
    LongRope,
    Lora,
    Mamba,
    Mamba2,
    MatrixLSTM,
    MelSubsampling,
    Model,
    NGrams,
    Packed,
    Part,
    Pass,
    PerLayerEmbedding,
    PerLayerInput,
    Predictor,
    ProjectedStreams,
    Proportional,
    Recurrent,
    RMSNorm,
    Rotary,
    SharedHead,
    ShortConvolution,
    SoftplusScale,
    StreamMerge,
    TimeMixing,
    TokenShift,
    VisionLanguageModel,
    walk,
    whole,
)
from asbuilt.spec.part import Role, runs
from asbuilt.spec.show import show

# What is not given; what is None or empty by default is left out. A spec that was saved without them means these.
DEFAULTS: dict[str, dict[str, Any]] = {
    "AdaptiveEmbedding": {"scale": 1.0},
    "Alibi": {"bias_max": 8.0},
    "Attention": {
        "causal": True,
        "bias": False,
        "output_bias": False,
        "key_bias": True,
        "rotate_first": False,
        "sinks": False,
        "cached": True,
        "caches_input": False,
        "value_scale": 1.0,
        "values_are_keys": False,
    },
    "AttentionPooling": {"bias": False},
    "Block": {"scaled": False},
    "BlockIndexer": {"local": 1},
    "Branch": {
        "scale": 1.0,
        "parallel": False,
        "block_input": False,
        "layer_scale": False,
        "gated": False,
        "after_source": False,
        "stream_scale": 1.0,
        "normed": False,
    },
    "CausalConvolution": {"dilation": 1, "bias": True},
    "CentredConvolution": {"activation": "gelu"},
    "Classifier": {"bias": True, "labels": "first"},
    "ClampedGate": {"shift": True, "activated": False},
    "ClusterHead": {"tied": False, "tied_map": False, "n_clusters": 0},
    "Contrast": {"bias": False},
    "ConvolvedProjector": {"bias": False},
    "Disentangled": {"to_keys": True, "to_queries": True},
    "CrossAttention": {"bias": False, "output_bias": False, "key_bias": True},
    "Compressor": {"overlap": False},
    "DiagonalStateSpace": {"bias": True},
    "ExpertGroups": {"score": "best"},
    "ChannelMixing": {"receptance": True},
    "DeltaTimeMixing": {"length_eps": 1e-12},
    "GatedDeltaNet": {"decays": "head", "gating": "silu", "length_eps": 1e-6},
    "GatedMLP": {"bias": False, "gate_scale": 1.0},
    "Head": {"bias": False, "scale": 1.0, "shift": False},
    "HeadNorm": {"eps": 1e-5, "bias": False},
    "HyperConnection": {"eps": 1e-6, "norm_eps": 1e-6, "iterations": 20},
    "StreamMerge": {"eps": 1e-6, "norm_eps": 1e-6},
    "ProjectedStreams": {"eps": 1e-5},
    "HeadTransform": {"eps": 1e-12, "bias": True, "norm_bias": True},
    "LatentAttention": {"bias": False, "output_bias": False},
    "LayerNorm": {"eps": 1e-5, "gain": True, "bias": True},
    "LearnedPositions": {"offset": 0},
    "LightningAttention": {"activation": "silu", "bias": False, "output_bias": False},
    "LinearAttention": {"bias": False, "output_bias": False, "eps": 1e-6},
    "Linear": {"bias": False, "to_stream": False, "belongs": "other", "clipped": False},
    "Mamba": {"bias": False},
    "Mamba2": {
        "n_groups": 1,
        "bias": False,
        "output_bias": False,
        "gate": "before_norm",
        "eps": 1e-5,
        "dt_min": 0.0,
    },
    "MatrixLSTM": {"cap": 15.0, "eps": 1e-6, "bias": False, "output_bias": False},
    "MLP": {"bias": False},
    "MLPProjector": {"bias": False, "merge": 1, "stack": 1, "merging": False, "every": 1},
    "GridConvolution": {"stride": 1, "apart": False, "bias": False, "activated": False},
    "PixelConvolution": {"stride": 1, "apart": False, "bias": False, "activated": False},
    "InvertedResidual": {"scaled": False, "added": False},
    "ConvolvedPatches": {
        "channels": 3,
        "bias": False,
        "centred": False,
        "class_token": "none",
        "n_registers": 0,
        "mask_token": False,
    },
    "Hearing": {"filled": False},
    "MixtureOfExperts": {
        "gating": "gated",
        "bias": False,
        "weighs": "results",
        "shared_gate": False,
        "latent_bias": False,
    },
    "Model": {"name": "model"},
    "LanguageModel": {"name": "model"},
    "FusedPredictor": {"normed": False},
    "Predictor": {"normed": True},
    "SharedHead": {"tied": False},
    "ConvolutionModule": {"activation": "silu", "bias": False},
    "GatedConvolution": {"bias": False},
    "MelSubsampling": {"eps": 1e-6, "ahead": False, "cumulative": False},
    "RelativeProjection": {"scale": 1.0, "endpoint": False},
    "Recurrent": {"cell": "lstm", "bias": True, "output_bias": False},
    "RGLRU": {"bias": False},
    "ShortConvolution": {"bias": False, "activation": "silu", "belongs": "ssm", "cached": True},
    "TextEncoder": {"name": "model"},
    "EncoderDecoder": {"name": "model"},
    "ImageEncoder": {"name": "model"},
    "AudioEncoder": {"name": "model"},
    "AudioLanguageModel": {"name": "model"},
    "VisionLanguageModel": {"name": "model"},
    "DualEncoder": {"name": "model"},
    "GridPatches": {
        "channels": 3,
        "bias": False,
        "centred": False,
        "class_token": "none",
        "n_registers": 0,
        "mask_token": False,
        "frames": 1,
    },
    "GridPositions": {"interpolation": "corners"},
    "Parallel": {"input_scales": (1.0, 1.0), "output_scales": (1.0, 1.0)},
    "Plane": {"alternating": False, "staggered": False, "columns_first": False, "timed": False},
    "GridVision": {"keep_class": False, "both_ways": False, "in_windows": False, "prefix": False},
    "Sections": {"interleaved": False},
    "PatchEmbedding": {
        "channels": 3,
        "bias": False,
        "centred": False,
        "class_token": "none",
        "n_registers": 0,
        "mask_token": False,
    },
    "Pooler": {"activation": "tanh"},
    "PerLayerEmbedding": {"scale": 1.0, "project_scale": 1.0, "sum_scale": 1.0},
    "PooledProjector": {"scale": 1.0, "standardised": False},
    "Projection": {"bias": False, "reads": "first"},
    "Proportional": {"factor": 1.0},
    "QueryTemperature": {"from_zero": False},
    "RMSNorm": {"eps": 1e-6, "gain": "weight"},
    "Rotary": {"theta": 10000.0, "pairing": "halves"},
    "Router": {
        "scoring": "softmax",
        "renormalise": False,
        "bias": False,
        "correction": False,
        "eps": 0.0,
        "scale": 1.0,
        "logit_scale": 1.0,
        "expert_scale": False,
    },
    "SharedEmbedding": {"scale": 1.0},
    "Sinusoids": {"theta": 10000.0, "layout": "halves"},
    "TiedHead": {"bias": False, "scale": 1.0, "shift": False},
    "TiledVision": {"keep_class": True, "both_ways": False, "in_windows": False, "prefix": False},
    "TilePatches": {
        "channels": 3,
        "bias": False,
        "centred": False,
        "class_token": "first",
        "n_registers": 0,
        "mask_token": False,
        "multiple": 8,
    },
    "TokenEmbedding": {"scale": 1.0, "extra": 0},
    "TokenShift": {"belongs": "attention", "of_past": False},
    "Vision": {"keep_class": False, "both_ways": False, "in_windows": False, "prefix": False},
    "YaRN": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}
KINDS = sorted(
    (kind for kind in vars(spec).values() if isinstance(kind, type) and issubclass(kind, Part)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_not_given(kind: type[Part]) -> None:
    given = {f.name: f.default for f in fields(kind) if f.default is not MISSING and f.default not in (None, ())}
    assert given == DEFAULTS.get(kind.__name__, {})


def examples() -> dict[type[Part], Part]:
    """One part of each kind: those of the catalogue, and some that no model there has."""
    found: dict[type[Part], Part] = {}
    for name in names():
        for _, part in walk(find(name).spec()):
            found.setdefault(type(part), part)
        for _, predictor in find(name).spec().extras():
            found.setdefault(type(predictor), predictor)
    found[AudioLanguageModel], found[Hearing] = HEARER, HEARING
    found[DynamicNTK] = DynamicNTK(factor=2.0, original_context=64)
    found[LongRope] = LongRope(
        short_factors=(1.0, 1.0), long_factors=(2.0, 3.0), original_context=64, attention_factor=1.0
    )
    found[NGrams] = ngrams = NGrams.of(n_vocab=5, d_model=6, n=2, splits=1, ratio=2)
    found[HashedTable] = ngrams.tables[0]
    found[Proportional] = Proportional(n_pairs=2)
    found[PerLayerEmbedding] = PerLayerEmbedding(n_vocab=5, n_layers=1, d=2, d_model=6, norm=RMSNorm(d=2))
    found[AxialPositions] = AxialPositions(n_entries=5, d_model=6)
    found[PerLayerInput] = PerLayerInput(d_model=6, d=2, activation="relu")
    found[LinearAttention] = LinearAttention(d_model=6, n_heads=2, d_head=3)
    found[LightningAttention] = LightningAttention(d_model=6, n_heads=2, d_head=3, decay=0.5, norm=RMSNorm(d=6))
    conv = ShortConvolution(channels=14, kernel=3)
    found[Mamba] = Mamba(d_model=6, d_inner=14, d_state=3, dt_rank=2, conv=conv)
    found[Mamba2] = Mamba2(d_model=6, n_heads=2, d_head=4, d_state=3, conv=conv)
    found[XIELU] = XIELU()
    found[Disentangled] = Disentangled(span=4)
    found[DistanceTable] = DistanceTable(n_rows=8, d_model=6)
    found[EmbeddingProjection] = EmbeddingProjection(d_embedding=3, d_model=6)
    found[BlockIndexer] = BlockIndexer(d_model=6, n_heads=2, d_head=4, block=2, top_k=2)
    entries = Compressor(d_model=6, d_head=4, ratio=2)
    found[Compressor] = entries
    found[EntryIndexer] = EntryIndexer(q_rank=3, n_heads=2, top_k=2, compressor=entries)
    found[ConvolvedProjector] = ConvolvedProjector(d_in=3, d_out=4, n_side=3, steps=1)
    found[CompressedAttention] = CompressedAttention(
        d_model=6, n_heads=2, d_head=4, q_rank=3, window=3, groups=1, o_rank=2, compressor=entries
    )
    found[HeadNorm] = HeadNorm(d=3, n_heads=2)
    found[MatrixLSTM] = MatrixLSTM(d_model=6, n_heads=2, d_key=4, d_value=3, norm=HeadNorm(d=3, n_heads=2))
    found[HyperConnection] = HyperConnection(n_streams=2, d_model=6)
    found[StreamMerge] = StreamMerge(n_streams=2, d_model=6)
    found[AlternatingUpdates] = AlternatingUpdates(n_streams=2, d_model=6, norm=RMSNorm(d=6))
    found[ProjectedStreams] = ProjectedStreams(n_streams=2, d_model=6)
    found[Laurel] = Laurel(d_model=6, rank=2)
    found[DiagonalStateSpace] = DiagonalStateSpace(d_model=4, d_state=3)
    found[Recurrent] = Recurrent(d_model=4, d_hidden=6)
    found[CentredConvolution] = CentredConvolution(d_model=4, kernel=3)
    found[CausalConvolution] = CausalConvolution(d_model=4, kernel=3)
    conv = ShortConvolution(channels=6, kernel=3)
    found[ConvolutionModule] = ConvolutionModule(d_model=4, conv=replace(conv, activation=None))
    found[MelSubsampling] = MelSubsampling(n_mels=4, n_tokens=3, channels=(2, 3), d_model=4)
    found[SoftplusScale] = SoftplusScale(d=3)
    found[GatedConvolution] = GatedConvolution(d_model=4, conv=conv)
    found[RGLRU] = RGLRU(d_model=4, d_rnn=6, n_heads=2, conv=conv, activation="gelu_tanh")
    found[GatedDeltaNet] = DELTA_NET
    time, channel = (TokenShift(d_model=4, targets=names) for names in (("k", "v", "r"), ("up", "r")))
    found[TimeMixing] = TimeMixing(d_model=4, d_state=6, shift=time)
    found[ChannelMixing] = ChannelMixing(d_model=4, d_ff=6, shift=channel)
    found[TokenShift] = time
    found[DeltaTimeMixing] = DELTA_TIME
    found[Differential] = Differential(n_heads=2, d_head=3, norm=RMSNorm(d=6), start=0.5)
    found[ShortConvolution] = ShortConvolution(channels=6, kernel=3)
    found[Lora] = Lora(base=Linear(d_in=4, d_out=6), rank=2, alpha=4.0)
    found |= {type(part): part for part in SMALL}
    found[FusedPredictor], found[SharedHead] = FUSED, SharedHead(d_model=6, n_vocab=5)
    found[Packed] = Packed(base=Linear(d_in=32, d_out=6), format="q4_0")
    return found


EXAMPLES = examples()


def of_another_type(hint: Any) -> tuple[object, ...]:  # noqa: ANN401  an annotation
    """What a field of that type must not be; nothing is tried of fields that hold parts."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [one for one in typing.get_args(hint) if one is not type(None)]
        return of_another_type(inner[0]) if len(inner) == 1 else ()
    if typing.get_origin(hint) is typing.Literal:
        return ("nonsense", 1)
    return {bool: ("yes", 1), int: (1.5, "3", True), float: (math.nan, "x", True)}.get(hint, ())


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_another_type_is_refused_by_name(kind: type[Part]) -> None:
    space = {**vars(typing), **vars(spec), "Model": Model}
    for base in reversed(kind.__mro__):  # fields of a base are annotated with the names of its file
        space |= vars(sys.modules[base.__module__])
    for field in fields(kind):
        for value in of_another_type(eval(str(field.type), space)):
            with pytest.raises(InputError, match=field.name):
                replace(EXAMPLES[kind], **{field.name: value})


def test_every_kind_of_part_is_tried() -> None:
    unseen = {kind.__name__ for kind in KINDS} - {kind.__name__ for kind in EXAMPLES}
    assert unseen <= {"Part", "Mapped", "Mixer", "Model", "FrequencyFactors"}


# What declarations call the tensors that are kept; a tensor that a whole stack shares is called after what made it.
KEPT = {
    "exponentials",
    "lambda",
    "a",
    "activated",
    "after the image",
    "by tile",
    "ahead",
    "averages",
    "b",
    "before",
    "beta",
    "by distance",
    "keys by distance",
    "keys met",
    "queries by distance",
    "queries met",
    "c",
    "capped",
    "chosen",
    "chosen scores",
    "closed",
    "convolved",
    "patches 0",
    "taps' inputs",
    "patches 1",
    "d",
    "decay",
    "decays",
    "decays from start",
    "decays of states",
    "decays to end",
    "dense",
    "distances",
    "divided",
    "down",
    "dropped",
    "first",
    "forget gate",
    "future",
    "gate",
    "gate and steps",
    "gate cut",
    "gated",
    "gates",
    "grid positions",
    "grid weights",
    "grouped",
    "h",
    "h cast",
    "hidden",
    "i",
    "input",
    "input gate",
    "k",
    "k mixed",
    "keys",
    "latent",
    "latent result",
    "log-probabilities",
    "logits",
    "logsumexp",
    "low-rank",
    "mask",
    "mean",
    "mix weights",
    "mixed",
    "mixed and zeros",
    "mixed by key head",
    "mixing",
    "moved",
    "narrow",
    "normed",
    "numbers of tilings",
    "opened",
    "openness",
    "order",
    "outside",
    "places",
    "pooled",
    "positions",
    "post",
    "pre",
    "probabilities",
    "probabilities cast",
    "products",
    "projected",
    "q",
    "q latent",
    "queries",
    "r",
    "r mixed",
    "rest",
    "read",
    "read weights",
    "result",
    "results",
    "rows",
    "rstd",
    "scale",
    "scales",
    "scores",
    "second",
    "shared result",
    "shares",
    "shares cast",
    "softmax",
    "source",
    "start",
    "states",
    "steps",
    "sizes",
    "steps before",
    "steps before limits",
    "steps' vector",
    "sums",
    "tokens",
    "transformed",
    "spread",
    "streams",
    "uncut",
    "types",
    "u",
    "ungated",
    "up",
    "up cut",
    "up mixed",
    "v",
    "unscaled",
    "v mixed",
    "values",
    "vectors",
    "weights",
    "wide fn",
    "wide streams",
    "write weights",
    "x",
    "x times steps",
    "y",
    "decay between",
    "decay mixed",
    "gate between",
    "gate mixed",
    "move",
    "move between",
    "rate",
    "rate between",
    "rate mixed",
    "sum",
}


# Products of two activations: scores and weighted sums, and what recurrences have in their place.
OF_TWO = ("scores", "mix", "by distance", "read", "update", "last update", "errors", "inverse", "found", "written")


@pytest.mark.parametrize("name", names())
def test_what_products_and_kept_tensors_are_called(name: str) -> None:
    """A product with a weight is called as the weight is, but where what it makes says more."""
    makes = {"distances": "positions", "labels": "head", "logits": "head", "patches": "embedding", "projection": "head"}
    model = find(name).spec()
    for kernel, logits in (("fused", "pooled"), ("fused", "all"), ("reference", "all")):
        source = 3 if "source" in model.reads else None
        run = Pass(tokens=4, source=source, kernel=kernel, width=2, logits=logits)  # type: ignore[arg-type]
        for _, part, seen in runs(model, run):
            for saved in memory(part).saves(seen):
                assert saved.name in KEPT or any(mark in saved.name for mark in ("(", "sinusoids")), saved
        for product in cost.products(model, run):
            called, path = product.product.name, product.weight_path
            weight = "" if path is None else path.removesuffix(".weight").split(".")[-1]
            weight = "cluster" if weight.isdigit() else weight
            assert called in (weight, *(OF_TWO if path is None else ())) or (
                makes.get(called) == weight or (called == "logits" and weight in ("embedding", "router", "cluster"))
            ), product


@given(strategies.specs())
def test_no_two_kept_tensors_of_a_part_share_a_name(model: Model) -> None:
    for _, part, seen in runs(model, Pass(tokens=4, width=2)):
        called = [saved.name for saved in memory(part).saves(seen)]
        assert len(called) == len(set(called)), called


def test_yarn_whose_ramp_begins_below_the_first_pair() -> None:
    """d = 8, 64 tokens: 32 turns are at pair -0.50, so at 0; one turn at 1.01, so at 2. Pair 1 is half way between."""
    scaling = spec.YaRN(factor=4.0, original_context=64)
    plain = [10000 ** (-2 * i / 8) for i in range(4)]
    wanted = [plain[0], plain[1] * (0.5 / 4 + 0.5), plain[2] / 4, plain[3] / 4]
    assert Rotary(d_rotary=8, scaling=scaling).inverse_frequencies() == pytest.approx(wanted)


# Not as many times as many for twice the batch: what all rows share, what is drawn between every two of them, and
# bytes of a fixed width (choices of experts, masks).
SHARED = {"scale", "factor", "positions", "ahead", "projected", "distances", "cosines"}
WHOLES = {kind.__name__ for kind in whole.WHOLES}
FIXED_WIDTH = {"MixtureOfExperts", "Router", *WHOLES, "Vision", "Contrast"}
UNLIKE = (
    "gpt2",
    "llama-3.2-1b",
    "bert-base-uncased",
    "t5-small",
    "transformer-base",
    "vit-base-patch16-224",
    "gemma-2-2b",
    "bloom-560m",
    "palm-8b",
    "chinchilla-70b",
    "deepseek-v2",
    "gpt-oss-20b",
    "switch-base-8",
    "clip-vit-base-patch32",
    "llava-1.5-7b",
    "falcon-7b",
    "phi-2",
    "command-r-35b",
)


@pytest.mark.parametrize("logits", ["all", "last", "pooled"])
@pytest.mark.parametrize("name", UNLIKE)
def test_twice_the_batch_and_twice_the_width_are_twice_as_much(name: str, logits: Any) -> None:  # noqa: ANN401
    model = find(name).spec()
    first = replace(model, blocks=model.blocks[:1]) if name != "clip-vit-base-patch32" else model

    def declared(batch: int, width: int) -> dict[str, tuple[Part, Pass]]:
        source = 5 if "source" in model.reads else None
        run = Pass(tokens=6, batch=batch, source=source, width=width, logits=logits)
        return {path: (part, seen) for path, part, seen in runs(first, run)}

    once, twice, wide = declared(2, 4), declared(4, 4), declared(2, 8)
    with_experts = {
        path.rsplit(".", 1 + n)[0]
        for path, (part, _) in once.items()
        for n in range(3)
        if type(part).__name__ == "MixtureOfExperts"
    }
    for path, (part, run) in once.items():
        kind = type(part).__name__
        if kind not in ("Rotary", *WHOLES, "Vision", "Contrast"):
            assert memory(part).peak_bytes(twice[path][1]) == 2 * memory(part).peak_bytes(run), path
        if kind not in FIXED_WIDTH and path not in with_experts:
            assert memory(part).peak_bytes(wide[path][1]) == 2 * memory(part).peak_bytes(run), path
        more = {saved.name: saved.size for saved in memory(part).saves(twice[path][1])}
        for saved in memory(part).saves(run):
            shared = saved.shared or saved.name in SHARED or saved.name == "mask"
            assert shared or more[saved.name] == 2 * saved.size, (path, saved)
        flops = [(product.name, product.flops) for product in part.multiplies(twice[path][1])]
        for product, (called, doubled) in zip(part.multiplies(run), flops, strict=True):
            assert called in ("cosines", "distances") or doubled == 2 * product.flops, (path, product)


def test_room_of_cross_attention_by_hand() -> None:
    """2 texts of 5 tokens read 2 of 7: 3 heads of 4, of vectors of 8 and 10, in 2 bytes; the reference keeps scores.

    q 2 x 5 x 12 x 2 = 240, k and v 2 x (2 x 7 x 12 x 2) = 672; 2 x 5 x 3 x 7 = 210 scores twice in 2 bytes and twice
    in 4, 2,520; the result 2 x 5 x 8 x 2 = 160. In 4 bytes 480 + 1,344 + 210 x 8 + 320.
    """
    part = spec.CrossAttention(d_model=8, d_source=10, n_heads=3, d_head=4)
    run = Pass(tokens=5, batch=2, source=7, width=2, kernel="reference")
    assert memory(part).peak_bytes(run) == 240 + 672 + 2520 + 160
    assert memory(part).peak_bytes(replace(run, width=4)) == 480 + 1344 + 1680 + 320
    assert memory(part).peak_bytes(replace(run, kernel="fused")) == 240 + 672 + 240 + 160


def test_a_predictor_is_as_wide_as_its_embedding() -> None:
    ((_, predictor), *_) = find("deepseek-v3").spec().extras()
    assert isinstance(predictor, Predictor)
    narrow = find("gpt2").spec()
    for field, value in (
        ("block", narrow.blocks[0]),
        ("head", replace(predictor.head, d_model=768)),
        ("head", SharedHead(d_model=predictor.d_model, n_vocab=5)),
        ("norm", narrow.norm),
        ("token_norm", narrow.norm),
        ("stream_norm", narrow.norm),
    ):
        with pytest.raises(InputError, match=f"Predictor.{field}"):
            replace(predictor, **{field: value})


def test_llama_3s_ramp_by_hand() -> None:
    """A pair that turns a radian a token turns 16 / 2 pi = 2.546 times in 16: between 1 and 4, 0.5155 of the way."""
    scaling = spec.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
    way = (16 / (2 * math.pi) - 1) / 3
    (found,) = Rotary(d_rotary=2, scaling=scaling).inverse_frequencies()
    assert found == pytest.approx((1 - way) / 8 + way)
    assert way == pytest.approx(0.5155, abs=1e-4)


def test_a_stack_has_blocks_and_a_tower_no_images_of_its_own() -> None:
    model = find("llava-1.5-7b").spec()
    with pytest.raises(InputError, match="1 to 1024"):
        replace(model, blocks=())
    assert isinstance(model, VisionLanguageModel)
    run = Pass(tokens=700, images=1)
    for name in ("tower", "projector"):
        seen = model.vision.child_run(name, run)
        assert seen is not None
        assert seen.images == 0


def test_slopes_of_alibi_are_the_papers() -> None:
    """Press et al. 2022: halves for 8 heads; for 6 those of 4, and of 8 every other one."""
    assert spec.Alibi(n_heads=8).slopes == tuple(2.0**-i for i in range(1, 9))
    assert spec.Alibi(n_heads=6).slopes == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert spec.Alibi(n_heads=112).slopes[62:66] == pytest.approx((2**-7.875, 2**-8, 2**-0.0625, 2**-0.1875))


def test_what_norms_hold() -> None:
    vector = (5,)
    assert {name: w.shape for name, w in LayerNorm(d=5).holds().items()} == {"weight": vector, "bias": vector}
    assert {*LayerNorm(d=5, gain=False).holds()} == {"bias"}
    assert {*LayerNorm(d=5, bias=False).holds()} == {"weight"}
    assert {*RMSNorm(d=5).holds()} == {*RMSNorm(d=5, gain="offset").holds()} == {"weight"}
    assert RMSNorm(d=5, gain="none").holds() == {}


def test_equal_blocks_are_written_once() -> None:
    model = find("llama-2-7b").spec()
    text = spec.dumps(model)
    assert text.count('"repeat": 32') == 1
    assert spec.loads(text) == model


def test_one_layer_that_sees_ahead_is_enough_for_no_decoding() -> None:
    model = find("gpt2").spec()
    branches = tuple(
        replace(branch, body=replace(branch.body, causal=False)) if isinstance(branch.body, Attention) else branch
        for branch in model.blocks[3].branches
    )
    ahead = replace(model.blocks[3], branches=branches)
    assert model.decodes
    assert not replace(model, blocks=(*model.blocks[:3], ahead, *model.blocks[4:])).decodes


SHOWN = """\
TextEncoder(
  name='toy',
  embedding=TokenEmbedding(n_vocab=5, d_model=8),
  blocks=[
    2 × Block(branches=[Branch(name='x', norm=RMSNorm(d=8), body=MLP(d_model=8, d_ff=9, activation='relu'))]),
  ],
  max_positions=4,
)"""


def test_a_part_is_shown_with_what_is_in_it_indented() -> None:
    body = spec.MLP(d_model=8, d_ff=9, activation="relu")
    block = spec.Block(branches=(spec.Branch(name="x", norm=RMSNorm(d=8), body=body),))
    embedding = spec.TokenEmbedding(n_vocab=5, d_model=8)
    assert show(spec.TextEncoder(name="toy", embedding=embedding, blocks=(block,) * 2, max_positions=4)) == SHOWN


@pytest.mark.parametrize("name", UNLIKE)
def test_every_weight_has_a_role_that_there_is(name: str) -> None:
    for path, weight, _ in spec.weights(find(name).spec()):
        assert weight.role in typing.get_args(Role), path


def test_maps_into_the_stream_are_known_as_such() -> None:
    """They alone are drawn smaller the deeper the stack."""
    model = find("llama-2-7b").spec()
    starts = {
        path.split(".")[-2]: weight.start for path, weight, _ in spec.weights(model) if path.startswith("blocks.0")
    }
    assert starts == {
        "norm": "ones",
        **dict.fromkeys(("o", "down"), "depth_scaled"),
        **dict.fromkeys(("q", "k", "v", "gate", "up"), "normal"),
    }
    narrow = spec.TokenEmbedding(n_vocab=9, d_model=8, d_table=4).local_weights()
    assert {name: w.shape for name, w in narrow.items()} == {"weight": (9, 4), "project.weight": (8, 4)}


def test_the_scale_of_latent_scores_by_hand() -> None:
    """DeepSeek-V2: 128 + 64 numbers a head, and YaRN's factor of 40 with mscale 1: (0.1 ln 40 + 1)^2."""
    (latent, *_) = (part for _, part in walk(find("deepseek-v2").spec()) if isinstance(part, spec.LatentAttention))
    assert latent.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-4)
    assert replace(latent, mscale=None).scale == pytest.approx(192**-0.5)


def test_what_an_encoder_and_a_projector_see() -> None:
    model = find("t5-small").spec()
    seen = model.child_run("encoder", Pass(tokens=3, source=7))
    assert seen is not None
    assert (seen.tokens, seen.source, seen.images, seen.logits) == (7, 0, 0, "all")
    merging = spec.MLPProjector(widths=(32, 8, 8), activation="gelu", merge=2)
    assert [merging.fits(patches, side) for patches, side in ((16, 4), (15, 4), (9, 3))] == [True, False, False]
    assert replace(merging, merge=1).fits(9, 3)


def test_a_tied_head_is_as_wide_as_its_table_and_patches_are_counted_with_their_class() -> None:
    model = find("gpt2").spec()
    assert isinstance(model.head, spec.TiedHead)
    with pytest.raises(InputError, match="d_table"):
        replace(model, head=replace(model.head, d_table=4))
    patches = find("vit-base-patch16-224").spec().embedding
    assert isinstance(patches, spec.PatchEmbedding)
    assert (patches.n_patches, patches.n_tokens) == (196, 197)
    assert replace(patches, class_token="none").n_tokens == 196
    assert replace(patches, n_registers=4).n_tokens == 201
