"""t5: both feed-forwards, heads of the text's own and scaled ones, buckets whose far end lies within the text."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, ParityCase
from transformers import PreTrainedConfig, T5Config
from translating import TRANSLATING

PLAIN = ("relu", "gelu", "gelu_new", "silu")


def draw(rng: Random, kind: type[PreTrainedConfig] = T5Config, **more: object) -> PreTrainedConfig:
    """A config of the class whose heads are together narrower or wider than the stream; `more` overrides."""
    heads = rng.choice([2, 3, 5])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "d_model": rng.choice([28, 36]),
        "d_kv": rng.choice([6, 10, 14]),
        "d_ff": rng.randrange(30, 60),
        "num_layers": 2,
        "num_decoder_layers": 1,
        "num_heads": heads,
        "relative_attention_num_buckets": rng.choice([8, 12]),
        "relative_attention_max_distance": rng.randrange(TOKENS // 4, TOKENS // 2),
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),  # large enough to be seen beside a stream of O(1)
        "n_positions": TOKENS,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        **more,
    }
    return kind(**sizes)


def plain(rng: Random, kind: type[PreTrainedConfig] = T5Config, **more: object) -> PreTrainedConfig:
    """A feed-forward of two matrices."""
    return draw(rng, kind, feed_forward_proj=rng.choice(PLAIN), **more)


def gated(rng: Random, kind: type[PreTrainedConfig] = T5Config, **more: object) -> PreTrainedConfig:
    """As version 1.1; transformers ties all the same, and takes an untied config to mean that nothing is scaled."""
    projection = rng.choice(["gated-gelu", "gated-silu"])
    return draw(rng, kind, feed_forward_proj=projection, num_layers=1, num_decoder_layers=2, **more)


CASE = ParityCase(
    family="t5", kind=TRANSLATING, configs={"plain": plain, "gated": partial(gated, tie_word_embeddings=False)}
)
