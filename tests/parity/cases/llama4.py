"""llama4: towers turned by column and row, whose squares of four or nine patches go through two matrices and one."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import Draw, ParityCase
from seeing import Seeing
from transformers import Llama4Config, Llama4VisionConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from cases.llama4_text import CONFIGS as TEXTS
from cases.vit import tower

# transformers 5.24's wrapper asks its text's output for this, which has none
MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]  # pyright: ignore


def draw(rng: Random, text: str, side: int, merge: int) -> Llama4Config:
    """A config of a tower of `side` patches on a side, `merge` x `merge` of which make one token."""
    inner = TEXTS[text](rng)
    heads, patch, out = rng.choice([2, 3]), rng.randrange(2, 4), rng.randrange(20, 40)
    width = heads * rng.choice([8, 12])
    sizes: dict[str, Any] = tower(rng) | {
        "num_attention_heads": heads,
        "hidden_size": width,
        "intermediate_size": width * merge**2,
        "hidden_act": "gelu",
        "patch_size": patch,
        "image_size": side * patch + rng.randrange(patch),
        "projector_input_dim": out,
        "projector_output_dim": out,
        "vision_output_dim": out,
        "pixel_shuffle_ratio": 1 / merge,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(2.0, 20.0)},
    }
    del sizes["layer_norm_eps"]
    return Llama4Config(
        text_config=inner,
        vision_config=Llama4VisionConfig(**sizes),
        image_token_index=rng.randrange(inner.vocab_size),
        tie_word_embeddings=inner.tie_word_embeddings,
    )


CONFIGS: dict[str, Draw] = {
    "fours": partial(draw, text="usual", side=6, merge=2),
    "nines": partial(draw, text="interleaved", side=6, merge=3),
    "ones": partial(draw, text="plain", side=3, merge=1),
}

CASE = ParityCase(
    family="llama4",
    configs=CONFIGS,
    kind=Seeing(),
    # without positions it adds the same to every score of a query; the tower's, of the same ending, does matter
    idle=("blocks.1.attention.body.k.bias",),
)
