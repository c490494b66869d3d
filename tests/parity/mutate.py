"""Every field of a spec changed in turn: what the parity test must notice, or the loader refuse.

A mutation keeps the parameters' shapes where it can: such a one loads without a word and computes something else.
A new part needs an entry here only for a field that may be None, and for what may stand in another part's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from asbuilt.spec import (
    ACTIVATIONS,
    DECAYS,
    DELTA_GATES,
    GROUP_SCORES,
    INTERPOLATIONS,
    LABELLED,
    MLP,
    OUTPUT_GATES,
    PLAIN_GATINGS,
    RGLRU,
    SCORINGS,
    SINUSOID_LAYOUTS,
    WEIGHINGS,
    XIELU,
    Alibi,
    AlternatingUpdates,
    Attention,
    AttentionPooling,
    AudioEncoder,
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
    CompressedAttention,
    Compressor,
    Contrast,
    ConvolutionModule,
    ConvolvedPatches,
    ConvolvedProjector,
    CrossAttention,
    DeltaTimeMixing,
    Differential,
    Disentangled,
    DistanceTable,
    EmbeddingProjection,
    EntryIndexer,
    ExpertGroups,
    GatedConvolution,
    GatedDeltaNet,
    GatedMLP,
    GridAttention,
    GridConvolution,
    GridVision,
    Head,
    HeadNorm,
    HeadTransform,
    Hearing,
    HyperConnection,
    Indexer,
    InvertedResidual,
    LatentAttention,
    Laurel,
    LayerNorm,
    LearnedPositions,
    LightningAttention,
    LinearScaling,
    LongRope,
    Mamba,
    Mamba2,
    Map,
    MatrixLSTM,
    MelEmbedding,
    MelSubsampling,
    MixtureOfExperts,
    MLPProjector,
    Model,
    NGrams,
    OwnTokens,
    Parallel,
    Part,
    PatchEmbedding,
    PerLayerEmbedding,
    PerLayerInput,
    Plane,
    PooledProjector,
    Pooler,
    Predictor,
    ProjectedStreams,
    Projection,
    QueryTemperature,
    RelativeProjection,
    RMSNorm,
    Rotary,
    Router,
    ScoreBiases,
    Sections,
    SharedChoice,
    SharedEmbedding,
    SharedTransformer,
    ShortConvolution,
    SideTransformer,
    SoftplusScale,
    StreamMerge,
    TiedHead,
    TileEmbedding,
    TilePositions,
    TimeMixing,
    TokenEmbedding,
    TokenShift,
    TypeEmbedding,
    Vision,
    VisionLanguageModel,
    Windowed,
    YaRN,
    walk,
)
from asbuilt.spec.model import ORDER
from asbuilt.spec.own_tokens import THROUGH
from asbuilt.spec.vision import CLASS_TOKENS, READS

CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ACTIVATIONS,
    "pairing": ("halves", "adjacent"),
    "scoring": SCORINGS,
    "score": GROUP_SCORES,
    "gating": (*PLAIN_GATINGS, *DELTA_GATES, "channel", "head"),
    "decays": DECAYS,
    "weighs": WEIGHINGS,
    "gain": ("weight", "offset", "none"),
    "interpolation": INTERPOLATIONS,
    "layout": SINUSOID_LAYOUTS,
    "class_token": CLASS_TOKENS,
    "reads": READS,
    "labels": LABELLED,
    "gate": OUTPUT_GATES,
    "through": THROUGH,
}

# What may stand where there is nothing; a call, because it may depend on the part.
ABSENT: dict[tuple[type[Part], str], Callable[[Any], object]] = {
    (Attention, "positions"): lambda part: Rotary(d_rotary=part.d_head // 2 * 2),
    (Attention, "q_norm"): lambda part: RMSNorm(d=part.d_head),
    (Attention, "k_norm"): lambda part: RMSNorm(d=part.d_head),
    (Attention, "differential"): lambda part: Differential(
        n_heads=part.n_heads, d_head=part.d_head, norm=RMSNorm(d=2 * part.value_width), start=0.5
    ),
    (Attention, "d_value"): lambda part: part.d_head + 2,
    (Attention, "d_input"): lambda part: part.d_model + 2,
    (Attention, "v_norm"): lambda part: RMSNorm(d=part.value_width, gain="none"),
    (Attention, "kv_name"): lambda part: "early",
    (Attention, "kv_from"): lambda part: "early",
    (Attention, "window"): lambda part: 8,
    (Attention, "chunk"): lambda part: 8,
    (Attention, "stride"): lambda part: 3,
    (Attention, "summary"): lambda part: 2,
    (Attention, "softcap"): lambda part: 1.0,
    (Attention, "scale"): lambda part: 1.5 * part.d_head**-0.5,
    (Attention, "temperature"): lambda part: QueryTemperature(scale=1.0, floor=8),
    (Branch, "side"): lambda part: SideTransformer(shared=_shared(part.body.d_model)),
    (SharedTransformer, "norm"): lambda part: RMSNorm(d=2 * part.d_model, gain="none"),
    (SharedTransformer, "ffn_norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (SharedTransformer, "weights_name"): lambda part: "early",
    (SharedTransformer, "weights_from"): lambda part: "early",
    (SideTransformer, "rank"): lambda part: 4,
    (SideTransformer, "attention_rank"): lambda part: 4,
    (Block, "weights_name"): lambda part: "early",
    (Block, "weights_from"): lambda part: "early",
    (Branch, "beside"): lambda part: Laurel(d_model=part.body.d_model, rank=3),
    (Laurel, "norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (Block, "updates"): lambda part: AlternatingUpdates(
        n_streams=2, d_model=part.branches[0].body.d_model, norm=RMSNorm(d=part.branches[0].body.d_model, gain="none")
    ),
    (AlternatingUpdates, "vector"): lambda part: PerLayerInput(d_model=part.d_model, d=2, activation="relu"),
    (AlternatingUpdates, "vector_norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (Branch, "norm"): lambda part: RMSNorm(d=part.body.d_model, gain="none"),
    (Branch, "post_norm"): lambda part: RMSNorm(d=part.body.d_model, gain="none"),
    # with a gain, since the last sum without one would be normed twice in a row, which changes nothing
    (Branch, "sum_norm"): lambda part: RMSNorm(d=part.body.d_model),
    (TokenEmbedding, "d_table"): lambda part: part.d_model,
    (TokenEmbedding, "ngrams"): lambda part: NGrams.of(
        n_vocab=part.n_vocab, d_model=part.d_model, n=2, splits=1, ratio=2
    ),
    (Head, "d_table"): lambda part: part.d_model,
    (TiedHead, "d_table"): lambda part: part.d_model,
    (Head, "softcap"): lambda part: 1.0,
    (Head, "transform"): lambda part: HeadTransform(d_model=part.d_model, activation="gelu"),
    (TiedHead, "softcap"): lambda part: 1.0,
    (TiedHead, "transform"): lambda part: HeadTransform(d_model=part.d_model, activation="gelu"),
    (HeadTransform, "d_out"): lambda part: part.d_model + 2,
    (Disentangled, "max_distance"): lambda part: part.span // 2 + 3,
    (DistanceTable, "eps"): lambda part: 0.1,
    (Model, "embedding_projection"): lambda part: EmbeddingProjection(
        d_embedding=part.embedding.d_model, d_model=part.d_model
    ),
    (Model, "relative"): lambda part: BiasTable(n_buckets=4, n_heads=1),
    (Model, "norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (Model, "embedding_norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (LatentAttention, "q_rank"): lambda part: 4,
    (LatentAttention, "q_norm"): lambda part: RMSNorm(d=part.q_rank or part.d_model, gain="none"),
    (LatentAttention, "kv_norm"): lambda part: RMSNorm(d=part.kv_rank, gain="none"),
    (LatentAttention, "positions"): lambda part: Rotary(d_rotary=part.d_rope),
    (LatentAttention, "mscale"): lambda part: 0.5,
    (LatentAttention, "indexer"): lambda part: SharedChoice(top_k=8),
    (Attention, "indexer"): lambda part: BlockIndexer(
        d_model=part.input_width, n_heads=part.n_kv_heads, d_head=4, block=2, top_k=2
    ),
    (BlockIndexer, "positions"): lambda part: Rotary(d_rotary=part.d_head),
    (BlockIndexer, "q_norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (BlockIndexer, "k_norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (CompressedAttention, "q_norm"): lambda part: RMSNorm(d=part.q_rank, gain="none"),
    (CompressedAttention, "head_norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (CompressedAttention, "kv_norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (CompressedAttention, "positions"): lambda part: Rotary(d_rotary=4),
    (CompressedAttention, "compressor"): lambda part: _compressor(part),
    (CompressedAttention, "indexer"): lambda part: EntryIndexer(
        q_rank=part.q_rank, n_heads=1, top_k=2, compressor=part.compressor or _compressor(part)
    ),
    (Compressor, "norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (Compressor, "positions"): lambda part: Rotary(d_rotary=4),
    (Branch, "streams"): lambda part: HyperConnection(n_streams=2, d_model=part.body.d_model),
    (Model, "streams"): lambda part: StreamMerge(n_streams=2, d_model=part.d_model),
    (GatedMLP, "sparsity"): lambda part: 0.5 if part.clamp is None and part.gate_scale == 1.0 else 2.0,
    (GatedMLP, "clamp"): lambda part: ClampedGate(alpha=1.0, limit=0.3),
    (Router, "table"): lambda part: 4,
    (Router, "nearness"): lambda part: 0.1,
    (LongRope, "long_attention_factor"): lambda part: 1.9 * part.attention_factor,
    (Indexer, "positions"): lambda part: Rotary(d_rotary=part.d_head),
    (Indexer, "k_norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (Vision, "layers"): lambda part: part.tower.n_layers - 1,
    (Projection, "end"): lambda part: 3,
    (Classifier, "padding"): lambda part: 3,
    (Classifier, "transform"): lambda part: Pooler(d_model=part.d_model),
    (Model, "predictors"): lambda part: (_predictor(part),),
    (Model, "types"): lambda part: TypeEmbedding(n_types=2, d_model=part.d_model),
    (Model, "head"): lambda part: Head(d_model=part.d_model, n_vocab=part.n_vocab),
    (Model, "pooler"): lambda part: Pooler(d_model=part.d_model),
    (Model, "positions"): lambda part: LearnedPositions(n_positions=part.max_positions, d_model=part.d_model),
    (Model, "per_layer"): lambda part: PerLayerEmbedding(
        n_vocab=2, n_layers=part.n_layers, d=2, d_model=part.d_model, norm=RMSNorm(d=2)
    ),
    (MixtureOfExperts, "capacity"): lambda part: 1,
    (MixtureOfExperts, "d_latent"): lambda part: 4,
    (Mamba, "dt_norm"): lambda part: RMSNorm(d=part.dt_rank, gain="none"),
    (Mamba, "b_norm"): lambda part: RMSNorm(d=part.d_state, gain="none"),
    (Mamba, "c_norm"): lambda part: RMSNorm(d=part.d_state, gain="none"),
    (Mamba2, "dt_max"): lambda part: 0.5,
    (Mamba2, "scales"): lambda part: (1.5,) * 5,
    (MixtureOfExperts, "norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (MixtureOfExperts, "post_norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (MixtureOfExperts, "shared_norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (MixtureOfExperts, "shared_post_norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (Router, "norm"): lambda part: RMSNorm(d=part.d_model, gain="none"),
    (CrossAttention, "n_source"): lambda part: 3,
    (CrossAttention, "scale"): lambda part: 1.5 * part.d_head**-0.5,
    (CrossAttention, "n_kv_heads"): lambda part: part.n_heads + 1,
    (CrossAttention, "q_norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (CrossAttention, "k_norm"): lambda part: RMSNorm(d=part.d_head, gain="none"),
    (Model, "d_source"): lambda part: part.d_model,
    (MixtureOfExperts, "shared"): lambda part: GatedMLP(d_model=part.d_model, d_ff=part.d_ff, activation="silu"),
    # by the sum of two: the best expert is in the best group, and a router to one would not notice
    (Router, "groups"): lambda part: ExpertGroups(n_groups=2, top_groups=1, score="two_best"),
    (ShortConvolution, "activation"): lambda part: "silu",
    (ConvolutionModule, "norm"): lambda part: RMSNorm(d=part.conv.channels, gain="none"),
    (RelativeProjection, "window"): lambda part: 8,
    (RelativeProjection, "max_distance"): lambda part: 1,
    (RelativeProjection, "biases"): lambda part: ScoreBiases(n_heads=part.n_heads, d_head=part.d_head),
    (Model, "hearing"): lambda part: _hearing(part),
    (Model, "own_tokens"): lambda part: _own_tokens(part),
    (Model, "blocks"): lambda part: (_attentive(part.d_model),),
    (DeltaTimeMixing, "move_rank"): lambda part: 4,
    (DeltaTimeMixing, "value_name"): lambda part: "early",
    (DeltaTimeMixing, "value_from"): lambda part: "early",
    (GatedDeltaNet, "decay_rank"): lambda part: 4,
    (GatedDeltaNet, "gate_rank"): lambda part: 4,
    (Attention, "gating"): lambda part: "channel",
    (Rotary, "grid"): lambda part: 2,
    (Rotary, "axes"): lambda part: Plane(),  # sections change nothing without images
    (MLPProjector, "first"): lambda part: MLPProjector(widths=(part.d_in, part.d_patch), activation="relu"),
    (MLPProjector, "norm"): lambda part: RMSNorm(d=part.d_in, gain="none"),
    (MLPProjector, "post_norm"): lambda part: RMSNorm(d=part.d_out, gain="none"),
    (GridAttention, "k_reduced"): lambda part: _reduced(part),
    (GridAttention, "v_reduced"): lambda part: _reduced(part),
    (GridVision, "taps"): lambda part: (0,),
    (GridVision, "mergers"): lambda part: (part.projector,),
    (Rotary, "scaling"): lambda part: LinearScaling(factor=2.0),
    (YaRN, "attention_factor"): lambda part: 1.7,
}


def _shared(d_model: int) -> SharedTransformer:
    attention = Attention(d_model=d_model, d_input=2 * d_model, n_heads=1, n_kv_heads=1, d_head=4)
    return SharedTransformer(attention=attention, ffn=GatedMLP(d_model=d_model, d_ff=4, activation="silu"))


def _attentive(d_model: int) -> Block:
    attention = Attention(d_model=d_model, n_heads=1, n_kv_heads=1, d_head=4, causal=False, cached=False)
    return Block(branches=(Branch(name="attention", body=attention),))


def _hearing(spec: Model) -> Hearing:
    tower = AudioEncoder(
        embedding=MelEmbedding(n_mels=2, n_tokens=3, d_model=4),
        blocks=(_attentive(4),),
        max_positions=3,
    )
    projector = MLPProjector(widths=(4, spec.d_model), activation="relu")
    return Hearing(tower=tower, projector=projector, placeholder=2**20)


def _own_tokens(spec: VisionLanguageModel) -> tuple[OwnTokens, ...]:
    wide = spec.vision.projector.d_in
    norm = RMSNorm(d=wide)
    return (OwnTokens(through="vision", first=0, n_rows=1, d_table=wide, d_model=spec.d_model, norm=norm),)


def _reduced(part: GridAttention) -> GridConvolution:
    wide = part.d_model
    return GridConvolution(d_in=wide, d_out=wide, kernel=3, apart=True, norm=RMSNorm(d=wide))


def _compressor(part: CompressedAttention) -> Compressor:
    return Compressor(d_model=part.d_model, d_head=part.d_head, ratio=4)


def _predictor(spec: Model) -> Predictor:
    norm = RMSNorm(d=spec.d_model)
    embedding = TokenEmbedding(n_vocab=spec.n_vocab, d_model=spec.d_model)
    return Predictor(
        embedding=embedding,
        token_norm=norm,
        stream_norm=norm,
        block=spec.blocks[-1],
        norm=norm,
        head=Head(d_model=spec.d_model, n_vocab=spec.n_vocab),
    )


# Another part of the same place, where possible with the same weights.
INSTEAD: dict[type[Part], Callable[[Any], object]] = {
    HeadNorm: lambda part: LayerNorm(d=part.d, eps=part.eps, bias=False),
    RMSNorm: lambda part: LayerNorm(d=part.d, eps=part.eps, bias=False),
    LayerNorm: lambda part: RMSNorm(d=part.d, eps=part.eps, gain="weight" if part.gain else "none"),
    GatedMLP: lambda part: MLP(d_model=part.d_model, d_ff=part.d_ff, activation=part.activation, bias=part.bias),
    MixtureOfExperts: lambda part: GatedMLP(d_model=part.d_model, d_ff=part.d_ff, activation=part.activation),
    Router: lambda part: replace(part, renormalise=not part.renormalise, eps=0.0),
    ClampedGate: lambda part: "gated",
    ExpertGroups: lambda part: None,
    MLP: lambda part: GatedMLP(d_model=part.d_model, d_ff=part.d_ff, activation=part.activation, bias=part.bias),
    XIELU: lambda part: "relu2",
    Attention: lambda part: MLP(d_model=part.d_model, d_ff=part.d_query, activation="relu", bias=part.bias),
    CrossAttention: lambda part: MLP(d_model=part.d_model, d_ff=part.d_query, activation="relu", bias=part.bias),
    SharedEmbedding: lambda part: TokenEmbedding(n_vocab=part.n_vocab, d_model=part.d_model, scale=part.scale),
    LatentAttention: lambda part: MLP(d_model=part.d_model, d_ff=part.n_heads * part.d_value, activation="relu"),
    Indexer: lambda part: SharedChoice(top_k=part.top_k),
    SharedChoice: lambda part: None,
    BlockIndexer: lambda part: None,
    TimeMixing: lambda part: MLP(d_model=part.d_model, d_ff=part.d_state, activation="relu"),
    ChannelMixing: lambda part: MLP(d_model=part.d_model, d_ff=part.d_ff, activation="relu"),
    TokenShift: lambda part: replace(part, targets=(*part.targets, "more")),
    RGLRU: lambda part: MLP(d_model=part.d_model, d_ff=part.d_rnn, activation="relu", bias=part.bias),
    Differential: lambda part: None,
    DeltaTimeMixing: lambda part: MLP(d_model=part.d_model, d_ff=part.d_output, activation="relu"),
    GatedDeltaNet: lambda part: MLP(d_model=part.d_model, d_ff=part.d_output, activation="relu"),
    LightningAttention: lambda part: MLP(d_model=part.d_model, d_ff=part.d_query, activation="relu", bias=part.bias),
    MatrixLSTM: lambda part: MLP(d_model=part.d_model, d_ff=part.d_output, activation="relu", bias=part.bias),
    GatedConvolution: lambda part: MLP(d_model=part.d_model, d_ff=part.conv.channels, activation="relu"),
    CentredConvolution: lambda part: CausalConvolution(d_model=part.d_model, kernel=part.kernel),
    ShortConvolution: lambda part: replace(part, kernel=part.kernel + 1),
    Mamba: lambda part: MLP(d_model=part.d_model, d_ff=part.d_inner, activation="relu", bias=part.bias),
    Mamba2: lambda part: MLP(d_model=part.d_model, d_ff=part.d_inner, activation="relu", bias=part.bias),
    CompressedAttention: lambda part: MLP(d_model=part.d_model, d_ff=part.d_query, activation="relu"),
    Compressor: lambda part: replace(part, overlap=not part.overlap),
    EntryIndexer: lambda part: None,
    HyperConnection: lambda part: None,
    AlternatingUpdates: lambda part: None,
    ProjectedStreams: lambda part: StreamMerge(n_streams=part.n_streams, d_model=part.d_model),
    Laurel: lambda part: None,
    StreamMerge: lambda part: None,
    Disentangled: lambda part: None,
    DistanceTable: lambda part: BiasTable(n_buckets=part.n_rows, n_heads=1),
    BiasTable: lambda part: DistanceTable(n_rows=part.n_buckets, d_model=part.n_heads),
    Parallel: lambda part: part.attention,
    SideTransformer: lambda part: replace(part, rank=None if part.rank else 4),
    SharedTransformer: lambda part: replace(part, ffn_norm=None),
    AxialPositions: lambda part: LearnedPositions(n_positions=part.n_entries**2, d_model=part.d_model),
    PerLayerInput: lambda part: MLP(d_model=part.d_model, d_ff=part.d, activation=part.activation),
    TokenEmbedding: lambda part: TokenEmbedding(n_vocab=part.n_vocab + 1, d_model=part.d_model),
    MelEmbedding: lambda part: replace(part, n_mels=part.n_mels + 1),
    MelSubsampling: lambda part: replace(part, channels=(*part.channels, 2)),
    ConvolutionModule: lambda part: MLP(d_model=part.d_model, d_ff=part.conv.channels, activation="relu"),
    RelativeProjection: lambda part: None,
    SoftplusScale: lambda part: RMSNorm(d=part.d),
    PatchEmbedding: lambda part: TokenEmbedding(n_vocab=part.n_tokens, d_model=part.d_model),
    Classifier: lambda part: Projection(d_model=part.d_model, d_out=part.n_labels),
    Pooler: lambda part: HeadTransform(d_model=part.d_model, activation="gelu"),
    HeadTransform: lambda part: Pooler(d_model=part.d_model, activation=part.activation),
    AttentionPooling: lambda part: Projection(d_model=part.d_model, d_out=part.d_out),
    Projection: lambda part: Classifier(d_model=part.d_model, n_labels=part.d_out, bias=False),
    MLPProjector: lambda part: replace(part, widths=(*part.widths, part.d_out)),
    OwnTokens: lambda part: replace(part, first=part.first + 1),
    GridConvolution: lambda part: replace(part, kernel=part.kernel + 1),
    InvertedResidual: lambda part: replace(part, steps=part.steps * 2),
    GridAttention: lambda part: InvertedResidual(steps=(_reduced(part),), scaled=True, added=True),
    ConvolvedPatches: lambda part: PatchEmbedding(
        image_size=part.image_size, patch_size=part.patch_size, d_model=part.d_model
    ),
    ConvolvedProjector: lambda part: MLPProjector(widths=(part.d_in, part.d_out), activation="relu"),
    PooledProjector: lambda part: MLPProjector(widths=(part.d_in, part.d_out), activation="relu"),
    Model: lambda part: _shorter(part),
    Vision: lambda part: None,
    Hearing: lambda part: None,
    TileEmbedding: lambda part: replace(part, n_tiles=part.n_tiles + 1),
    TilePositions: lambda part: replace(part, n_tiles=part.n_tiles + 1),
    Windowed: lambda part: part.attention,
    Sections: lambda part: Plane(),
    Plane: lambda part: Sections(pairs=(1, 1, 0)),
    Centres: lambda part: Plane(),
    Contrast: lambda part: None,
    Head: lambda part: TiedHead(d_model=part.d_model, n_vocab=part.n_vocab),
    TiedHead: lambda part: Head(d_model=part.d_model, n_vocab=part.n_vocab),
}


def _shorter(part: Model) -> Model:
    if not part.blocks:
        return replace(part, norm=RMSNorm(d=part.d_model, gain="none"))
    return replace(part, blocks=part.blocks[:-1])


@dataclass(frozen=True)
class Mutation:
    """`make` returns the whole spec with the field at `where` (path and field) changed, or raises InputError."""

    where: str
    make: Callable[[], Any]


def mutations(part: Part, path: str = "") -> Iterator[Mutation]:
    """Yields mutations of every field at or below `part`, at least one per field."""
    place = f"{path}." if path else ""
    for name, make in replacements(part):
        yield Mutation(f"{place}{name}", make)
    children = (child for child in part.children() if not isinstance(child[1], Map))  # which follow from the sizes
    beside = {name.partition(".")[0] for name, _ in part.extras()}  # no pass reaches what lies within
    for field in in_order(part):
        value = getattr(part, field.name) if field.name not in beside else None
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, Part) and not isinstance(item, Map):
                name, child = next(children)
                assert child is item, f"{name}: children come in the order of the fields"
                yield from _below(part, field.name, i if isinstance(value, tuple) else None, item, f"{place}{name}")


def _below(part: Part, field: str, i: int | None, item: Part, path: str) -> Iterator[Mutation]:
    def put(make: Callable[[], Part]) -> Part:
        if i is None:
            return replace(part, **{field: make()})
        items = getattr(part, field)
        return replace(part, **{field: (*items[:i], make(), *items[i + 1 :])})

    for mutation in mutations(item, path):
        yield Mutation(mutation.where, lambda make=mutation.make: put(make))


def replacements(part: Part) -> Iterator[tuple[str, Callable[[], Part]]]:
    """Yields (field, function that returns the part with another value there)."""
    for field in own_fields(part):
        for make in alternatives(part, field.name):
            yield field.name, lambda name=field.name, make=make: replace(part, **{name: make()})
    if isinstance(part, Attention):
        yield "n_heads with d_head", lambda: _regrouped(part)
    if isinstance(part, AttentionPooling | CrossAttention):
        yield "n_heads with d_head", lambda: replace(part, n_heads=2 * part.n_heads, d_head=part.d_head // 2)


def alternatives(part: Part, name: str) -> Iterator[Callable[[], object]]:
    """Yields functions that return another value for the field; some of them a value that the part refuses."""
    value = getattr(part, name)
    if value is None:
        yield lambda: absent(part, name)(part)
    elif name in CHOICES and isinstance(value, str):
        yield from ((lambda other=other: other) for other in CHOICES[name] if other != value)
    elif isinstance(value, bool):
        yield lambda: not value
    elif isinstance(value, int):
        others = (value // 4 * 2, 2 * value) if value else (2,)
        yield from ((lambda other=other: other) for other in others)
    elif name in ("eps", "length_eps"):  # twice a usual one is still too small to be seen
        yield lambda: value + 1.0
    elif isinstance(value, float):
        yield from ((lambda other=other: other) for other in ((value / 2, value * 2) if value else (0.5,)))
    elif isinstance(value, str):
        yield lambda: f"{value}_"
    elif value == ():
        yield lambda: absent(part, name)(part)
    elif isinstance(value, tuple):
        yield from ((lambda other=other: other) for other in _other_tuples(value))
    else:
        instead = next((INSTEAD[kind] for kind in type(value).__mro__ if kind in INSTEAD), None)
        if instead is not None:
            yield lambda: instead(value)
        if any((kind, name) in ABSENT for kind in type(part).__mro__) and name != "head":  # else nothing is compared
            yield lambda: None


def absent(part: Part, name: str) -> Callable[[Any], object]:
    """Returns what makes what may stand where there is nothing, of the part's own kind or a base of it."""
    return next(ABSENT[kind, name] for kind in type(part).__mro__ if (kind, name) in ABSENT)


def in_order(part: Part) -> list[Field[Any]]:
    """The fields of a part, in the order of its children."""
    own = list(fields(part))  # type: ignore[arg-type]
    if isinstance(part, Attention) and part.rotate_first:
        return sorted(own, key=lambda field: field.name != "positions")
    if not isinstance(part, Model):
        return own
    return sorted(own, key=lambda field: ORDER.index(field.name) if field.name in ORDER else -1)


def _other_tuples(items: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """One shorter, in reverse order, and for numbers each one changed."""
    changed = [(*items[:i], 2 * x, *items[i + 1 :]) for i, x in enumerate(items) if isinstance(x, float)]
    return [other for other in (items[:-1], items[::-1], *changed) if other != items]


def _regrouped(part: Attention) -> Attention:
    """Twice as many heads of half the width: all matrices keep their shapes."""
    d_head, positions = part.d_head // 2, part.positions
    heads, kv_heads = 2 * part.n_heads, 2 * part.n_kv_heads
    if isinstance(positions, Rotary):
        positions = replace(positions, d_rotary=min(positions.d_rotary, d_head // 2 * 2))
    if isinstance(positions, Alibi):
        positions = replace(positions, n_heads=heads)
    return replace(part, n_heads=heads, n_kv_heads=kv_heads, d_head=d_head, positions=positions)


def own_fields(part: Part) -> list[Field[Any]]:
    """The fields of a part but those that say how its matrices are held or wrapped, of which no config knows."""
    own = fields(part)  # type: ignore[arg-type]
    return [field for field in own if field.type != "Map | None" and field.name != "format"]


def all_fields(spec: Part) -> set[str]:
    """Path and name of every field of every part of the spec."""
    return {
        f"{path}.{field.name}" if path else field.name
        for path, part in walk(spec)
        if not isinstance(part, Map)
        for field in own_fields(part)
    }
