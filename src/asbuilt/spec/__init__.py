"""What a transformer is: parts, blocks and models as frozen data; nothing here imports torch or the rest of asbuilt."""

from asbuilt.spec.attention import Attention
from asbuilt.spec.experts import SCORINGS, FeedForward, MixtureOfExperts, Router, Scoring
from asbuilt.spec.feedforward import ACTIVATIONS, MLP, Activation, GatedMLP
from asbuilt.spec.json import dumps, from_dict, loads, to_dict
from asbuilt.spec.model import Block, Body, Branch, Head, Model, Parallel, TiedHead, TokenEmbedding
from asbuilt.spec.norms import Gain, LayerNorm, Norm, RMSNorm
from asbuilt.spec.part import KINDS, Kind, Part, Pass, Product, Remembered, Role, Saved, Weight, runs, walk, weights
from asbuilt.spec.positions import (
    Alibi,
    DynamicNTK,
    FrequencyFactors,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    QueryTemperature,
    Rotary,
    Scaling,
    YaRN,
)

__all__ = [
    "ACTIVATIONS",
    "KINDS",
    "MLP",
    "SCORINGS",
    "Activation",
    "Alibi",
    "Attention",
    "Block",
    "Body",
    "Branch",
    "DynamicNTK",
    "FeedForward",
    "FrequencyFactors",
    "Gain",
    "GatedMLP",
    "Head",
    "Kind",
    "LayerNorm",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRope",
    "MixtureOfExperts",
    "Model",
    "Norm",
    "Parallel",
    "Part",
    "Pass",
    "Product",
    "QueryTemperature",
    "RMSNorm",
    "Remembered",
    "Role",
    "Rotary",
    "Router",
    "Saved",
    "Scaling",
    "Scoring",
    "TiedHead",
    "TokenEmbedding",
    "Weight",
    "YaRN",
    "dumps",
    "from_dict",
    "loads",
    "runs",
    "to_dict",
    "walk",
    "weights",
]
