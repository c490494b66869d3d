"""The description of transformers: parts, blocks and models as frozen data; imports neither torch nor other folders."""

from asbuilt.spec.adapters import adapted, without_adapters
from asbuilt.spec.adaptive import AdaptiveEmbedding, AdaptiveHead, ClusterHead, TokenCluster
from asbuilt.spec.altup import AlternatingUpdates, ProjectedStreams
from asbuilt.spec.attention import Attention
from asbuilt.spec.attention_pooling import AttentionPooling
from asbuilt.spec.audio import MelEmbedding, MelSubsampling
from asbuilt.spec.audio_encoder import AudioEncoder
from asbuilt.spec.audio_language_model import AudioLanguageModel
from asbuilt.spec.axial import AxialPositions
from asbuilt.spec.block import Block, Body, Branch, Parallel
from asbuilt.spec.classifier import LABELLED, Classifier, Labelled
from asbuilt.spec.compressed import CompressedAttention, Compressor, EntryIndexer
from asbuilt.spec.convolution import CausalConvolution, CentredConvolution, ShortConvolution
from asbuilt.spec.convolution_module import ConvolutionModule
from asbuilt.spec.convolved import ConvolvedPatches, GridAttention, GridConvolution, InvertedResidual, PixelConvolution
from asbuilt.spec.cross import CrossAttention
from asbuilt.spec.decoder import decoder
from asbuilt.spec.delta_net import DECAYS, DELTA_GATES, GatedDeltaNet
from asbuilt.spec.delta_time_mixing import DeltaTimeMixing
from asbuilt.spec.diagonal_state_space import DiagonalStateSpace
from asbuilt.spec.differential import Differential
from asbuilt.spec.dual_encoder import DualEncoder
from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.encoder import (
    POOLER_ACTIVATIONS,
    EmbeddingProjection,
    HeadTransform,
    Pooler,
    PoolerActivation,
    TypeEmbedding,
)
from asbuilt.spec.encoder_decoder import EncoderDecoder
from asbuilt.spec.experts import (
    GROUP_SCORES,
    PLAIN_GATINGS,
    SCORINGS,
    WEIGHINGS,
    ClampedGate,
    ExpertGroups,
    FeedForward,
    MixtureOfExperts,
    Router,
    Scoring,
)
from asbuilt.spec.feedforward import ACTIVATIONS, MLP, XIELU, Activation, GatedMLP
from asbuilt.spec.fused_predictor import FusedPredictor
from asbuilt.spec.gated_convolution import GatedConvolution
from asbuilt.spec.head import Head, SharedHead, TiedHead
from asbuilt.spec.hearing import Hearing
from asbuilt.spec.image_encoder import ImageEncoder
from asbuilt.spec.image_grid import GridPatches, GridVision, Windowed
from asbuilt.spec.indexer import BlockIndexer, Indexer, SharedChoice
from asbuilt.spec.json import dumps, from_dict, loads, to_dict
from asbuilt.spec.language_model import LanguageModel, Predictor
from asbuilt.spec.latent import LatentAttention
from asbuilt.spec.laurel import Laurel
from asbuilt.spec.lightning import LightningAttention
from asbuilt.spec.linear import Linear, Lora, Map, Mapped, Packed
from asbuilt.spec.linear_attention import LinearAttention
from asbuilt.spec.mamba import Mamba
from asbuilt.spec.mamba2 import OUTPUT_GATES, Mamba2
from asbuilt.spec.matrix_lstm import MatrixLSTM
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.model import AnyHead, Embedding, Input, Model
from asbuilt.spec.ngrams import HashedTable, NGrams
from asbuilt.spec.norms import Gain, HeadNorm, LayerNorm, Norm, RMSNorm, SoftplusScale
from asbuilt.spec.own_tokens import OwnTokens
from asbuilt.spec.part import (
    KINDS,
    Gives,
    Kind,
    Part,
    Pass,
    Product,
    Remembered,
    Role,
    Weight,
    buffers,
    runs,
    stored_weights,
    walk,
    walk_stored,
    weights,
)
from asbuilt.spec.per_layer import PerLayerEmbedding, PerLayerInput
from asbuilt.spec.positions import (
    INTERPOLATIONS,
    SINUSOID_LAYOUTS,
    Alibi,
    BiasTable,
    Centres,
    DynamicNTK,
    FrequencyFactors,
    GridPositions,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Plane,
    Proportional,
    QueryTemperature,
    RelativeBuckets,
    Rotary,
    Scaling,
    Sections,
    Sinusoids,
    YaRN,
)
from asbuilt.spec.recurrent import CELLS, Cell, Recurrent
from asbuilt.spec.relative import Disentangled, DistanceTable, RelativeProjection, ScoreBiases
from asbuilt.spec.rg_lru import RGLRU
from asbuilt.spec.side import SharedTransformer, SideTransformer
from asbuilt.spec.streams import HyperConnection, StreamMerge
from asbuilt.spec.text_encoder import TextEncoder
from asbuilt.spec.tile_embedding import TileEmbedding
from asbuilt.spec.tiles import TiledVision, TilePatches, TilePositions
from asbuilt.spec.time_mixing import ChannelMixing, TimeMixing, TokenShift
from asbuilt.spec.vision import (
    Contrast,
    ConvolvedProjector,
    MLPProjector,
    PatchEmbedding,
    PooledProjector,
    Projection,
    Projector,
    Vision,
)
from asbuilt.spec.vision_language_model import VisionLanguageModel

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "DECAYS",
    "DELTA_GATES",
    "GROUP_SCORES",
    "INTERPOLATIONS",
    "KINDS",
    "LABELLED",
    "MLP",
    "OUTPUT_GATES",
    "PLAIN_GATINGS",
    "POOLER_ACTIVATIONS",
    "RGLRU",
    "SCORINGS",
    "SINUSOID_LAYOUTS",
    "WEIGHINGS",
    "XIELU",
    "Activation",
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "Alibi",
    "AlternatingUpdates",
    "AnyHead",
    "Attention",
    "AttentionPooling",
    "AudioEncoder",
    "AudioLanguageModel",
    "AxialPositions",
    "BiasTable",
    "Block",
    "BlockIndexer",
    "Body",
    "Branch",
    "CausalConvolution",
    "Cell",
    "CentredConvolution",
    "Centres",
    "ChannelMixing",
    "ClampedGate",
    "Classifier",
    "ClusterHead",
    "CompressedAttention",
    "Compressor",
    "Contrast",
    "ConvolutionModule",
    "ConvolvedPatches",
    "ConvolvedProjector",
    "CrossAttention",
    "DeltaTimeMixing",
    "DiagonalStateSpace",
    "Differential",
    "Disentangled",
    "DistanceTable",
    "DualEncoder",
    "DynamicNTK",
    "Embedding",
    "EmbeddingProjection",
    "EncoderDecoder",
    "EntryIndexer",
    "ExpertGroups",
    "FeedForward",
    "FrequencyFactors",
    "FusedPredictor",
    "Gain",
    "GatedConvolution",
    "GatedDeltaNet",
    "GatedMLP",
    "Gives",
    "GridAttention",
    "GridConvolution",
    "GridPatches",
    "GridPositions",
    "GridVision",
    "HashedTable",
    "Head",
    "HeadNorm",
    "HeadTransform",
    "Hearing",
    "HyperConnection",
    "ImageEncoder",
    "Indexer",
    "Input",
    "InvertedResidual",
    "Kind",
    "Labelled",
    "LanguageModel",
    "LatentAttention",
    "Laurel",
    "LayerNorm",
    "LearnedPositions",
    "LightningAttention",
    "Linear",
    "LinearAttention",
    "LinearScaling",
    "Llama3Scaling",
    "LongRope",
    "Lora",
    "MLPProjector",
    "Mamba",
    "Mamba2",
    "Map",
    "Mapped",
    "MatrixLSTM",
    "MelEmbedding",
    "MelSubsampling",
    "Mixer",
    "MixtureOfExperts",
    "Model",
    "NGrams",
    "Norm",
    "OwnTokens",
    "Packed",
    "Parallel",
    "Part",
    "Pass",
    "PatchEmbedding",
    "PerLayerEmbedding",
    "PerLayerInput",
    "PixelConvolution",
    "Plane",
    "PooledProjector",
    "Pooler",
    "PoolerActivation",
    "Predictor",
    "Product",
    "ProjectedStreams",
    "Projection",
    "Projector",
    "Proportional",
    "QueryTemperature",
    "RMSNorm",
    "Recurrent",
    "RelativeBuckets",
    "RelativeProjection",
    "Remembered",
    "Role",
    "Rotary",
    "Router",
    "Scaling",
    "ScoreBiases",
    "Scoring",
    "Sections",
    "SharedChoice",
    "SharedEmbedding",
    "SharedHead",
    "SharedTransformer",
    "ShortConvolution",
    "SideTransformer",
    "Sinusoids",
    "SoftplusScale",
    "StreamMerge",
    "TextEncoder",
    "TiedHead",
    "TileEmbedding",
    "TilePatches",
    "TilePositions",
    "TiledVision",
    "TimeMixing",
    "TokenCluster",
    "TokenEmbedding",
    "TokenShift",
    "TypeEmbedding",
    "Vision",
    "VisionLanguageModel",
    "Weight",
    "Windowed",
    "YaRN",
    "adapted",
    "buffers",
    "decoder",
    "dumps",
    "from_dict",
    "loads",
    "runs",
    "stored_weights",
    "to_dict",
    "walk",
    "walk_stored",
    "weights",
    "without_adapters",
]
