"""cohere2: windows with RoPE beside full attention without, by interval or as listed; biases or none."""

from __future__ import annotations

from functools import partial

from drawn import WINDOW, draw, yarn
from harness import Draw, ParityCase
from transformers import Cohere2Config

CONFIGS: dict[str, Draw] = {
    "interval_tied": partial(
        draw,
        kind=Cohere2Config,
        eps="layer_norm_eps",
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        logit_scale=0.3,
        tie_word_embeddings=True,
    ),
    "listed_biased": partial(
        yarn,
        kind=Cohere2Config,
        eps="layer_norm_eps",
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
        attention_bias=True,
        logit_scale=0.7,
        tie_word_embeddings=False,
    ),
}
# without positions it adds as much to all scores of a query
INERT = {"blocks.0.parallel.body.attention.k.bias": "the softmax of scores does not see it"}

CASE = ParityCase(family="cohere2", configs=CONFIGS, inert_weights=INERT)
