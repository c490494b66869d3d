"""internvl: both norms, with and without those of queries and keys and the last one; two kinds of text."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import draw as text
from harness import Draw, ParityCase
from seeing import Seeing
from transformers import InternVLConfig, InternVLVisionConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from cases.vit import ACTIVATIONS, tower


def draw(rng: Random, *, kind: type[PreTrainedConfig] = Qwen2Config, merge: int = 2, **more: object) -> InternVLConfig:
    """A config of a small tower and a small text; `more` is the tower's."""
    inner: Any = text(rng, kind)
    side = {1: 3, 2: 4, 4: 8}[merge]
    sizes: dict[str, Any] = tower(rng, image_size=2 * side, patch_size=2, **more)
    return InternVLConfig(
        text_config=inner,
        vision_config=InternVLVisionConfig(**sizes),
        image_token_id=rng.randrange(inner.vocab_size),
        downsample_ratio=1 / merge,
        projector_hidden_act=rng.choice(ACTIVATIONS),
        tie_word_embeddings=inner.tie_word_embeddings,
    )


CONFIGS: dict[str, Draw] = {
    "plain": draw,
    "normed": partial(draw, merge=4, norm_type="rms_norm", use_qk_norm=True, attention_bias=True, use_mask_token=True),
    "qwen3": partial(draw, kind=Qwen3Config, merge=1, use_mean_pooling=False),
}

UNSEEN = "adds the same number to every score of a query, which softmax does not see"

CASE = ParityCase(
    family="internvl",
    configs=CONFIGS,
    kind=Seeing(),
    inert_weights={"mask_token": "stands for patches that training masks"},
)
