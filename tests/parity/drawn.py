"""Small configs of the families akin to llama: sizes that divide nothing they need not, and rotary scalings."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw
from transformers import PreTrainedConfig

D_HEAD = 16
ORIGINAL = TOKENS // 3
WINDOW = TOKENS // 4
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
# as in cases/llama.py: pairs fall on both sides of each threshold and between them
YARN = {"rope_type": "yarn", "beta_fast": 1.0, "beta_slow": 0.25, "original_max_position_embeddings": ORIGINAL}


def draw(
    rng: Random, kind: type[PreTrainedConfig], eps: str | None = "rms_norm_eps", **more: object
) -> PreTrainedConfig:
    """A config of the class, `eps` the name of its norms' epsilon; `more` overrides."""
    heads, kv_heads = rng.choice([(4, 2), (6, 2), (6, 3), (3, 1)])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": heads * D_HEAD,
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": rng.choice(ACTIVATIONS),
        "max_position_embeddings": TOKENS,
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200)},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **({eps: rng.uniform(0.05, 0.2)} if eps else {}),  # large enough to be seen beside a stream of O(1)
        **more,
    }
    return kind(**sizes)


def wide(
    rng: Random, kind: type[PreTrainedConfig], eps: str | None = "rms_norm_eps", **more: object
) -> PreTrainedConfig:
    """Heads that are together wider, or narrower, than the stream, which they divide into even widths all the same."""
    return draw(rng, kind, eps, **{**more, "hidden_size": rng.choice([24, 72]), "head_dim": D_HEAD})


def yarn(
    rng: Random, kind: type[PreTrainedConfig], eps: str | None = "rms_norm_eps", **more: object
) -> PreTrainedConfig:
    """YaRN, and a text three times as long as its original context."""
    rope = YARN | {"rope_theta": rng.uniform(50, 200), "factor": rng.uniform(2, 6)}
    return draw(rng, kind, eps, rope_parameters=rope, **more)


def common(kind: type[PreTrainedConfig], **more: object) -> dict[str, Draw]:
    """What every one of these families is drawn with."""
    return {
        "tied": partial(draw, kind=kind, tie_word_embeddings=True, **more),
        "untied": partial(draw, kind=kind, tie_word_embeddings=False, **more),
        "plain_heads": partial(draw, kind=kind, num_attention_heads=3, num_key_value_heads=3, hidden_size=48, **more),
        "wide": partial(wide, kind=kind, **more),
        "yarn": partial(yarn, kind=kind, **more),
    }
