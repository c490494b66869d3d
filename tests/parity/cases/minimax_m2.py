"""minimax_m2: norms over all heads, RoPE on half of each head or all of it, corrected choice."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, draw, yarn
from harness import Draw, ParityCase
from transformers import MiniMaxM2Config

USUAL: dict[str, Any] = {
    "kind": MiniMaxM2Config,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": D_HEAD,
}
CONFIGS: dict[str, Draw] = {
    "half_turned_tied": partial(draw, rotary_dim=8, tie_word_embeddings=True, hidden_size=40, **USUAL),
    "wide": partial(yarn, tie_word_embeddings=False, hidden_size=72, **USUAL | {"num_experts_per_tok": 3}),
}

CASE = ParityCase(family="minimax_m2", configs=CONFIGS)
