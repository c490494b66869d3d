"""What measurements and comparisons give an encoder beside token ids: the same ids again, or fixed sounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asbuilt.nn.model import Model
from asbuilt.spec import EncoderDecoder, MelEmbedding, MelSubsampling
from asbuilt.spec import model as spec


def source_of(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """Returns the encoder's input, a copy of `ids` or sounds, one for each row; empty if there is no encoder."""
    if model.spec.heard is not None:
        return {}  # a text without sounds
    if "audio" in model.spec.reads:
        return {"audio": sounds(model.spec, ids)}
    return {"source_BS": ids.clone()} if "source" in model.spec.reads else {}


def sounds(description: spec.Model, ids: Tensor, each: int = 1) -> Tensor:
    """Returns log-mel spectrograms (B, F, N) for rows of `ids`, or `each` of them, of numbers between -1 and 1."""
    stack = description.encoder if isinstance(description, EncoderDecoder) else description
    embedding = (stack if stack.heard is None else stack.heard.tower).embedding
    assert isinstance(embedding, MelEmbedding | MelSubsampling)
    shape = (each * len(ids), embedding.n_mels, embedding.n_frames)
    return torch.linspace(-1, 1, math.prod(shape), device=ids.device).view(shape)
