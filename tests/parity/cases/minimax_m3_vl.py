"""minimax_m3_vl: squares of four patches and of one, heads that RoPE covers in part, beside sparse texts."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import Draw, Inputs, ParityCase
from seeing_rows import SeeingRows
from transformers import MiniMaxM3VLConfig
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLVisionConfig

from cases.minimax_m3_vl_text import CONFIGS as TEXTS


def config(rng: Random, text: str, merge: int, wide: int) -> MiniMaxM3VLConfig:
    """A config of a small tower, whose heads are `wide`, and a small text."""
    inner, heads = TEXTS[text](rng), rng.choice([2, 3])
    images = MiniMaxM3VLVisionConfig(
        hidden_size=heads * wide,
        num_attention_heads=heads,
        num_hidden_layers=2,
        intermediate_size=rng.randrange(20, 40),
        num_channels=rng.randrange(1, 4),
        patch_size=rng.randrange(2, 4),
        temporal_patch_size=rng.randrange(1, 3),
        spatial_merge_size=merge,
        hidden_act=rng.choice(["gelu", "relu"]),
        layer_norm_eps=rng.uniform(0.05, 0.2),
        rope_parameters={"rope_type": "axial", "rope_theta": rng.uniform(2.0, 20.0)},
    )
    token = rng.randrange(inner.vocab_size)
    return MiniMaxM3VLConfig(
        text_config=inner,
        vision_config=images,
        projector_hidden_size=rng.randrange(20, 40),
        image_token_index=token,
        video_token_index=(token + 1) % inner.vocab_size,
        tie_word_embeddings=inner.tie_word_embeddings,
    )


class Seeing(SeeingRows):
    """Theirs takes the patches in squares too."""

    projector = "multi_modal_projector"

    def images(self, inputs: Inputs) -> Inputs:
        """Returns what theirs takes beside a text."""
        return super().images(inputs) | {"pixel_values": inputs["squares"]}


CONFIGS: dict[str, Draw] = {
    "fours_tied": partial(config, text="after_dense", merge=2, wide=16),
    "ones": partial(config, text="local", merge=1, wide=12),
}

COSTS = {"vision.tower.embedding.image_size": "says of which images the costs are declared"}
CASE = ParityCase(family="minimax_m3_vl", configs=CONFIGS, kind=Seeing(), inert_fields=COSTS, choosing=(".indexer.",))
