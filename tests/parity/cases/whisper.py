"""whisper: stacks of unlike depth, width and heads, whose sounds are longer and shorter than their texts."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import TOKENS, Draw, ParityCase
from hearing import HEARING
from transformers import WhisperConfig


def draw(rng: Random, **more: object) -> WhisperConfig:
    """A config whose texts end where the decoder's positions do."""
    heads = rng.choice([2, 3])
    sizes = {
        "vocab_size": rng.randrange(60, 100),
        "num_mel_bins": rng.randrange(5, 12),
        "d_model": heads * 2 * rng.choice([6, 10]),
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": 2 * heads,
        "encoder_ffn_dim": rng.randrange(20, 40),
        "decoder_ffn_dim": rng.randrange(40, 60),
        "max_source_positions": rng.choice([TOKENS // 3, TOKENS + 5]),
        "max_target_positions": TOKENS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "begin_suppress_tokens": None,
        **more,
    }
    return WhisperConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "gelu": partial(draw, activation_function="gelu"),
    "relu": partial(draw, activation_function="relu"),
}

CASE = ParityCase(family="whisper", configs=CONFIGS, kind=HEARING)
