"""gemma4: square images whose patches are averaged, bidirectional in windows alone, in texts of every kind."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from harness import Draw, Inputs, ParityCase, Trace
from seeing import Seeing
from transformers import Gemma4Config, Gemma4VisionConfig, PreTrainedModel

from cases.gemma2 import SMOOTH
from cases.gemma4_text import EXPERTS, NONE, SAME
from cases.gemma4_text import draw as text


class Patches(Seeing):
    """Images as their patches and the column and row of each, as transformers' model takes them."""

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The stream and the logits, with images and without."""
        size = model.config.vision_config.patch_size
        images = inputs["pixel_values"]
        side = images.shape[-1] // size
        cut = images.unflatten(3, (side, size)).unflatten(2, (side, size)).permute(0, 2, 4, 3, 5, 1)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1).expand(len(images), -1, -1)
        given = {
            "input_ids": inputs["input_ids"],
            "pixel_values": cut.reshape(len(images), side**2, -1),
            "image_position_ids": places,
            "mm_token_type_ids": inputs["token_type_ids"],
        }
        return super().theirs(model, given)


def draw(
    rng: Random, *, both: bool = True, standardize: bool = True, clipped: bool = False, **more: object
) -> Gemma4Config:
    """A config of a tower of six patches on a side, of which an image makes nine tokens."""
    ways = "vision" if both else None
    inner = text(rng, tie_word_embeddings=True, sliding_window=6, use_bidirectional_attention=ways, **more)
    inner.pad_token_id = 0
    sizes: dict[str, Any] = {
        "hidden_size": rng.choice([20, 28]),
        "intermediate_size": rng.randrange(20, 40),
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_activation": rng.choice(SMOOTH),
        "rms_norm_eps": rng.uniform(0.1, 0.3),
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "position_embedding_size": 9,
        "standardize": standardize,
        "use_clipped_linears": clipped,
        "rope_parameters": {"rope_type": "axial", "rope_theta": rng.uniform(5, 20)},
    }
    return Gemma4Config(
        text_config=inner,
        vision_config=Gemma4VisionConfig(**sizes),
        image_token_id=inner.vocab_size,
        vision_soft_tokens_per_image=9,  # pyright: ignore[reportCallIssue]  # of the processor's, which files hold
        tie_word_embeddings=True,
    )


CONFIGS: dict[str, Draw] = {
    "experts": partial(draw, num_attention_heads=4, num_key_value_heads=2, hidden_size=36, **SAME, **EXPERTS, **NONE),
    "vectors": partial(draw, both=False, standardize=False),
    "clipped": partial(draw, clipped=True),
}

CASE = ParityCase(family="gemma4", configs=CONFIGS, kind=Patches())
