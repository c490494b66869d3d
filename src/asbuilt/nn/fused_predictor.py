"""Draft layers that read the streams of another model after several of its blocks.

Shapes: batch B, tokens T, width M, vocabulary V, drafted part of it U.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asbuilt.nn.attention import Attention
from asbuilt.nn.embedding import TokenEmbedding
from asbuilt.nn.feedforward import GatedMLP
from asbuilt.nn.head import Head
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import fused_predictor as spec


@computes(spec.FusedPredictor)
class FusedPredictor(PartModule):
    """head(norm(y)) of y = x + ffn(ffn_norm(x)), x = h + attention [token_norm(embedding), stream_norm(h)]."""

    fuse: Linear
    offsets: Tensor

    def __init__(self, part: spec.FusedPredictor, path: str) -> None:
        super().__init__(part, path)
        at = f"{path}." if path else ""
        self.part = part
        self.normed, self.n_vocab = part.normed, part.embedding.n_vocab
        self.embedding = TokenEmbedding(part.embedding, f"{at}embedding")
        self.token_norm = module(part.token_norm, f"{at}token_norm")
        self.stream_norm = module(part.stream_norm, f"{at}stream_norm")
        self.attention = Attention(part.attention, f"{at}attention")
        self.ffn_norm = module(part.ffn_norm, f"{at}ffn_norm")
        self.ffn = GatedMLP(part.ffn, f"{at}ffn")
        self.norm = module(part.norm, f"{at}norm")
        self.head = Head(part.head, f"{at}head")
        self.requires_grad_(False)

    def forward(self, next_BT: Tensor, streams: Sequence[Tensor], step: Step) -> Tensor:
        """Returns logits (B, T, V) of the tokens after `next_BT`, which follow the streams' positions."""
        return self.scores(self.states(next_BT, self.joined(streams), step))

    def joined(self, streams: Sequence[Tensor]) -> Tensor:
        """Returns h (B, T, M) of three streams."""
        return self.fuse(torch.cat([*streams], -1))

    def states(self, next_BT: Tensor, h_BTM: Tensor, step: Step) -> Tensor:
        """Returns y (B, T, M): what is read in place of h to go on."""
        step.tokens_BT = next_BT
        normed_BTM = self.stream_norm(h_BTM)
        mixed_BTM = self.attention(torch.cat((self.token_norm(self.embedding(next_BT, step)), normed_BTM), -1), step)
        x_BTM = (normed_BTM if self.normed else h_BTM) + mixed_BTM
        return x_BTM + self.ffn(self.ffn_norm(x_BTM), step)

    def scores(self, y_BTM: Tensor) -> Tensor:
        """Returns logits (B, T, V), -inf for tokens that are never drafted."""
        own_BTU = self.head(self.norm(y_BTM), None)
        places_U = torch.arange(len(self.offsets), device=own_BTU.device) + self.offsets
        logits_BTV = own_BTU.new_full((*own_BTU.shape[:2], self.n_vocab), -torch.inf)
        return logits_BTV.index_copy(-1, places_U, own_BTU)
