"""mistral3: Pixtral's tower beside a mistral text and a ministral3 one, squares of four and of nine patches."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from drawn import ORIGINAL, WINDOW, YARN, draw
from harness import Draw, Inputs, ParityCase
from seeing_rows import SeeingRows
from torch import Tensor
from transformers import Ministral3Config, Mistral3Config, MistralConfig, PixtralVisionConfig


class Seeing(SeeingRows):
    """Images are pixels, padded to the largest, beside their sizes."""

    projector = "multi_modal_projector"

    def given(self, tiles: list[Tensor], grids: list[list[int]], patch: int) -> Inputs:
        """Returns the images (N, C, H, W) and their sizes."""
        sizes = torch.tensor([(patch * rows, patch * columns) for _, rows, columns in grids])
        height, width = sizes.amax(0).tolist()
        pixels = torch.zeros(len(tiles), tiles[0].shape[1], height, width)
        for image, own, (_, rows, columns), (h, w) in zip(pixels, tiles, grids, sizes.tolist(), strict=True):
            image[:, :h, :w] = own.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4).reshape(-1, h, w)
        return {"pixel_values": pixels, "image_sizes": sizes}

    def images(self, inputs: Inputs) -> Inputs:
        """Returns texts, pixels and sizes."""
        return {name: inputs[name] for name in ("input_ids", "pixel_values", "image_sizes")}


def tower(rng: Random, n_layers: int = 3) -> PixtralVisionConfig:
    """A config of a small tower."""
    heads = rng.choice([2, 3])
    return PixtralVisionConfig(
        hidden_size=heads * rng.choice([8, 12]),
        intermediate_size=rng.randrange(20, 40),
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        num_channels=rng.randrange(1, 4),
        patch_size=rng.randrange(2, 4),
        hidden_act=rng.choice(["silu", "gelu"]),
        rope_parameters={"rope_type": "axial", "rope_theta": rng.uniform(5.0, 50.0)},
    )


def config(rng: Random, text: Any, merge: int, bias: bool) -> Mistral3Config:  # noqa: ANN401  # of two families
    """A config of a small tower beside a text."""
    return Mistral3Config(
        text_config=text,
        vision_config=tower(rng),
        image_token_index=rng.randrange(text.vocab_size),
        projector_hidden_act=rng.choice(["gelu", "relu"]),
        multimodal_projector_bias=bias,
        spatial_merge_size=merge,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def windows(rng: Random) -> Mistral3Config:
    """A mistral text with a window."""
    text = draw(rng, MistralConfig, sliding_window=WINDOW, rms_norm_eps=1e-2, tie_word_embeddings=True)
    return config(rng, text, 2, True)


def scaled(rng: Random, merge: int) -> Mistral3Config:
    """A ministral3 text whose queries grow."""
    rope = YARN | {"rope_theta": rng.uniform(50, 200), "factor": rng.uniform(2, 6)}
    rope |= {"llama_4_scaling_beta": 0.8, "original_max_position_embeddings": ORIGINAL}
    text = draw(rng, Ministral3Config, sliding_window=None, rope_parameters=rope, tie_word_embeddings=False)
    return config(rng, text, merge, False)


CONFIGS: dict[str, Draw] = {"window_fours": windows, "scaled_nines": partial(scaled, merge=3)}

COSTS = {"vision.tower.embedding.image_size": "says of which images the costs are declared"}
CASE = ParityCase(family="mistral3", configs=CONFIGS, kind=Seeing(), inert_fields=COSTS)
