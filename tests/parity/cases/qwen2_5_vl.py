"""qwen2_5_vl: windows that images do not fill, in all blocks but some; squares of four and of nine patches; YaRN."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from drawn import WINDOW, YARN, draw
from harness import Draw, ParityCase
from seeing_grids import SeeingGrids, tower
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

SECTIONS = [2, 3, 3]
COSTS = {
    "vision.tower.embedding.image_size": "says of which images the costs are declared",
    "vision.tower.norm": "its output is normed again by the projector, which leaves it as it was",
}


def text(rng: Random, kind: Any, **more: object) -> Any:  # noqa: ANN401  # configs of the two families
    """A text with sections of time, rows and columns; `more` overrides."""
    rope = {"rope_type": "default", "rope_theta": rng.uniform(50, 200), "mrope_section": SECTIONS}
    return draw(rng, kind, **{"rope_parameters": rope, **more})


def whole(rng: Random, kind: Any, inner: Any, images: Any) -> Any:  # noqa: ANN401
    """A config of a text and a tower, of one of these families."""
    return kind(
        text_config=inner,
        vision_config=images,
        image_token_id=rng.randrange(inner.vocab_size),
        tie_word_embeddings=inner.tie_word_embeddings,
    )


def config(rng: Random, merge: int = 2, full: tuple[int, ...] = (1,), **more: object) -> Qwen2_5_VLConfig:
    """A config whose windows are two squares wide; `more` overrides the text's."""
    inner = text(rng, Qwen2_5_VLTextConfig, **more)
    sizes = tower(
        rng, spatial_merge_size=merge, out_hidden_size=inner.hidden_size, hidden_act=rng.choice(["silu", "gelu"])
    )
    window = 2 * merge * sizes["patch_size"] + rng.randrange(sizes["patch_size"])
    images = Qwen2_5_VLVisionConfig(**sizes, window_size=window, fullatt_block_indexes=list(full))
    return whole(rng, Qwen2_5_VLConfig, inner, images)


def yarn(rng: Random) -> Qwen2_5_VLConfig:
    """YaRN beside sections, and windows of the text."""
    rope = YARN | {"rope_theta": rng.uniform(50, 200), "factor": rng.uniform(2, 6), "mrope_section": SECTIONS}
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return config(rng, rope_parameters=rope, **windows)


CONFIGS: dict[str, Draw] = {
    "fours": partial(config, tie_word_embeddings=True),
    "nines": partial(config, merge=3, full=(0, 2), tie_word_embeddings=False),
    "yarn": yarn,
}

CASE = ParityCase(family="qwen2_5_vl", configs=CONFIGS, kind=SeeingGrids(), inert_fields=COSTS)
