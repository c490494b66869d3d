"""mamba: biases with and without, tied and not, channels that are no multiple of the stream.

transformers' hidden states are those after each block and the last one normed, without the embedding.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from harness import Draw, Inputs, Kind, ParityCase, Trace
from transformers import MambaConfig, PreTrainedConfig, PreTrainedModel


class OfStack(Kind):
    """A stack of state spaces, whose embedding is not among its hidden states."""

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns what transformers' model makes of the inputs, by our paths."""
        out: Any = model(**inputs, output_hidden_states=True, use_cache=False)
        blocks = {f"blocks.{i}": hidden for i, hidden in enumerate(out.hidden_states[:-2])}
        first: Any = model.get_input_embeddings()
        return {"embedding": first(inputs["input_ids"]), **blocks, "norm": out.hidden_states[-1], "head": out.logits}


def draw(rng: Random, kind: type[PreTrainedConfig] = MambaConfig, **more: object) -> PreTrainedConfig:
    """A config of the class; `more` overrides."""
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": rng.choice([20, 28]),
        "num_hidden_layers": 2,
        "state_size": rng.choice([5, 8]),
        "conv_kernel": rng.choice([3, 4]),
        "use_conv_bias": rng.random() < 0.5,
        "layer_norm_epsilon": rng.uniform(0.05, 0.2),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return kind(**sizes)


CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True),
    "untied": partial(draw, tie_word_embeddings=False, use_bias=True, time_step_rank=3, intermediate_size=33),
}

CASE = ParityCase(family="mamba", configs=CONFIGS, kind=OfStack(), attentions=("eager",))
