"""qwen2_vl: towers of plain feed-forward over squares of one, four and nine patches."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import Draw, ParityCase
from seeing_grids import SeeingGrids, tower
from transformers import Qwen2VLConfig, Qwen2VLTextConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

from cases.qwen2_5_vl import COSTS, text, whole


def config(rng: Random, merge: int, **more: object) -> Qwen2VLConfig:
    """A config of a small tower and a small text; `more` overrides the text's."""
    inner = text(rng, Qwen2VLTextConfig, **more)
    sizes = tower(rng, spatial_merge_size=merge, hidden_act=rng.choice(["quick_gelu", "relu"]))
    del sizes["intermediate_size"]
    wide = {"embed_dim": sizes["hidden_size"], "hidden_size": inner.hidden_size, "mlp_ratio": rng.randrange(1, 4)}
    return whole(rng, Qwen2VLConfig, inner, Qwen2VLVisionConfig(**sizes | wide))


CONFIGS: dict[str, Draw] = {
    "ones": partial(config, merge=1, tie_word_embeddings=False),
    "fours": partial(config, merge=2, tie_word_embeddings=True),
}

CASE = ParityCase(family="qwen2_vl", configs=CONFIGS, kind=SeeingGrids(), inert_fields=COSTS)
