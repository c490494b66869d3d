"""Hypothesis strategies for tiny specs that are awkward on purpose, and models of them with every parameter drawn.

Widths are odd, n_heads * d_head is seldom d_model, blocks differ from each other, windows are shorter than the texts.
Strategies are kept (`@cache`) because hypothesis checks each new one, which takes longer than drawing from it.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from asbuilt.nn import build, stored_tensors
from asbuilt.nn.model import Model
from asbuilt.spec import (
    ACTIVATIONS,
    CELLS,
    DECAYS,
    DELTA_GATES,
    GROUP_SCORES,
    INTERPOLATIONS,
    LABELLED,
    MLP,
    OUTPUT_GATES,
    PLAIN_GATINGS,
    POOLER_ACTIVATIONS,
    RGLRU,
    SCORINGS,
    SINUSOID_LAYOUTS,
    WEIGHINGS,
    XIELU,
    AdaptiveEmbedding,
    AdaptiveHead,
    Alibi,
    AlternatingUpdates,
    Attention,
    AttentionPooling,
    AudioEncoder,
    AudioLanguageModel,
    AxialPositions,
    BiasTable,
    Block,
    BlockIndexer,
    Branch,
    CausalConvolution,
    CentredConvolution,
    Centres,
    ChannelMixing,
    ClampedGate,
    Classifier,
    ClusterHead,
    CompressedAttention,
    Compressor,
    Contrast,
    ConvolutionModule,
    ConvolvedPatches,
    ConvolvedProjector,
    CrossAttention,
    DeltaTimeMixing,
    DiagonalStateSpace,
    Differential,
    Disentangled,
    DistanceTable,
    DynamicNTK,
    EmbeddingProjection,
    EncoderDecoder,
    EntryIndexer,
    ExpertGroups,
    FeedForward,
    FrequencyFactors,
    GatedConvolution,
    GatedDeltaNet,
    GatedMLP,
    GridAttention,
    GridConvolution,
    GridPatches,
    GridPositions,
    GridVision,
    HashedTable,
    Head,
    HeadNorm,
    HeadTransform,
    Hearing,
    HyperConnection,
    ImageEncoder,
    Indexer,
    InvertedResidual,
    Labelled,
    LanguageModel,
    LatentAttention,
    Laurel,
    LayerNorm,
    LearnedPositions,
    LightningAttention,
    LinearAttention,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Lora,
    Mamba,
    Mamba2,
    MatrixLSTM,
    MelEmbedding,
    MelSubsampling,
    Mixer,
    MixtureOfExperts,
    MLPProjector,
    NGrams,
    Norm,
    OwnTokens,
    Parallel,
    Part,
    PatchEmbedding,
    PerLayerEmbedding,
    PerLayerInput,
    PixelConvolution,
    Plane,
    PooledProjector,
    Pooler,
    Predictor,
    ProjectedStreams,
    Projection,
    Projector,
    Proportional,
    QueryTemperature,
    Recurrent,
    RelativeBuckets,
    RelativeProjection,
    RMSNorm,
    Rotary,
    Router,
    Scaling,
    ScoreBiases,
    Sections,
    SharedChoice,
    SharedEmbedding,
    SharedHead,
    SharedTransformer,
    ShortConvolution,
    SideTransformer,
    Sinusoids,
    SoftplusScale,
    StreamMerge,
    TextEncoder,
    TiedHead,
    TiledVision,
    TileEmbedding,
    TilePatches,
    TilePositions,
    TimeMixing,
    TokenCluster,
    TokenEmbedding,
    TokenShift,
    TypeEmbedding,
    Vision,
    VisionLanguageModel,
    Windowed,
    YaRN,
    buffers,
    walk,
)
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.attention import order_matters
from asbuilt.spec.delta_time_mixing import TARGETS as DELTA_TIME_TARGETS
from asbuilt.spec.linear import Map, Mapped
from asbuilt.spec.own_tokens import Through
from asbuilt.spec.positions import rotaries_by_length
from asbuilt.spec.vision import CLASS_TOKENS, READS

# What every drawn model can hold. The tests' texts are shorter than half of it.
CONTEXT = 64
SEEDS = st.integers(0, 2**32 - 1)
EPS = st.sampled_from((1e-6, 1e-5, 1e-2))
PAIRINGS = ("halves", "adjacent")


@cache
def norms(d: int) -> SearchStrategy[Norm]:
    """Either norm over `d` numbers."""
    rms = st.builds(RMSNorm, d=st.just(d), eps=EPS, gain=st.sampled_from(("weight", "offset", "none")))
    return rms | st.builds(LayerNorm, d=st.just(d), eps=EPS, gain=st.booleans(), bias=st.booleans())


@cache
def maybe_norms(d: int) -> SearchStrategy[Norm | None]:
    """Either norm, or none."""
    return st.none() | norms(d)


@cache
def norms_of_heads(d: int, n: int) -> SearchStrategy[Norm | HeadNorm | None]:
    """A norm of n heads of `d` numbers: of each, of all together, or of each with gains of its own; or none."""
    own = st.builds(HeadNorm, d=st.just(d), n_heads=st.just(n), eps=EPS, bias=st.booleans())
    return maybe_norms(d) | maybe_norms(n * d) | own


@cache
def scalings(d_rotary: int) -> SearchStrategy[Scaling | None]:
    """Every scaling, each threshold within the texts."""
    factors, originals = st.sampled_from((1.5, 4.0, 8.0)), st.sampled_from((4, 8, 16))
    yarn = st.builds(
        YaRN,
        factor=factors,
        original_context=originals,
        beta_fast=st.sampled_from((1.0, 2.0)),
        beta_slow=st.sampled_from((0.1, 0.5)),
        attention_factor=st.none() | st.just(1.3),
        truncate=st.booleans(),
    )
    llama3 = st.builds(
        Llama3Scaling,
        factor=factors,
        low_freq_factor=st.just(1.0),
        high_freq_factor=st.just(4.0),
        original_context=originals,
    )
    own = st.tuples(*[st.sampled_from((0.5, 1.0, 3.0))] * (d_rotary // 2))
    stored = st.builds(FrequencyFactors, factors=own)
    long = st.builds(
        LongRope,
        short_factors=own,
        long_factors=own,
        original_context=originals,
        attention_factor=st.sampled_from((1.0, 1.3)),
        long_attention_factor=st.sampled_from((None, 0.8)),
    )
    some = st.builds(Proportional, n_pairs=st.integers(1, d_rotary // 2), factor=st.sampled_from((1.0, 2.0)))
    kinds = [st.none(), st.builds(LinearScaling, factor=factors), yarn, llama3, stored, long, some]
    if d_rotary > 2:
        kinds.append(st.builds(DynamicNTK, factor=factors, original_context=originals))
    return st.one_of(kinds)


@cache
@st.composite
def sections(draw: DrawFn, n_pairs: int) -> Sections:
    """Pairs of time, rows and columns, one after the other or in turns."""
    rows = draw(st.integers(0, n_pairs))
    columns = draw(st.integers(0, n_pairs - rows))
    pairs = (n_pairs - rows - columns, rows, columns)
    turns = max(3 * rows - 2, 3 * columns - 1) < n_pairs
    return Sections(pairs=pairs, interleaved=turns and draw(st.booleans()))


@cache
@st.composite
def rotaries(draw: DrawFn, d_head: int) -> Rotary:
    """Rotary positions on all or some of a head."""
    d_rotary = 2 * draw(st.integers(1, d_head // 2))
    theta = draw(st.sampled_from((10.0, 100.0, 10000.0)))
    pairing = draw(st.sampled_from(("halves", "adjacent")))
    if d_rotary % 4 == 0 and draw(st.booleans()):
        return Rotary(d_rotary=d_rotary, theta=theta, pairing=pairing, grid=draw(st.integers(1, 3)))
    if draw(st.booleans()):
        orders = st.sampled_from(({}, {"alternating": True}, {"columns_first": True}))
        planes = st.builds(lambda order, staggered: Plane(**order, staggered=staggered), orders, st.booleans())
        plane = planes if d_rotary % 4 == 0 else st.nothing()
        plane |= st.just(Plane(timed=True)) if d_rotary % 6 == 0 else st.nothing()
        centres = st.builds(Centres, n_side=st.integers(1, 3), n_before=st.integers(0, 2))
        plane |= centres if d_rotary % 4 == 0 else st.nothing()
        return Rotary(d_rotary=d_rotary, theta=theta, pairing=pairing, axes=draw(sections(d_rotary // 2) | plane))
    return Rotary(d_rotary=d_rotary, theta=theta, pairing=pairing, scaling=draw(scalings(d_rotary)))


@cache
@st.composite
def projected_distances(draw: DrawFn, n_heads: int, d_head: int, window: int | None) -> RelativeProjection:
    """A projection of distances, clamped or not, with vectors added to queries or without."""
    return RelativeProjection(
        d_model=2 * draw(st.integers(1, 3)),
        n_heads=n_heads,
        d_head=d_head,
        window=window,
        max_distance=draw(st.none() | st.integers(1, 9)),
        biases=draw(st.none() | st.builds(ScoreBiases, n_heads=st.just(n_heads), d_head=st.just(d_head))),
        scale=draw(st.sampled_from((1.0, 0.6))),
        endpoint=draw(st.booleans()),
    )


@cache
@st.composite
def attentions(draw: DrawFn, d_model: int, causals: tuple[bool, ...] = (True,)) -> Attention:
    """MHA, GQA and MQA with whatever else attention can have."""
    n_kv_heads, group = draw(st.sampled_from(((1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1), (1, 4), (3, 2))))
    d_head = draw(st.integers(1, 7))
    heads, causal = n_kv_heads * group, draw(st.sampled_from(causals))
    window = draw(st.none() | st.integers(1, 7))
    alibi = st.builds(Alibi, n_heads=st.just(heads), bias_max=st.sampled_from((8.0, 5.0)))
    turned = rotaries(d_head) if d_head > 1 else st.nothing()
    far = st.just(draw(projected_distances(heads, d_head, window)))
    positions = draw(st.none() | turned | alibi | (far if causal else st.nothing()))
    chunks = window is None and causal and not isinstance(positions, RelativeProjection)
    chunk = draw(st.none() | st.integers(1, 7)) if chunks else None
    strided = causal and chunk is None and not isinstance(positions, RelativeProjection)
    factors = st.builds(SoftplusScale, d=st.just(d_head))
    q_norm, k_norm = draw(norms_of_heads(d_head, heads) | factors), draw(norms_of_heads(d_head, n_kv_heads))
    orders = isinstance(positions, Rotary) and (order_matters(q_norm) or order_matters(k_norm))
    as_keys = k_norm is not None and draw(st.booleans())
    d_value = None if as_keys else draw(st.none() | st.integers(1, 9))
    v_norm = draw((norms if as_keys else maybe_norms)(d_value or d_head))
    twice = RMSNorm(d=2 * (d_value or d_head), eps=draw(EPS), gain=draw(st.sampled_from(("weight", "none"))))
    start = draw(st.sampled_from((0.2, 0.7)))
    pairs = n_kv_heads % 2 == 0 and not isinstance(positions, RelativeProjection) and draw(st.booleans())
    stride = draw(st.none() | st.integers(2, 5)) if strided else None
    summary = draw(st.none() | st.integers(1, chunk - 1)) if chunk and chunk > 1 else None
    turned = isinstance(positions, Rotary)
    repeats = causal and not turned and k_norm is None and v_norm is None and stride is None and summary is None
    return Attention(
        d_model=d_model,
        n_heads=heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_value=d_value,
        v_norm=v_norm,
        caches_input=repeats and draw(st.booleans()),
        value_scale=draw(st.sampled_from((1.0, 0.6))),
        values_are_keys=as_keys,
        causal=causal,
        positions=positions,
        bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        q_norm=q_norm,
        k_norm=k_norm,
        rotate_first=orders and draw(st.booleans()),
        window=window,
        chunk=chunk,
        stride=stride,
        summary=summary,
        softcap=draw(st.none() | st.sampled_from((1.0, 5.0))),
        sinks=draw(st.booleans()),
        scale=draw(st.none() | st.just(0.7)),
        gating=draw(st.sampled_from((None, None, "channel", "head"))),
        differential=Differential(n_heads=heads, d_head=d_head, norm=twice, start=start) if pairs else None,
        temperature=draw(
            st.none() | st.builds(QueryTemperature, scale=st.just(0.3), floor=st.just(3), from_zero=st.booleans())
        ),
    )


@cache
@st.composite
def choosing(draw: DrawFn, d_model: int) -> Attention:
    """Attention to chosen blocks of keys."""
    drawn = draw(attentions(d_model))
    none: dict[str, Any] = dict.fromkeys(("window", "chunk", "stride", "summary", "differential"))
    none |= {} if isinstance(drawn.positions, Rotary | None) else {"positions": None}
    whole = replace(drawn, **none, sinks=False, caches_input=False)
    return replace(whole, indexer=draw(block_indexers(d_model, whole.n_kv_heads)))


@cache
@st.composite
def latents(draw: DrawFn, d_model: int) -> LatentAttention:
    """Latent attention with and without ranks, norms, positions; values narrower, as wide and wider than keys."""
    d_rope, q_rank, kv_rank = 2 * draw(st.integers(1, 2)), draw(st.none() | st.integers(1, 7)), draw(st.integers(1, 7))
    positions = draw(
        st.none()
        | rotaries(d_rope).map(lambda rotary: replace(rotary, d_rotary=d_rope, scaling=None, axes=None))
        | st.builds(Rotary, d_rotary=st.just(d_rope), scaling=scalings(d_rope))
    )
    yarn = positions is not None and isinstance(positions.scaling, YaRN)
    return LatentAttention(
        d_model=d_model,
        n_heads=draw(st.integers(1, 4)),
        q_rank=q_rank,
        kv_rank=kv_rank,
        d_nope=draw(st.integers(1, 5)),
        d_rope=d_rope,
        d_value=draw(st.integers(1, 9)),
        q_norm=None if q_rank is None else draw(maybe_norms(q_rank)),
        kv_norm=draw(maybe_norms(kv_rank)),
        positions=positions,
        mscale=draw(st.none() | st.just(0.7)) if yarn else None,
        bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        indexer=None if q_rank is None else draw(st.none() | indexers(d_model, q_rank)),
    )


@cache
@st.composite
def compressed(draw: DrawFn, d_model: int) -> CompressedAttention:
    """Attention to a short window alone, with all entries of short blocks, or with chosen ones."""
    groups, q_rank, d_head = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(2, 7))
    ratio, overlap = draw(st.integers(1, 4)), draw(st.booleans())
    rotary = st.none() | st.builds(
        Rotary,
        d_rotary=st.just(2 * draw(st.integers(1, d_head // 2))),
        theta=st.just(10.0),
        pairing=st.just("adjacent"),
    )
    entries = Compressor(
        d_model=d_model,
        d_head=d_head,
        ratio=ratio,
        overlap=overlap,
        norm=draw(maybe_norms(d_head)),
        positions=draw(rotary),
    )
    keys = replace(entries, d_head=4, norm=draw(maybe_norms(4)), positions=Rotary(d_rotary=4, theta=10.0))
    indexer = EntryIndexer(q_rank=q_rank, n_heads=2, top_k=draw(st.integers(1, 4)), compressor=keys)
    kind = draw(st.integers(0, 2))
    return CompressedAttention(
        d_model=d_model,
        n_heads=groups * draw(st.integers(1, 2)),
        d_head=d_head,
        q_rank=q_rank,
        window=draw(st.integers(1, 7)),
        groups=groups,
        o_rank=draw(st.integers(1, 4)),
        q_norm=draw(maybe_norms(q_rank)),
        head_norm=draw(maybe_norms(d_head)),
        kv_norm=draw(maybe_norms(d_head)),
        positions=draw(rotary),
        compressor=entries if kind else None,
        indexer=indexer if kind == 2 else None,
    )


@cache
@st.composite
def block_indexers(draw: DrawFn, d_model: int, n_heads: int) -> BlockIndexer:
    """One that chooses few blocks, of a key or more. RoPE tells equal tokens apart, whose scores would be equal."""
    d_head, top_k = 4 * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return BlockIndexer(
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_head,
        block=draw(st.integers(1, 4)),
        top_k=top_k,
        local=draw(st.integers(1, top_k)),
        q_norm=draw(maybe_norms(d_head)),
        k_norm=draw(maybe_norms(d_head)),
        positions=Rotary(
            d_rotary=draw(st.sampled_from((4, d_head))), pairing=draw(st.sampled_from(PAIRINGS)), theta=10.0
        ),
    )


@cache
@st.composite
def indexers(draw: DrawFn, d_model: int, q_rank: int) -> Indexer:
    """One that chooses few keys. RoPE tells equal tokens apart, whose scores would else be equal but for rounding."""
    d_head = 4 * draw(st.integers(1, 2))
    return Indexer(
        d_model=d_model,
        q_rank=q_rank,
        n_heads=draw(st.integers(1, 3)),
        d_head=d_head,
        top_k=draw(st.integers(1, 7)),
        k_norm=draw(maybe_norms(d_head)),
        positions=Rotary(
            d_rotary=draw(st.sampled_from((4, d_head))), pairing=draw(st.sampled_from(PAIRINGS)), theta=10.0
        ),
    )


@cache
def mixers(d_model: int) -> SearchStrategy[Mixer]:
    """Any causal mixer, whatever it remembers."""
    usual = (
        attentions(d_model) | choosing(d_model) | latents(d_model) | linear_attentions(d_model) | compressed(d_model)
    )
    return (
        usual
        | lightnings(d_model)
        | matrix_lstms(d_model)
        | baselines(d_model)
        | recurrences(d_model)
        | state_spaces(d_model)
        | delta_nets(d_model)
    )


@cache
def linear_attentions(d_model: int) -> SearchStrategy[LinearAttention]:
    """Linear attention, whose state is of one size."""
    return st.builds(
        LinearAttention,
        d_model=st.just(d_model),
        n_heads=st.integers(1, 4),
        d_head=st.integers(1, 7),
        bias=st.booleans(),
        output_bias=st.booleans(),
        eps=st.sampled_from((1e-6, 0.1)),
    )


@cache
@st.composite
def lightnings(draw: DrawFn, d_model: int) -> LightningAttention:
    """Lightning attention, whose heads forget sooner or later."""
    n_heads, d_head = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    return LightningAttention(
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_head,
        decay=draw(st.sampled_from((1e-5, 0.3, 1.0))),
        norm=draw(norms(n_heads * d_head)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )


@cache
@st.composite
def matrix_lstms(draw: DrawFn, d_model: int) -> MatrixLSTM:
    """The mLSTM, with gates capped narrowly or widely."""
    n_heads, d_value = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    return MatrixLSTM(
        d_model=d_model,
        n_heads=n_heads,
        d_key=draw(st.integers(1, 5)),
        d_value=d_value,
        norm=HeadNorm(d=d_value, n_heads=n_heads, eps=draw(EPS), bias=draw(st.booleans())),
        cap=draw(st.sampled_from((0.5, 15.0))),
        eps=draw(st.sampled_from((1e-6, 0.1))),
        bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )


@cache
def recurrent(d_model: int) -> SearchStrategy[Recurrent]:
    """A recurrent network of any cell."""
    return st.builds(
        Recurrent,
        d_model=st.just(d_model),
        d_hidden=st.integers(1, 7),
        cell=st.sampled_from(CELLS),
        bias=st.booleans(),
        output_bias=st.booleans(),
    )


@cache
def causal_convolutions(d_model: int) -> SearchStrategy[CausalConvolution]:
    """A convolution over all channels, of tokens next to each other or apart."""
    return st.builds(
        CausalConvolution,
        d_model=st.just(d_model),
        kernel=st.integers(1, 4),
        dilation=st.integers(1, 3),
        bias=st.booleans(),
    )


@cache
def baselines(d_model: int) -> SearchStrategy[Mixer]:
    """What came before attention."""
    return recurrent(d_model) | causal_convolutions(d_model)


@cache
def recurrences(d_model: int) -> SearchStrategy[Mixer]:
    """A mixer whose state is all that it remembers."""
    return gated_convolutions(d_model) | convolution_modules(d_model) | rg_lrus(d_model) | time_mixings(d_model)


@cache
def time_mixings(d_model: int) -> SearchStrategy[Mixer]:
    """RWKV's mixers."""
    return (
        st.builds(
            TimeMixing,
            d_model=st.just(d_model),
            d_state=st.integers(1, 9),
            shift=token_shifts(d_model, "k", "v", "r"),
        )
        | channel_mixings(d_model, receptance=True)
        | channel_mixings(d_model, receptance=False)
        | delta_time_mixings(d_model)
    )


@cache
def token_shifts(d_model: int, *targets: str) -> SearchStrategy[TokenShift]:
    """What mixes tokens with those before them."""
    return st.builds(TokenShift, d_model=st.just(d_model), targets=st.just(targets), of_past=st.booleans())


@cache
def channel_mixings(d_model: int, receptance: bool) -> SearchStrategy[ChannelMixing]:
    """A feed-forward of shifted tokens."""
    targets = ("up", "r") if receptance else ("up",)
    return st.builds(
        ChannelMixing,
        d_model=st.just(d_model),
        d_ff=st.integers(1, 9),
        receptance=st.just(receptance),
        shift=token_shifts(d_model, *targets),
    )


@cache
@st.composite
def delta_time_mixings(draw: DrawFn, d_model: int) -> DeltaTimeMixing:
    """RWKV-7's time mixing, of values of its own."""
    n_heads, d_value, ranks = draw(st.integers(1, 3)), draw(st.integers(2, 5)), st.integers(1, 4)
    return DeltaTimeMixing(
        d_model=d_model,
        n_heads=n_heads,
        d_key=draw(st.integers(1, 5)),
        d_value=d_value,
        shift=draw(token_shifts(d_model, *DELTA_TIME_TARGETS)),
        norm=HeadNorm(d=d_value, n_heads=n_heads, eps=draw(EPS), bias=draw(st.booleans())),
        decay_rank=draw(ranks),
        rate_rank=draw(ranks),
        gate_rank=draw(ranks),
        length_eps=draw(st.sampled_from((1e-12, 0.1))),
    )


@cache
def convolutions(channels: int) -> SearchStrategy[ShortConvolution]:
    """A short convolution of so many channels."""
    return st.builds(
        ShortConvolution,
        channels=st.just(channels),
        kernel=st.integers(1, 5),
        bias=st.booleans(),
        activation=st.sampled_from(("silu", None)),
    )


@cache
def gated_convolutions(d_model: int) -> SearchStrategy[GatedConvolution]:
    """A convolution between two gates."""
    conv = st.integers(1, 9).flatmap(convolutions)
    return st.builds(GatedConvolution, d_model=st.just(d_model), conv=conv, bias=st.booleans())


@cache
@st.composite
def convolution_modules(draw: DrawFn, d_model: int, *, cached: bool = True) -> ConvolutionModule:
    """A convolution after a gated linear unit, with a norm or without."""
    conv = replace(draw(st.integers(1, 9).flatmap(convolutions)), activation=None, cached=cached)
    return ConvolutionModule(
        d_model=d_model,
        conv=conv,
        norm=draw(maybe_norms(conv.channels)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
    )


@st.composite
def rg_lrus(draw: DrawFn, d_model: int) -> RGLRU:
    """A gated recurrence, seldom as wide as the stream."""
    heads = draw(st.integers(1, 3))
    width = heads * draw(st.integers(1, 4))
    return RGLRU(
        d_model=d_model,
        d_rnn=width,
        n_heads=heads,
        conv=draw(convolutions(width)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
    )


@cache
def state_spaces(d_model: int) -> SearchStrategy[Mixer]:
    """Any state space."""
    return mamba2s(d_model) | mambas(d_model) | diagonal_state_spaces(d_model)


@cache
def diagonal_state_spaces(d_model: int) -> SearchStrategy[DiagonalStateSpace]:
    """A state space that is the same for all tokens."""
    return st.builds(DiagonalStateSpace, d_model=st.just(d_model), d_state=st.integers(1, 5), bias=st.booleans())


@cache
@st.composite
def mambas(draw: DrawFn, d_model: int) -> Mamba:
    """Mamba with norms of what it selects or without."""
    width, d_state, rank = draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return Mamba(
        d_model=d_model,
        d_inner=width,
        d_state=d_state,
        dt_rank=rank,
        conv=ShortConvolution(channels=width, kernel=draw(st.integers(1, 5)), bias=draw(st.booleans())),
        bias=draw(st.booleans()),
        dt_norm=draw(maybe_norms(rank)),
        b_norm=draw(maybe_norms(d_state)),
        c_norm=draw(maybe_norms(d_state)),
    )


@cache
@st.composite
def mamba2s(draw: DrawFn, d_model: int) -> Mamba2:
    """Mamba-2 with few or many groups, gated in every way, its steps limited or not."""
    n_groups, heads, d_head = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    d_state = draw(st.integers(1, 6))
    conv = ShortConvolution(
        channels=n_groups * (heads * d_head + 2 * d_state), kernel=draw(st.integers(1, 5)), bias=draw(st.booleans())
    )
    return Mamba2(
        d_model=d_model,
        n_heads=n_groups * heads,
        d_head=d_head,
        d_state=d_state,
        n_groups=n_groups,
        conv=conv,
        bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        gate=draw(st.sampled_from(OUTPUT_GATES)),
        eps=draw(EPS),
        dt_min=draw(st.sampled_from((0.0, 0.3))),
        dt_max=draw(st.none() | st.just(1.1)),
        scales=draw(st.none() | st.just((0.7, 1.2, 0.8, 1.3, 0.6))),
    )


@cache
@st.composite
def delta_nets(draw: DrawFn, d_model: int) -> GatedDeltaNet:
    """Gated delta nets, decays per head with grouped values, or per channel; gates and decays of one map or two."""
    decays, n_keys = draw(st.sampled_from(DECAYS)), draw(st.integers(1, 3))
    d_key, d_value = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    n_values = n_keys * (draw(st.integers(1, 3)) if decays == "head" else 1)
    channels, ranks = 2 * n_keys * d_key + n_values * d_value, st.none() | st.integers(1, 4)
    return GatedDeltaNet(
        d_model=d_model,
        n_key_heads=n_keys,
        n_value_heads=n_values,
        d_key=d_key,
        d_value=d_value,
        conv=draw(convolutions(channels)),
        norm=draw(norms(d_value)),
        decays=decays,
        decay_rank=draw(ranks),
        gate_rank=draw(ranks),
        gating=draw(st.sampled_from(DELTA_GATES)),
        length_eps=draw(st.sampled_from((1e-6, 0.1))),
    )


@cache
def feedforwards(d_model: int) -> SearchStrategy[FeedForward]:
    """Any feed-forward part."""
    return dense(d_model) | mixtures(d_model)


@cache
def clamps() -> SearchStrategy[ClampedGate]:
    """Clamps within what they are given."""
    return st.builds(
        ClampedGate,
        alpha=st.sampled_from((1.0, 1.7)),
        limit=st.sampled_from((0.3, 2.0)),
        shift=st.booleans(),
        activated=st.booleans(),
    )


@cache
def dense(d_model: int) -> SearchStrategy[MLP | GatedMLP]:
    """A feed-forward that all tokens pass."""
    fields = {
        "d_model": st.just(d_model),
        "d_ff": st.integers(1, 11),
        "activation": st.sampled_from(ACTIVATIONS),
        "bias": st.booleans(),
    }
    learned = fields | {"activation": st.just(XIELU())}
    clamped: dict[str, Any] = fields | {"activation": st.just("silu"), "clamp": clamps()}
    scaled = fields | {"gate_scale": st.sampled_from((1.0, 0.6))}
    sparse = fields | {"sparsity": st.sampled_from((0.3, 0.9))}
    gated = st.builds(GatedMLP, **scaled) | st.builds(GatedMLP, **clamped) | st.builds(GatedMLP, **sparse)
    return st.builds(MLP, **fields) | gated | st.builds(MLP, **learned)


@cache
@st.composite
def groupings(draw: DrawFn) -> tuple[ExpertGroups, int]:
    """Two or three groups, and the number of experts in each."""
    n_groups, size = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    score = draw(st.sampled_from(GROUP_SCORES if size > 1 else ("best",)))
    return ExpertGroups(n_groups=n_groups, top_groups=draw(st.integers(1, n_groups - 1)), score=score), size


@cache
@st.composite
def routers(draw: DrawFn, d_model: int) -> Router:
    """A router to few or many experts, chosen in every way."""
    groups, size = draw(st.tuples(st.none(), st.integers(1, 6)) | groupings())
    renormalise = draw(st.booleans())
    if groups is None and draw(st.booleans()):
        return draw(near_routers(d_model, size))
    return Router(
        d_model=d_model,
        n_experts=size if groups is None else size * groups.n_groups,
        top_k=draw(st.integers(1, size if groups is None else size * groups.top_groups)),
        scoring=draw(st.sampled_from(SCORINGS)),
        renormalise=renormalise,
        bias=draw(st.booleans()),
        correction=draw(st.booleans()),
        groups=groups,
        eps=draw(st.sampled_from((0.0, 0.1))) if renormalise else 0.0,
        scale=draw(st.sampled_from((1.0, 2.5))),
        norm=draw(maybe_norms(d_model)),
        logit_scale=draw(st.sampled_from((1.0, 0.6))),
        expert_scale=draw(st.booleans()),
    )


@cache
def near_routers(d_model: int, n_experts: int) -> SearchStrategy[Router]:
    """A router whose experts are chosen one after the other."""
    return st.builds(
        Router,
        d_model=st.just(d_model),
        n_experts=st.just(n_experts),
        top_k=st.integers(1, n_experts),
        nearness=st.sampled_from((0.02, 0.5, 2.0)),
        bias=st.booleans(),
        scale=st.sampled_from((1.0, 2.5)),
        norm=maybe_norms(d_model),
        logit_scale=st.sampled_from((1.0, 0.6)),
        expert_scale=st.booleans(),
    )


@cache
@st.composite
def mixtures(draw: DrawFn, d_model: int) -> MixtureOfExperts:
    """Experts, few or many beside the rows, chosen in every way, with and without a shared one."""
    router = draw(routers(d_model))
    shared = draw(st.none() | dense(d_model))
    gating, d_latent = draw(st.sampled_from(PLAIN_GATINGS) | clamps()), draw(st.none() | st.integers(1, 5))
    return MixtureOfExperts(
        d_model=d_model,
        d_ff=draw(st.integers(1, 11)),
        n_experts=router.n_experts,
        activation="silu" if isinstance(gating, ClampedGate) else draw(st.sampled_from(ACTIVATIONS)),
        router=router,
        gating=gating,
        bias=draw(st.booleans()),
        weighs="results" if d_latent else draw(st.sampled_from(WEIGHINGS)),
        d_latent=d_latent,
        latent_bias=d_latent is not None and draw(st.booleans()),
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
        norm=draw(maybe_norms(d_model)),
        post_norm=draw(maybe_norms(d_model)),
        shared_norm=None if shared is None else draw(maybe_norms(d_model)),
        shared_post_norm=None if shared is None else draw(maybe_norms(d_model)),
    )


@cache
def branches(name: str, d_model: int) -> SearchStrategy[Branch]:
    """One residual branch, its norms before, after, on the sum, or none; the stream normed too, scaled, or neither."""
    two = st.tuples(*[st.sampled_from((1.0, 0.6))] * 2)
    other = feedforwards(d_model) | mixers(d_model)
    both = st.builds(Parallel, attention=mixers(d_model), ffn=other, input_scales=two, output_scales=two)
    bodies = {"attention": mixers(d_model), "ffn": feedforwards(d_model), "both": both}
    drawn = st.builds(
        Branch,
        name=st.just(name),
        body=bodies[name],
        norm=maybe_norms(d_model),
        post_norm=maybe_norms(d_model),
        sum_norm=maybe_norms(d_model),
        scale=st.sampled_from((1.0, 0.5)),
        layer_scale=st.booleans(),
        gated=st.booleans(),
        stream_scale=st.sampled_from((1.0, 1.0, 1.5)),
        beside=st.none() | st.none() | laurels(d_model),
    )
    return st.tuples(drawn, st.booleans()).map(
        lambda found: replace(found[0], normed=found[1] and found[0].norm is not None)
    )


@cache
def laurels(d_model: int) -> SearchStrategy[Laurel]:
    """A low-rank residual."""
    return st.builds(Laurel, d_model=st.just(d_model), rank=st.integers(1, 4), norm=maybe_norms(d_model))


@cache
@st.composite
def blocks(draw: DrawFn, d_model: int) -> Block:
    """Attention and feed-forward in either order, side by side in two ways, or attention alone."""
    attention, ffn, both = (draw(branches(name, d_model)) for name in ("attention", "ffn", "both"))
    beside = replace(ffn, parallel=True, normed=False)
    kinds = ((attention, ffn), (ffn, attention), (attention,), (attention, beside), (both,), (attention, beside, both))
    return Block(branches=draw(st.sampled_from(kinds)), scaled=draw(st.booleans()))


@st.composite
def reading(draw: DrawFn, drawn: tuple[Block, ...], d_model: int) -> tuple[tuple[Block, ...], PerLayerEmbedding | None]:
    """The blocks alone, or some of them with a branch more that reads a per-layer embedding, and that."""
    reads = draw(st.lists(st.booleans(), min_size=len(drawn), max_size=len(drawn)))
    if not any(reads) or not draw(st.booleans()):
        return drawn, None
    d, factors = draw(st.integers(1, 5)), st.sampled_from((1.0, 0.7))
    body = PerLayerInput(d_model=d_model, d=d, activation=draw(st.sampled_from(ACTIVATIONS)))
    more = Branch(name="vector", norm=draw(maybe_norms(d_model)), body=body, post_norm=draw(maybe_norms(d_model)))
    blocks = [
        replace(block, branches=(*block.branches, more)) if own else block
        for block, own in zip(drawn, reads, strict=True)
    ]
    vectors = PerLayerEmbedding(
        n_vocab=draw(st.integers(1, 17)),
        n_layers=len(drawn),
        d=d,
        d_model=d_model,
        norm=draw(norms(d)),
        scale=draw(factors),
        project_scale=draw(factors),
        sum_scale=draw(factors),
    )
    return tuple(blocks), vectors


@st.composite
def lending(draw: DrawFn, drawn: list[Block]) -> tuple[Block, ...]:
    """The blocks, or those and one more, whose attention reads the keys and values of one of theirs."""
    found = [
        (i, branch)
        for i, block in enumerate(drawn)
        for branch in block.branches
        if isinstance(branch.body, Attention)
        and not isinstance(branch.body.positions, RelativeProjection)
        and branch.body.indexer is None
    ]
    if not found or not draw(st.booleans()):
        return tuple(drawn)
    i, branch = draw(st.sampled_from(found))
    assert isinstance(branch.body, Attention)
    body = replace(branch.body, caches_input=False)
    lender = replace(branch, body=replace(body, kv_name="lent"))
    named = replace(drawn[i], branches=tuple(lender if one is branch else one for one in drawn[i].branches))
    own = {"k_norm": None, "v_norm": None, "value_scale": 1.0, "values_are_keys": False, "rotate_first": False}
    own["key_bias"] = True
    n_heads = draw(st.integers(1, 2)) * body.n_kv_heads
    positions = body.positions
    kept = isinstance(positions, Alibi | RelativeBuckets) or body.differential is not None
    heads = {} if kept else {"n_heads": n_heads, "q_norm": None}
    reader = replace(branch, parallel=False, body=replace(body, **own, **heads, kv_from="lent"))
    return (*drawn[:i], named, *drawn[i + 1 :], Block(branches=(reader,)))


@st.composite
def biased(draw: DrawFn, drawn: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks, or those and one more, whose queries get the vectors that those of one of theirs get."""
    for i, block in enumerate(drawn):
        for branch in block.branches:
            body = branch.body
            far = body.positions if isinstance(body, Attention) else None
            if isinstance(far, RelativeProjection) and far.biases is not None and draw(st.booleans()):
                first, later = (
                    replace(branch, body=replace(body, positions=replace(far, biases=replace(far.biases, **names))))
                    for names in ({"weights_name": "vectors"}, {"weights_from": "vectors"})
                )
                own = tuple(first if one is branch else one for one in block.branches)
                again = Block(branches=(replace(later, parallel=False),))
                return (*drawn[:i], replace(block, branches=own), *drawn[i + 1 :], again)
    return drawn


@st.composite
def moving(draw: DrawFn, drawn: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks, or those and one more, whose values move towards those of one of theirs."""
    branches = [branch for block in drawn for branch in block.branches]
    found = [branch for branch in branches if isinstance(branch.body, DeltaTimeMixing)]
    if not found or not draw(st.booleans()):
        return drawn
    first = found[0]
    assert isinstance(first.body, DeltaTimeMixing)
    lender = replace(first, body=replace(first.body, value_name="early"))
    named = (replace(b, branches=tuple(lender if x is first else x for x in b.branches)) for b in drawn)
    later = draw(delta_time_mixings(first.body.d_model))
    sizes = {"n_heads": first.body.n_heads, "d_value": first.body.d_value, "norm": first.body.norm}
    reader = replace(later, **sizes, move_rank=draw(st.integers(1, 3)), value_from="early")
    return (*named, Block(branches=(replace(first, parallel=False, body=reader),)))


@cache
@st.composite
def sides(draw: DrawFn, d_model: int) -> SideTransformer:
    """A transformer beside the stream, with low-rank maps or none."""
    usual = lambda one: not isinstance(one.positions, RelativeBuckets | RelativeProjection)  # noqa: E731
    ffn = draw(dense(d_model).filter(lambda one: isinstance(one, GatedMLP) and one.clamp is None))
    assert isinstance(ffn, GatedMLP)
    shared = SharedTransformer(
        norm=draw(maybe_norms(2 * d_model)),
        attention=replace(draw(attentions(d_model).filter(usual)), d_input=2 * d_model),
        ffn_norm=draw(maybe_norms(d_model)),
        ffn=ffn,
    )
    ranks = st.none() | st.integers(1, 3)
    own = shared.attention.inward == ("q", "k", "v") and not shared.attention.caches_input
    return SideTransformer(shared=shared, rank=draw(ranks), attention_rank=draw(ranks) if own else None)


@st.composite
def beside(draw: DrawFn, drawn: tuple[Block, ...], d_model: int) -> tuple[Block, ...]:
    """The blocks alone, or one of them with a side, whose weights up to two more blocks use."""
    if not draw(st.booleans()):
        return drawn
    i, uses, side = draw(st.integers(0, len(drawn) - 1)), draw(st.integers(0, 2)), draw(sides(d_model))
    named = replace(side, shared=replace(side.shared, weights_name="early" if uses else None))
    first, *others = drawn[i].branches
    block = replace(drawn[i], branches=(replace(first, side=named, normed=False), *others))
    borrowed = replace(side.shared, weights_from="early")
    ranks = [draw(st.none() | st.integers(1, 3)) for _ in range(uses)]
    beside = (replace(side, shared=borrowed, rank=n) for n in ranks)
    again = (Branch(name="again", body=draw(dense(d_model)), side=one) for one in beside)
    return (*drawn[:i], block, *drawn[i + 1 :], *(Block(branches=(branch,)) for branch in again))


def shares(part: Part) -> bool:
    """Whether other parts use something of this one, or it something of others.

    Those with numbers of their own that autograd keeps are left out, xIELU and blocks with a factor: it keeps them once
    for all uses, and they are billed for each.
    """
    if isinstance(part, Block) and part.scaled:
        return True
    if isinstance(part, MLP) and isinstance(part.activation, XIELU):
        return True
    if isinstance(part, Attention) and (part.kv_name or part.kv_from):
        return True
    if isinstance(part, DeltaTimeMixing) and (part.value_name or part.value_from):
        return True
    return bool(part.lends or part.borrows) or (isinstance(part, Mixer) and part.choice is not None)


@st.composite
def repeated(draw: DrawFn, drawn: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks alone, or with one or two more after them that use the last one's weights."""
    last = drawn[-1]
    if any(shares(part) for _, part in walk(last)) or not draw(st.booleans()):
        return drawn
    again = (replace(last, weights_from="again"),) * draw(st.integers(1, 2))
    return (*drawn[:-1], replace(last, weights_name="again"), *again)


@cache
def sinusoids(d_model: int) -> SearchStrategy[Sinusoids]:
    """Computed positions, as many as the context or more."""
    return st.builds(
        Sinusoids,
        n_positions=st.integers(CONTEXT, CONTEXT + 3),
        d_model=st.just(d_model),
        theta=st.sampled_from((10.0, 10000.0)),
        layout=st.sampled_from(SINUSOID_LAYOUTS),
    )


@st.composite
def specs(draw: DrawFn, max_blocks: int = 3, alone: bool = True) -> LanguageModel:
    """A whole model of 1 to `max_blocks` blocks that differ from each other, its context CONTEXT tokens.

    One that is not `alone` becomes part of a model that reads more than tokens.
    """
    d_model, n_vocab = draw(st.integers(2, 11)), draw(st.integers(2, 17))
    kind = draw(st.sampled_from((Head, TiedHead)))
    scales = st.sampled_from((1.0, 0.3))
    d_table = draw(st.none() | st.integers(1, 7))
    head: Head | TiedHead | AdaptiveHead = kind(
        d_table=d_table if kind is TiedHead else draw(st.none() | st.integers(1, 7)),
        d_model=d_model,
        n_vocab=n_vocab,
        bias=draw(st.booleans()),
        scale=draw(scales),
        softcap=draw(st.none() | st.just(2.0)),
        shift=draw(st.booleans()),
    )
    extra = draw(st.integers(0, 2)) if kind is Head else 0
    embedding: TokenEmbedding | AdaptiveEmbedding
    embedding = TokenEmbedding(n_vocab=n_vocab, d_model=d_model, scale=draw(scales), d_table=d_table, extra=extra)
    if alone and draw(st.integers(0, 3)) == 0:
        embedding = replace(embedding, ngrams=draw(ngrams(d_model, n_vocab)))
    if draw(st.integers(0, 3)) == 0:
        embedding, head = draw(adaptive(d_model, n_vocab))
    sizes = st.integers(CONTEXT, CONTEXT + 3)
    learned = st.builds(LearnedPositions, n_positions=sizes, d_model=st.just(d_model), offset=st.sampled_from((0, 2)))
    drawn = draw(st.lists(blocks(d_model), min_size=1, max_size=max_blocks))
    if draw(st.booleans()):
        drawn = [hashing(block, n_vocab) for block in drawn]
    all_blocks = tuple(one for block in draw(biased(draw(lending(drawn)))) for one in (block, *sharing(block)))
    all_blocks, vectors = draw(reading(draw(moving(all_blocks)), d_model))
    streams = draw(st.none() | merges(d_model) | projections(d_model))
    all_blocks = all_blocks if streams or vectors else draw(repeated(draw(beside(all_blocks, d_model))))
    if isinstance(streams, ProjectedStreams):
        all_blocks = draw(updated(all_blocks, streams, vectors))
    ends = partial(sharing_ends, embedding=embedding, head=head)
    return LanguageModel(
        embedding=embedding,
        blocks=tuple(connected(block, streams) for block in all_blocks)
        if isinstance(streams, StreamMerge)
        else all_blocks,
        per_layer=vectors,
        streams=streams,
        embedding_norm=draw(maybe_norms(d_model)),
        head=head,
        max_positions=CONTEXT,
        positions=draw(st.none() | learned | sinusoids(d_model)),
        norm=draw(maybe_norms(d_model)),
        predictors=tuple(draw(st.lists(predictors(n_vocab, d_model).flatmap(ends), max_size=1))),
    )


@cache
def ngrams(d_model: int, n_vocab: int) -> SearchStrategy[NGrams]:
    """One to three tables, with fewer rows than there are n-grams, or more."""
    table = st.builds(
        HashedTable, n=st.integers(2, 4), n_rows=st.integers(1, 40), d=st.integers(1, 3), d_model=st.just(d_model)
    )
    tables = st.lists(table, min_size=1, max_size=3).map(tuple)
    boundary = st.none() | st.integers(0, n_vocab - 1)
    return st.builds(NGrams, n_vocab=st.just(n_vocab), tables=tables, boundary=boundary)


@st.composite
def adaptive(draw: DrawFn, d_model: int, n_vocab: int) -> tuple[AdaptiveEmbedding, AdaptiveHead]:
    """The vocabulary in one to three clusters, of which some share tables or maps with the head."""
    cuts = sorted(draw(st.sets(st.integers(1, n_vocab - 1), max_size=2)))
    sizes = [end - begin for begin, end in zip((0, *cuts), (*cuts, n_vocab), strict=True)]
    tables = [TokenCluster(n_vocab=n, d_model=d_model, d_table=draw(st.integers(1, 7))) for n in sizes]
    heads = []
    for i, table in enumerate(tables):
        tied, tied_map = draw(st.booleans()), draw(st.booleans())
        width = table.d_table if tied or tied_map else draw(st.integers(1, 7))
        made = ClusterHead(d_model=d_model, n_vocab=table.n_vocab, d_table=width, cluster=i, tied=tied)
        heads.append(replace(made, tied_map=tied_map, n_clusters=0 if i else len(cuts)))
    scale = draw(st.sampled_from((1.0, 0.3)))
    return AdaptiveEmbedding(clusters=tuple(tables), scale=scale), AdaptiveHead(clusters=tuple(heads))


@cache
def merges(d_model: int) -> SearchStrategy[StreamMerge]:
    """Two or three residual streams as one."""
    return st.builds(
        StreamMerge, n_streams=st.integers(2, 3), d_model=st.just(d_model), eps=EPS, norm_eps=st.just(0.01)
    )


@cache
def projections(d_model: int) -> SearchStrategy[ProjectedStreams]:
    """Two or three residual streams, projected."""
    return st.builds(
        ProjectedStreams, n_streams=st.integers(2, 3), d_model=st.just(d_model), eps=st.sampled_from((1e-5, 0.1))
    )


@st.composite
def updated(
    draw: DrawFn, drawn: tuple[Block, ...], streams: ProjectedStreams, vectors: PerLayerEmbedding | None
) -> tuple[Block, ...]:
    """The blocks on one of as many streams, which they predict and correct; some read a per-layer embedding after."""
    d_model, made = streams.d_model, []
    for block in drawn:
        vector = None
        if vectors is not None and draw(st.booleans()):
            vector = PerLayerInput(d_model=d_model, d=vectors.d, activation=draw(st.sampled_from(ACTIVATIONS)))
        updates = AlternatingUpdates(
            n_streams=streams.n_streams,
            d_model=d_model,
            norm=draw(norms(d_model)),
            vector=vector,
            vector_norm=None if vector is None else draw(maybe_norms(d_model)),
        )
        made.append(replace(block, updates=updates))
    return tuple(made)


def connected(block: Block, merge: StreamMerge) -> Block:
    """The block with hyper-connections to as many streams."""
    own = HyperConnection(n_streams=merge.n_streams, d_model=merge.d_model, iterations=merge.n_streams)
    plain = {"streams": own, "scale": 1.0, "stream_scale": 1.0, "normed": False, "parallel": False, "sum_norm": None}
    return replace(block, branches=tuple(replace(branch, **plain) for branch in block.branches))


def hashing(block: Block, n_vocab: int) -> Block:
    """The block with tables for those of its routers that choose by scores alone."""
    plain = lambda part: isinstance(part, Router) and not (part.correction or part.groups or part.nearness)  # noqa: E731
    if not any(plain(part) for _, part in walk(block)):
        return block
    return block.replace_where(lambda _, part: plain(part), table=n_vocab)


def sharing(block: Block) -> tuple[Block, ...]:
    """A block that shares the last choice of keys of this one, if there is one."""
    choosing = [part for _, part in walk(block) if isinstance(part, Mixer) and part.choice is not None]
    bodies = [part for part in choosing if isinstance(part, LatentAttention)]
    if not bodies or len(bodies) < len(choosing):  # each key head of other attention chooses for itself
        return ()
    if any(part.lends or part.borrows for _, part in walk(block)):  # weights of one name are one part's alone
        return ()
    last = SharedChoice(top_k=bodies[-1].indexer.top_k)  # type: ignore[union-attr]
    latent = lambda _, part: isinstance(part, LatentAttention)  # noqa: E731
    return (block.replace_where(latent, indexer=last),)


@cache
def predictors(n_vocab: int, d_model: int) -> SearchStrategy[Predictor]:
    """A layer beside the model, that no pass of the model may notice."""
    return st.builds(
        Predictor,
        embedding=st.just(TokenEmbedding(n_vocab=n_vocab, d_model=d_model)),
        token_norm=norms(d_model),
        stream_norm=norms(d_model),
        block=blocks(d_model),
        norm=norms(d_model),
        head=st.just(Head(d_model=d_model, n_vocab=n_vocab)),
        normed=st.booleans(),
    )


@st.composite
def sharing_ends(
    draw: DrawFn,
    predictor: Predictor,
    embedding: TokenEmbedding | AdaptiveEmbedding,
    head: Head | TiedHead | AdaptiveHead,
) -> Predictor:
    """The predictor, or one that uses the model's embedding, head or both, where these are one matrix."""
    sizes: dict[str, Any] = {"n_vocab": embedding.n_vocab, "d_model": embedding.d_model}
    if isinstance(embedding, TokenEmbedding) and embedding.d_table is None and draw(st.booleans()):
        predictor = replace(predictor, embedding=SharedEmbedding(**sizes, scale=embedding.scale))
    if isinstance(head, Head | TiedHead) and head.d_table is None and draw(st.booleans()):
        predictor = replace(predictor, head=SharedHead(**sizes, tied=isinstance(head, TiedHead)))
    return predictor


@cache
@st.composite
def embedding_distances(draw: DrawFn, body: Attention, table: DistanceTable) -> Attention:
    """That attention with scores of embedded distances, of the table's."""
    span = table.n_rows // 2
    spaced = st.integers(span // 2 + 2, 20) if span > 1 else st.nothing()
    to_keys, to_queries = draw(st.sampled_from(((True, True), (True, False), (False, True))))
    positions = Disentangled(span=span, max_distance=draw(st.none() | spaced), to_keys=to_keys, to_queries=to_queries)
    without = dict.fromkeys(("window", "q_norm", "k_norm", "temperature"), None)
    plain = {"n_kv_heads": body.n_heads, "rotate_first": False, "values_are_keys": False}
    return replace(body, positions=positions, **without, **plain)


@st.composite
def stacks(
    draw: DrawFn, d_model: int, causal: bool, d_source: int | None
) -> tuple[tuple[Block, ...], BiasTable | DistanceTable | None]:
    """Blocks of attention, cross-attention where there is a source, and feed-forward; some with relative buckets.

    What is not causal sees its text at once, so that experts there may have a capacity.
    """
    table = draw(st.none() | st.builds(BiasTable, n_buckets=st.sampled_from((4, 8)), n_heads=st.integers(1, 3)))
    if not causal and draw(st.booleans()):
        rows = st.sampled_from((2, 4, 6, 8, 12))
        table = draw(st.builds(DistanceTable, n_rows=rows, d_model=st.just(d_model), eps=st.none() | EPS))
    blocks = []
    for _ in range(draw(st.integers(1, 2))):
        own, drawn = draw(branches("attention", d_model)), draw(attentions(d_model))
        if isinstance(drawn.positions, RelativeProjection):  # looks back alone
            drawn = replace(drawn, positions=None)
        kept: dict[str, Any] = {"caches_input": drawn.caches_input and causal}
        kept |= {name: getattr(drawn, name) if causal else None for name in ("chunk", "stride", "summary")}
        kept |= {"differential": drawn.differential if table is None else None}
        body = replace(drawn, causal=causal, **kept)
        if isinstance(table, DistanceTable):
            body = draw(embedding_distances(body, table))
        elif table is not None:
            buckets = RelativeBuckets(
                n_buckets=table.n_buckets, max_distance=draw(st.sampled_from((5, 16))), both_ways=draw(st.booleans())
            )
            heads = {"n_heads": table.n_heads, "n_kv_heads": 1, "q_norm": None, "k_norm": None, "rotate_first": False}
            heads |= {"values_are_keys": False}
            body = replace(body, positions=buckets, **heads)
        kinds = [replace(own, body=body)]
        if d_source is not None:
            kinds.append(draw(crossings("cross", d_model, d_source)))
        ffn = draw(branches("ffn", d_model))
        if not causal and isinstance(ffn.body, MixtureOfExperts) and ffn.body.weighs == "results":
            ffn = replace(ffn, body=replace(ffn.body, capacity=draw(st.none() | st.integers(1, 3))))
        blocks.append(Block(branches=(*kinds, ffn)))
    return tuple(blocks), table


@cache
@st.composite
def crossings(draw: DrawFn, name: str, d_model: int, d_source: int, n_source: int | None = None) -> Branch:
    """A branch of cross-attention."""
    d_head, n_kv_heads = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    as_many = draw(st.booleans())
    body = CrossAttention(
        d_model=d_model,
        d_source=d_source,
        n_heads=n_kv_heads if as_many else n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=None if as_many else n_kv_heads,
        d_head=d_head,
        bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        q_norm=draw(maybe_norms(d_head)),
        k_norm=draw(maybe_norms(d_head)),
        scale=draw(st.none() | st.just(0.7)),
        n_source=n_source,
    )
    return Branch(name=name, body=body, norm=draw(maybe_norms(d_model)), post_norm=draw(maybe_norms(d_model)))


@st.composite
def translators(draw: DrawFn) -> EncoderDecoder:
    """A whole model with an encoder, whose embedding is the model's own or another."""
    d_model, n_vocab = draw(st.integers(2, 7)), draw(st.integers(2, 17))
    shared = draw(st.booleans())
    d_source = d_model if shared else draw(st.integers(2, 7))
    embedding = SharedEmbedding if shared else TokenEmbedding
    scales = st.sampled_from((1.0, 0.3))
    read, numbers = draw(stacks(d_source, False, None))
    encoder = TextEncoder(
        embedding=embedding(n_vocab=n_vocab, d_model=d_source, scale=draw(scales)),
        positions=draw(st.none() | sinusoids(d_source)),
        relative=numbers,
        blocks=read,
        norm=draw(maybe_norms(d_source)),
        max_positions=CONTEXT,
    )
    written, numbers = draw(stacks(d_model, True, d_source))
    return EncoderDecoder(
        encoder=encoder,
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model, scale=draw(scales)),
        relative=numbers,
        blocks=written,
        norm=draw(maybe_norms(d_model)),
        head=draw(st.sampled_from((Head, TiedHead)))(d_model=d_model, n_vocab=n_vocab),
        max_positions=CONTEXT,
    )


@cache
def transforms(d_model: int, d_out: int | None = None) -> SearchStrategy[HeadTransform]:
    """What a masked language model's head begins with, which may end in another width."""
    return st.builds(
        HeadTransform,
        d_model=st.just(d_model),
        d_out=st.just(d_out),
        activation=st.sampled_from(ACTIVATIONS),
        eps=EPS,
        bias=st.booleans(),
        norm_bias=st.booleans(),
    )


@cache
def masked_heads(d_model: int, n_vocab: int, d_table: int) -> SearchStrategy[Head | TiedHead | None]:
    """Either head, with and without a transform, or none; of another width than the stream's if the table is."""
    other = None if d_table == d_model else d_table
    fields = {
        "d_model": st.just(d_model),
        "n_vocab": st.just(n_vocab),
        "bias": st.booleans(),
        "transform": st.none() | transforms(d_model, other),
        "d_table": st.just(other),
    }
    return st.none() | st.builds(Head, **fields) | st.builds(TiedHead, **fields)


@cache
@st.composite
def classifiers(draw: DrawFn, d_model: int, labelled: tuple[Labelled, ...] = LABELLED) -> Classifier:
    """Labels of whatever token, which may pass through a transform first."""
    labels = draw(st.sampled_from(labelled))
    pooler = st.builds(Pooler, d_model=st.just(d_model), activation=st.sampled_from(POOLER_ACTIVATIONS))
    return Classifier(
        d_model=d_model,
        n_labels=2 if labels == "span" else draw(st.integers(1, 9)),
        bias=draw(st.booleans()),
        labels=labels,
        padding=draw(st.none() | st.integers(0, 1)) if labels == "last" else None,
        transform=draw(st.none() | pooler | transforms(d_model)),
    )


@cache
def centred_convolutions(d_model: int) -> SearchStrategy[CentredConvolution]:
    """A convolution over all channels, of tokens on both sides."""
    return st.builds(
        CentredConvolution,
        d_model=st.just(d_model),
        kernel=st.sampled_from((1, 3, 5)),
        activation=st.sampled_from(POOLER_ACTIVATIONS),
    )


@st.composite
def convolved(draw: DrawFn, drawn: tuple[Block, ...], d_model: int) -> tuple[Block, ...]:
    """The blocks; to the first may be added a convolution, of what that block or its last branch reads."""
    if draw(st.integers(0, 2)) or drawn[0].branches[0].streams is not None:
        return drawn
    norm, post_norm, sum_norm = (draw(maybe_norms(d_model)) for _ in range(3))
    more = Branch(
        name="convolution",
        body=draw(centred_convolutions(d_model)),
        norm=norm,
        post_norm=post_norm,
        sum_norm=sum_norm,
        block_input=draw(st.booleans()),
    )
    return (replace(drawn[0], branches=(*drawn[0].branches, more)), *drawn[1:])


@st.composite
def encoders(draw: DrawFn) -> TextEncoder:
    """A whole model, with token types or not, with any head and pooler or neither; most see both ways.

    Those that see what is before a token alone end in labels, or in the stream.
    """
    d_model, n_vocab = draw(st.integers(2, 7)), draw(st.integers(2, 17))
    causal = draw(st.integers(0, 3)) == 0
    blocks, table = draw(stacks(d_model, causal, None))
    blocks = blocks if causal else draw(convolved(blocks, d_model))
    width = draw(st.none() | st.integers(1, 9))
    d = d_model if width is None else width
    heads = classifiers(d_model) | (st.none() if causal else masked_heads(d_model, n_vocab, d))
    sizes = st.integers(CONTEXT, CONTEXT + 3)
    learned = st.builds(LearnedPositions, n_positions=sizes, d_model=st.just(d), offset=st.sampled_from((0, 2)))
    return TextEncoder(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d, scale=draw(st.sampled_from((1.0, 0.3)))),
        positions=draw(st.none() | learned),
        types=draw(st.none() | st.builds(TypeEmbedding, n_types=st.integers(1, 3), d_model=st.just(d))),
        embedding_norm=draw(maybe_norms(d)),
        embedding_projection=None if width is None else EmbeddingProjection(d_embedding=width, d_model=d_model),
        relative=table,
        blocks=draw(repeated(blocks)),
        norm=draw(maybe_norms(d_model)),
        head=draw(heads),
        pooler=draw(st.none() | st.just(Pooler(d_model=d_model))),
        max_positions=CONTEXT,
    )


MAPS = (
    "q",
    "k",
    "v",
    "o",
    "up",
    "down",
    "gate",
    "shared_gate",
    "q_down",
    "q_up",
    "kv_down",
    "k_rope",
    "k_up",
    "v_up",
    "project",
    "dense",
    "into",
    "out",
    "select",
    "dt",
    "beta",
    "decay_down",
    "decay",
    "gate_down",
    "into_latent",
    "from_latent",
)


@st.composite
def clipped(draw: DrawFn) -> ModelSpec:
    """A whole model of any kind, with some of its linear maps clipped.

    Where weights are shared they are not: autograd keeps the bounds once for all uses, and they are billed for each.
    """
    spec = draw(specs() | translators() | encoders())
    if any(part.borrows for _, part in walk(spec)):
        return spec
    names = draw(st.sets(st.sampled_from(MAPS), min_size=1)) - {"k_up", "v_up"}  # which steps multiply by as matrices

    def cut(part: Part) -> Part:
        assert isinstance(part, Mapped)
        if isinstance(part, TokenCluster):  # whose map a head may share
            return part
        known = {field.name for field in fields(part)} & names
        return part.with_maps({n: replace(m.plain, clipped=True) for n, m in part.maps.items() if n in known})

    return spec.replace_where(Mapped, cut)


@st.composite
def adapted(draw: DrawFn) -> ModelSpec:
    """A whole model of any kind, with low-rank adapters beside some of its linear maps."""
    spec = draw(specs() | translators() | encoders() | clipped())
    names, rank = draw(st.sets(st.sampled_from(MAPS), min_size=1)), draw(st.integers(1, 3))
    alpha = draw(st.sampled_from((1.0, 3.0)))

    def beside(one: Map) -> Lora:
        return Lora(base=one, rank=min(rank, max(one.plain.d_in, one.plain.d_out)), alpha=alpha)  # type: ignore[arg-type]  # pyright: ignore

    def chosen(part: Part) -> dict[str, Lora]:
        if not isinstance(part, Mapped) or isinstance(part, TokenCluster):  # whose map a head may share
            return {}
        known = {field.name for field in fields(part)}
        return {n: beside(m) for n, m in (part.maps | part.stacks).items() if n in names and n in known}

    some = [path for path, part in walk(spec) if chosen(part)]
    return spec.replace_where(lambda path, _: path in some, lambda p: replace(p, **chosen(p))) if some else spec


@st.composite
def poolings(draw: DrawFn, d_model: int) -> AttentionPooling:
    """Attention that pools all tokens of an image."""
    return AttentionPooling(
        d_model=d_model,
        n_heads=draw(st.integers(1, 3)),
        d_head=draw(st.integers(1, 4)),
        bias=draw(st.booleans()),
        norm=draw(norms(d_model)),
        ffn=MLP(
            d_model=d_model,
            d_ff=draw(st.integers(1, 6)),
            activation=draw(st.sampled_from(ACTIVATIONS)),
            bias=draw(st.booleans()),
        ),
    )


@st.composite
def towers(draw: DrawFn, head: str = "any", d_out: int | None = None) -> ImageEncoder:
    """A model of patches, some of an image left out at its edges, with a head that reads one token or without."""
    d_model, patch = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    embedding = PatchEmbedding(
        image_size=draw(st.integers(patch, 3 * patch + 1)) if patch > 1 else draw(st.integers(1, 3)),
        patch_size=patch,
        channels=draw(st.integers(1, 3)),
        d_model=d_model,
        bias=draw(st.booleans()),
        centred=draw(st.booleans()),
        class_token=draw(st.sampled_from(CLASS_TOKENS)),
        mask_token=draw(st.booleans()),
    )
    if embedding.class_token == "first":
        embedding = replace(embedding, n_registers=draw(st.integers(0, 2)))
    read, numbers = draw(stacks(d_model, False, None))
    learned = st.builds(LearnedPositions, n_positions=st.just(embedding.n_tokens), d_model=st.just(d_model))
    classifier = classifiers(d_model, ("first",))
    out = st.integers(1, 5) if d_out is None else st.just(d_out)
    projection = st.builds(Projection, d_model=st.just(d_model), d_out=out, bias=st.booleans())
    vector = projection if d_out is not None else projection | poolings(d_model)
    heads = {"any": st.none() | classifier | vector, "none": st.none(), "vector": vector}
    top = draw(heads[head])
    pools = head == "any" and top is None and draw(st.booleans())
    return ImageEncoder(
        embedding=embedding,
        positions=draw(st.none() | learned),
        embedding_norm=draw(maybe_norms(d_model)),
        relative=numbers,
        blocks=read,
        norm=draw(maybe_norms(d_model)),
        head=top,
        pooler=Pooler(d_model=d_model) if pools else None,
        max_positions=embedding.n_tokens,
    )


@cache
@st.composite
def windows(draw: DrawFn, d_model: int) -> Windowed:
    """Attention in windows of one patch or of four."""
    inner = replace(draw(attentions(d_model, (False,))), window=None)
    if not isinstance(inner.positions, Rotary | None):
        inner = replace(inner, positions=None)
    return Windowed(d_model=d_model, attention=inner, side=draw(st.sampled_from((1, 2))))


@st.composite
def grid_towers(draw: DrawFn) -> ImageEncoder:
    """A model of patches of images of any size, some of its attention in windows of them."""
    d_model, patch = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    side = draw(st.sampled_from((2, 4)))
    embedding = GridPatches(
        image_size=side * patch,
        patch_size=patch,
        channels=draw(st.integers(1, 3)),
        frames=draw(st.integers(1, 2)),
        d_model=d_model,
        bias=draw(st.booleans()),
        centred=draw(st.booleans()),
    )
    read, numbers = draw(stacks(d_model, False, None))
    if numbers is None and draw(st.booleans()):
        read = (read[0].replace_where(Attention, draw(windows(d_model))), *read[1:])
    table = st.builds(
        GridPositions, n_side=st.integers(1, 5), d_model=st.just(d_model), interpolation=st.sampled_from(INTERPOLATIONS)
    )
    apart = st.builds(AxialPositions, n_entries=st.integers(side, side + 2), d_model=st.just(d_model))
    return ImageEncoder(
        embedding=embedding,
        positions=draw(st.none() | table | apart),
        embedding_norm=draw(maybe_norms(d_model)),
        relative=numbers,
        blocks=read,
        norm=draw(maybe_norms(d_model)),
        head=None,
        max_positions=embedding.n_tokens,
    )


def pooled(d_in: int, d_out: int, n_side: int, pool: SearchStrategy[int]) -> SearchStrategy[PooledProjector]:
    """Means of squares of patches."""
    return st.builds(
        PooledProjector,
        d_in=st.just(d_in),
        d_out=st.just(d_out),
        n_side=st.just(n_side),
        pool=pool,
        norm=norms(d_in),
        scale=st.sampled_from((1.0, 2.0)),
        standardised=st.booleans(),
    )


@cache
@st.composite
def projectors(draw: DrawFn, d_in: int, d_out: int, n_side: int, square: bool) -> Projector:
    """Matrices over patches or, where the tokens are all the patches of a square, over its squares; or means."""
    if square and draw(st.booleans()):
        return draw(pooled(d_in, d_out, n_side, st.integers(1, n_side)))
    if square and draw(st.booleans()):
        sizes = {"d_in": d_in, "d_out": d_out, "n_side": n_side}
        return ConvolvedProjector(**sizes, steps=draw(st.integers(1, 2)), bias=draw(st.booleans()))
    merge = draw(st.sampled_from([m for m in range(1, n_side + 1) if n_side % m == 0])) if square else 1
    return draw(mergers(d_in, d_out, merge))


@cache
@st.composite
def mergers(draw: DrawFn, d_in: int, d_out: int, merge: int, copies: bool = False) -> MLPProjector:
    """Matrices over squares of patches, which are normed before or after they are merged, or not.

    What `copies` first saves no tensor that another part saves too.
    """
    between = draw(st.lists(st.integers(1, 6), max_size=2))
    first = None
    if not copies and draw(st.booleans()):
        wide = draw(st.integers(1, 6))
        first = draw(mergers(d_in, wide, 1, copies=True))
        d_in = wide
    return MLPProjector(
        first=first,
        widths=(d_in * merge**2, *between, d_out),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        merge=merge,
        merging=bool(between) and draw(st.booleans()),
        norm=draw(st.none() | norms(d_in * merge**2) | (st.nothing() if copies else norms(d_in))),
    )


@st.composite
def grid_seers(draw: DrawFn) -> VisionLanguageModel:
    """A model of texts in which images of any size take the places of tokens."""
    text, tower = draw(specs(max_blocks=2, alone=False)), draw(grid_towers())
    if any(isinstance(part, Rotary) and part.depends_on_length for _, part in walk(text)):
        text = text.replace_where(Rotary, scaling=None)
    # squares of four among sixteen patches are copied: no tensor is saved by a merger and by another part
    adds = tower.embedding.n_side == 4 and text.streams is None
    most = min(text.n_layers, tower.n_layers) if adds else 0
    taps = sorted(draw(st.sets(st.integers(0, tower.n_layers - 1), max_size=most)))
    merge = 2 if taps else draw(st.sampled_from((1, 2)))
    both_ways = draw(st.booleans()) and all(part.sees_images for _, part in walk(text) if isinstance(part, Mixer))
    projected = mergers(tower.d_model, text.d_model, merge)
    projected |= pooled(tower.d_model, text.d_model, tower.embedding.n_side, st.just(merge))
    if not taps:
        sizes = {"d_in": tower.d_model, "d_out": text.d_model, "n_side": tower.embedding.n_side}
        steps = st.integers(1, 2)
        projected |= st.builds(lambda n, bias: ConvolvedProjector(**sizes, steps=n, bias=bias), steps, st.booleans())
    vision = GridVision(
        tower=tower,
        projector=draw(projected),
        both_ways=both_ways,
        in_windows=both_ways and draw(st.booleans()),
        placeholder=draw(st.integers(0, text.n_vocab - 1)),
        taps=tuple(taps),
        mergers=tuple(draw(mergers(tower.d_model, text.d_model, merge, copies=True)) for _ in taps),
    )
    return VisionLanguageModel.of(text.without_extras, vision)


@st.composite
def seers(draw: DrawFn) -> VisionLanguageModel:
    """A model of texts in which images take the places of tokens."""
    text, tower = draw(specs(max_blocks=2, alone=False)), draw(towers("none"))
    both_ways = draw(st.booleans()) and all(part.sees_images for _, part in walk(text) if isinstance(part, Mixer))
    keep = tower.embedding.class_token != "none" and draw(st.booleans())
    projector = projectors(tower.d_model, text.d_model, tower.embedding.n_side, not keep)
    inside = draw(st.sampled_from(("all", "windows") if rotaries_by_length(text) else ("all", "windows", "prefix")))
    vision = Vision(
        tower=tower,
        projector=draw(projector),
        placeholder=draw(st.integers(0, text.n_vocab - 1)),
        layers=draw(st.none() | st.integers(0, tower.n_layers)),
        keep_class=keep,
        both_ways=both_ways,
        in_windows=both_ways and inside == "windows",
        prefix=both_ways and inside == "prefix",
    )
    hearing = None
    if text.n_vocab > 2 and not rotaries_by_length(text) and draw(st.booleans()):
        place = draw(st.integers(0, text.n_vocab - 1).filter(lambda one: one != vision.placeholder))
        hearing = draw(ears(text.d_model, place, any_length=True))
    return VisionLanguageModel.of(text.without_extras, vision, hearing)


@st.composite
def tiled_towers(draw: DrawFn) -> ImageEncoder:
    """A model of patches of images cut into tiles, to whose normed stream vectors of tiles are added before a block."""
    d_model, patch = draw(st.integers(2, 7)), draw(st.integers(1, 2))
    tilings = tuple(draw(st.permutations([(1, 1), (1, 2), (2, 1), (3, 1)])))
    n_tiles, image_size = draw(st.integers(3, 4)), patch * draw(st.integers(1, 2))
    tiles = TileEmbedding(d_model=d_model, n_tilings=len(tilings), n_tiles=n_tiles)
    n_places = (image_size // patch) ** 2 + 1
    embedding = TilePatches(
        image_size=image_size,
        patch_size=patch,
        channels=draw(st.integers(1, 3)),
        d_model=d_model,
        bias=draw(st.booleans()),
        centred=draw(st.booleans()),
        class_token="first",
        tilings=tilings,
        n_tiles=n_tiles,
        multiple=draw(st.integers(1, 4)),
        tiles=tiles,
        positions=TilePositions(d_model=d_model, n_positions=n_places, n_tilings=len(tilings), n_tiles=n_tiles),
        norm=draw(norms(d_model)),
    )
    attending = attentions(d_model, (False,)).map(
        lambda one: replace(one, window=None, positions=None, rotate_first=False)
    )
    bodies = {"attention": attending, "ffn": dense(d_model)}
    middle = Branch(name="tiles", norm=draw(norms(d_model)), normed=True, body=tiles)

    def block(*before: Branch) -> Block:
        own = [
            Branch(name=name, norm=draw(maybe_norms(d_model)), body=draw(body), gated=draw(st.booleans()))
            for name, body in bodies.items()
        ]
        return Block(branches=(*before, *own))

    return ImageEncoder(
        embedding=embedding,
        blocks=(block(), block(middle)),
        norm=draw(maybe_norms(d_model)),
        head=None,
        max_positions=embedding.n_tokens,
    )


@st.composite
def tiled_seers(draw: DrawFn) -> VisionLanguageModel:
    """A model of texts that read an image in tiles by cross-attention."""
    text = draw(
        specs(max_blocks=2, alone=False).filter(lambda one: one.streams is None and one.per_layer is None)
    ).without_extras
    if any(isinstance(part, Rotary) and part.depends_on_length for _, part in walk(text)):
        text = text.replace_where(Rotary, scaling=None)
    tower = draw(tiled_towers())
    assert isinstance(tower.embedding, TilePatches)
    n_source = tower.embedding.n_tiles * tower.embedding.n_places
    taps = draw(st.lists(st.integers(0, tower.n_layers - 1), max_size=3))
    cross = replace(draw(crossings("cross", text.d_model, text.d_model, n_source)), gated=draw(st.booleans()))
    ffn = replace(draw(branches("ffn", text.d_model)), after_source=draw(st.booleans()))
    at = draw(st.integers(0, text.n_layers))
    blocks = (*text.blocks[:at], Block(branches=(cross, ffn)), *text.blocks[at:])
    vision = TiledVision(
        tower=tower,
        projector=draw(mergers((1 + len(taps)) * tower.d_model, text.d_model, 1).map(lambda x: replace(x, norm=None))),
        placeholder=draw(st.integers(0, text.n_rows - 1)),
        taps=tuple(taps),
    )
    return VisionLanguageModel.of(replace(text, blocks=blocks, d_source=text.d_model), vision)


@st.composite
def listeners(draw: DrawFn) -> AudioLanguageModel:
    """A model of texts in which sounds take the places of tokens."""
    text = draw(specs(max_blocks=2, alone=False))
    place = draw(st.integers(0, text.n_vocab - 1))
    heard = draw(ears(text.d_model, place, any_length=not rotaries_by_length(text)))
    return AudioLanguageModel.of(text.without_extras, heard)


@st.composite
def ears(draw: DrawFn, d_text: int, place: int, *, any_length: bool) -> Hearing:
    """A tower of sounds of one length, or of any with a convolution module, and a projector."""
    d_model = draw(st.integers(2, 7))
    subsampled = any_length and draw(st.booleans())
    stack = 1 if subsampled else draw(st.integers(1, 3))
    n_tokens = stack * draw(st.integers(1, 3))
    read, numbers = draw(stacks(d_model, False, None))
    plain = {"n_mels": draw(st.integers(1, 5)), "n_tokens": n_tokens, "d_model": d_model}
    embedding: MelEmbedding | MelSubsampling = MelEmbedding(**plain)
    if subsampled:
        channels = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
        flags = {name: draw(st.booleans()) for name in ("ahead", "cumulative")}
        embedding = MelSubsampling(**plain, channels=channels, eps=draw(EPS), **flags)
        body = draw(convolution_modules(d_model, cached=False))
        read = (*read, Block(branches=(Branch(name="conv", norm=draw(maybe_norms(d_model)), body=body),)))
    tower = AudioEncoder(
        embedding=embedding,
        positions=draw(
            st.none() | st.builds(LearnedPositions, n_positions=st.just(n_tokens), d_model=st.just(d_model))
        ),
        relative=numbers,
        blocks=read,
        norm=draw(maybe_norms(d_model)),
        max_positions=n_tokens,
    )
    projector = MLPProjector(
        widths=(stack * d_model, *draw(st.lists(st.integers(1, 6), max_size=2)), d_text),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        stack=stack,
        norm=draw(maybe_norms(d_model)) if stack == 1 else None,
        post_norm=draw(maybe_norms(d_text)),
        every=draw(st.integers(1, 3)) if stack == 1 else 1,
    )
    return Hearing(tower=tower, projector=projector, placeholder=place)


@cache
@st.composite
def grid_convolutions(draw: DrawFn, d_in: int, d_out: int | None = None, stride: int | None = None) -> GridConvolution:
    """A convolution over a grid, of whole vectors or of channels apart."""
    apart = d_out in (None, d_in) and draw(st.booleans())
    out = d_in if apart else d_out or draw(st.integers(2, 4))
    kernel = draw(st.integers(2 if apart or stride == 2 else 1, 3))
    return GridConvolution(
        d_in=d_in,
        d_out=out,
        kernel=kernel,
        stride=draw(st.integers(1, min(2, kernel))) if stride is None else stride,
        apart=apart,
        bias=draw(st.booleans()),
        norm=RMSNorm(d=out, eps=draw(EPS)),
        activated=draw(st.booleans()),
    )


@st.composite
def networks(draw: DrawFn, d_model: int) -> ConvolvedPatches:
    """A network over images of 8 pixels a side, of two to four blocks."""
    channels, width = draw(st.integers(2, 3)), draw(st.integers(2, 4))
    norm = RMSNorm(d=width, eps=draw(EPS))
    stem = PixelConvolution(d_in=channels, d_out=width, kernel=3, stride=draw(st.integers(1, 2)), norm=norm)
    made: list[InvertedResidual | GridAttention] = []
    widths, sides = [width], [8 // stem.stride]
    for _ in range(draw(st.integers(2, 4))):
        width = widths[-1]
        if draw(st.booleans()):
            reduced = st.none() | grid_convolutions(width, width, draw(st.integers(1, 2)))
            k_reduced = draw(reduced)
            v_reduced = None if k_reduced is None else draw(grid_convolutions(width, width, k_reduced.stride))
            if k_reduced is not None and k_reduced.stride == 1:
                v_reduced = draw(st.none() | st.just(v_reduced))
            sizes = {"d_model": width, "n_heads": draw(st.integers(1, 3)), "d_head": draw(st.integers(1, 3))}
            norm = RMSNorm(d=width, eps=draw(EPS))
            made.append(GridAttention(**sizes, norm=norm, k_reduced=k_reduced, v_reduced=v_reduced))
        else:
            steps = [draw(grid_convolutions(width))]
            while draw(st.booleans()) and len(steps) < 3:
                steps.append(draw(grid_convolutions(steps[-1].d_out)))
            same = steps[-1].d_out == width and all(step.stride == 1 for step in steps)
            scaled = draw(st.booleans())
            made.append(InvertedResidual(steps=tuple(steps), scaled=scaled, added=same and draw(st.booleans())))
        widths.append(getattr(made[-1], "d_out", width))
        sides.append(made[-1].left(sides[-1]))
    fused = draw(st.integers(0, len(made) - 2))
    both, side = widths[fused + 1] + widths[-1], sides[fused + 1]
    n_side = draw(st.sampled_from([n for n in (1, 2) if side % n == 0]))
    return ConvolvedPatches(
        image_size=8,
        patch_size=8 // n_side,
        channels=channels,
        d_model=d_model,
        stem=stem,
        blocks=tuple(made),
        fused=fused,
        fuse=InvertedResidual(steps=(draw(grid_convolutions(both, d_model, 1)),), scaled=draw(st.booleans())),
        norm=RMSNorm(d=d_model, eps=draw(EPS)),
    )


OWN: tuple[tuple[Through, int], ...] = (("vision", 0), ("hearing", 3))


@st.composite
def sensers(draw: DrawFn) -> VisionLanguageModel:
    """A model of texts with images through a network, and sounds, of both of which some token ids have own rows."""
    text = draw(specs(max_blocks=1, alone=False).filter(lambda spec: spec.n_vocab > 4 and not rotaries_by_length(spec)))
    network = draw(networks(draw(st.integers(2, 5))))
    tower = ImageEncoder(embedding=network, blocks=(), max_positions=network.n_tokens)
    heard = draw(ears(text.d_model, 4, any_length=True).filter(lambda one: one.tower.embedding.any_length))
    plain = {"activation": "relu", "post_norm": RMSNorm(d=text.d_model, eps=draw(EPS), gain="none")}
    alone = {"norm": draw(norms(heard.tower.d_model)), "every": draw(st.integers(1, 3))}
    through = MLPProjector(widths=(heard.tower.d_model, text.d_model), **plain, **alone)
    seen = MLPProjector(widths=(network.d_model, text.d_model), **plain, norm=draw(norms(network.d_model)))
    wide = {"vision": network.d_model, "hearing": heard.tower.d_model}
    own = tuple(
        OwnTokens(
            through=name,
            first=first,
            n_rows=draw(st.integers(1, 2)),
            d_table=wide[name],
            d_model=text.d_model,
            norm=RMSNorm(d=wide[name], eps=draw(EPS)),
        )
        for name, first in OWN
    )
    vision = Vision(tower=tower, projector=seen, placeholder=1)
    hearing = replace(heard, projector=through, filled=draw(st.booleans()))
    return VisionLanguageModel.of(text.without_extras, vision, hearing, own)


@st.composite
def pairs(draw: DrawFn) -> ModelSpec:
    """A tower of texts beside a tower of images."""
    of_one_table = specs(max_blocks=2, alone=False).filter(lambda spec: isinstance(spec.embedding, TokenEmbedding))
    text, tower = draw(of_one_table), draw(towers("vector"))
    assert isinstance(tower.head, Projection | AttentionPooling)
    reads = draw(st.sampled_from(READS))
    end = draw(st.integers(0, text.n_vocab - 1)) if reads == "end" else None
    head = Projection(d_model=text.d_model, d_out=tower.head.d_out, bias=draw(st.booleans()), reads=reads, end=end)
    return text.without_extras.changed(head=head, vision=Contrast(tower=tower, bias=draw(st.booleans())))


def randomised(spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float64, std: float = 0.5) -> Model:
    """Builds the model with every parameter, gains and biases too, and every buffer, from N(0, std)."""
    built = build(spec, dtype=dtype, seed=None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        whole = {path: owner for path, weight, owner in buffers(spec) if weight.whole}
        bounds = {path: weight.fill for path, weight, _ in buffers(spec) if math.isinf(weight.fill)}
        for path, tensor in stored_tensors(built).items():
            if path in whole:  # experts by token id
                tensor.random_(0, whole[path].n_experts, generator=generator)  # type: ignore[attr-defined]
            else:
                tensor.normal_(0.0, std, generator=generator)
            if path in bounds:  # the lower one below the upper one
                tensor.copy_(tensor.abs() * math.copysign(1.0, bounds[path]))
    return built


def models(dtype: torch.dtype = torch.float64) -> SearchStrategy[Model]:
    """Built models of drawn specs, all parameters drawn too."""
    return st.builds(randomised, specs(), SEEDS, st.just(dtype))


def whole(model: Model, tokens_BT: torch.Tensor, sizes: list[int], **beside: Any) -> torch.Tensor:  # noqa: ANN401
    """Logits of whole passes: each piece's are those of the text up to its end, which rotary positions may ask for."""
    if not any(isinstance(part, Rotary) and part.depends_on_length for _, part in walk(model.spec)):
        return model(tokens_BT, **beside)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    passes = [model(tokens_BT[:, :end], **beside)[:, -size:] for end, size in zip(ends, sizes, strict=True)]
    return torch.cat(passes, 1)


def scripted(script: list[int], n_vocab: int) -> Model:
    """A model of real parts that says `script[p]` after position p, whatever came before; its context is the script.

    The position table holds the script, the head reads it off, all else is zero.
    """
    spec = LanguageModel(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=n_vocab),
        positions=LearnedPositions(n_positions=len(script), d_model=n_vocab),
        blocks=(Block(branches=(Branch(name="ffn", body=MLP(d_model=n_vocab, d_ff=1, activation="relu")),)),),
        head=Head(d_model=n_vocab, n_vocab=n_vocab),
        max_positions=len(script),
    )
    model = randomised(spec, 0, std=0.0)
    with torch.no_grad():
        model.get_parameter("head.weight").copy_(torch.eye(n_vocab))
        model.get_parameter("positions.weight").copy_(torch.eye(n_vocab)[script])
    return model


def random_tokens(n_vocab: int, *shape: int, seed: int) -> torch.Tensor:
    """Token ids from 0 to n_vocab - 1, the same for the same seed."""
    return torch.randint(n_vocab, shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def texts(draw: DrawFn, n_vocab: int, *, rows: int | None = None, max_tokens: int = 24) -> list[list[int]]:
    """Token ids, one list per row, each with a length of its own."""
    count = draw(st.integers(1, 4)) if rows is None else rows
    tokens = st.lists(st.integers(0, n_vocab - 1), min_size=1, max_size=max_tokens)
    return draw(st.lists(tokens, min_size=count, max_size=count))
