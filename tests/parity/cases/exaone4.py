"""exaone4: windows with RoPE beside full attention without, all layers alike with RoPE, all without."""

from __future__ import annotations

from functools import partial

from drawn import D_HEAD, WINDOW, draw, yarn
from harness import Draw, ParityCase
from transformers import Exaone4Config

FULL, SLIDING = "full_attention", "sliding_attention"
CONFIGS: dict[str, Draw] = {
    "hybrid_tied": partial(
        draw,
        kind=Exaone4Config,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        head_dim=D_HEAD,
        tie_word_embeddings=True,
    ),
    "full": partial(
        yarn, kind=Exaone4Config, sliding_window=None, layer_types=[FULL] * 2, hidden_size=72, head_dim=D_HEAD
    ),
    "listed": partial(
        yarn,
        kind=Exaone4Config,
        sliding_window=WINDOW,
        num_hidden_layers=3,
        layer_types=[FULL, SLIDING, FULL],
        head_dim=D_HEAD,
        tie_word_embeddings=False,
    ),
}

CASE = ParityCase(family="exaone4", configs=CONFIGS)
