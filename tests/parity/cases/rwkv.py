"""rwkv: hidden widths that are not the stream's, heads tied and not.

With its cache transformers continues a text otherwise than without; without it, as we do.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from harness import TOKENS, Draw, Inputs, Kind, ParityCase, Trace
from transformers import PreTrainedModel, RwkvConfig


def draw(rng: Random, **more: object) -> RwkvConfig:
    """Three layers."""
    sizes = {
        "vocab_size": rng.randrange(60, 100),
        "context_length": TOKENS,
        "hidden_size": rng.choice([20, 26]),
        "num_hidden_layers": 3,
        "intermediate_size": rng.randrange(30, 60),
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),
        "bos_token_id": None,
        "eos_token_id": None,
        "rescale_every": 0,
        **more,
    }
    return RwkvConfig(**sizes)


class Mixing(Kind):
    """Models whose hidden states, in transformers, begin after the first block."""

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns the stream before the blocks, seen by a hook, after each, the last one normed, and logits."""
        seen: list[Any] = []
        first = model.get_submodule("rwkv.blocks.0.pre_ln")
        hook = first.register_forward_hook(lambda module, args, result: seen.append(result))
        out = model(**inputs, output_hidden_states=True, use_cache=False)
        hook.remove()
        *blocks, normed = out.hidden_states
        stream = {f"blocks.{i}": hidden for i, hidden in enumerate(blocks[:-1])}
        return {"embedding": seen[0], **stream, "norm": normed, "head": out.logits}


CONFIGS: dict[str, Draw] = {
    "untied": draw,
    "tied": partial(draw, tie_word_embeddings=True),
}

CASE = ParityCase(family="rwkv", configs=CONFIGS, kind=Mixing(), attentions=("eager",), caches=False)
