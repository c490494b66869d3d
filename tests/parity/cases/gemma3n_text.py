"""gemma3n_text: two and three streams, layers that read others' keys, gates that are cut, widths by layer."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from harness import TOKENS, Draw, Inputs, Kind, ParityCase, Trace, theirs
from torch import Tensor
from transformers import Gemma3nTextConfig, PreTrainedModel

from cases.gemma import sizes
from cases.gemma2 import FULL, SLIDING, SMOOTH


class Streams(Kind):
    """Models of several residual streams, the first dimension of what transformers calls hidden states."""

    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns the trace, with all streams of a token in one vector, and the normed stream at the end."""
        normed: list[Tensor] = []
        inner: Any = model
        hook = inner.model.norm.register_forward_hook(lambda module, args, out: normed.append(out))
        found = theirs(model, inputs["input_ids"])
        hook.remove()
        streams = {path: x.permute(1, 2, 0, 3).flatten(2) for path, x in found.items() if path not in ("norm", "head")}
        return streams | {"norm": normed[0], "head": found["head"]}


def draw(rng: Random, **more: object) -> Gemma3nTextConfig:
    """A config of two kinds of layer, of which the last two read keys and values of the first two; `more` overrides."""
    drawn = {
        **sizes(rng),
        "hidden_activation": rng.choice(SMOOTH),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": rng.uniform(50, 200)} for kind in (FULL, SLIDING)
        },
        "rms_norm_eps": 0.5,
        "sliding_window": rng.randrange(6, TOKENS // 3),
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "intermediate_size": [rng.randrange(30, 60) for _ in range(4)],
        "activation_sparsity_pattern": [rng.uniform(0.5, 0.8), 0.0, 0.0, rng.uniform(0.2, 0.4)],
        "vocab_size_per_layer_input": 50,
        "hidden_size_per_layer_input": rng.choice([5, 7]),
        "altup_num_inputs": 3,
        "laurel_rank": rng.choice([3, 5]),
        "final_logit_softcapping": rng.uniform(8, 20),
        **more,
    }
    return Gemma3nTextConfig(**drawn)


TWO: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 0,
    "layer_types": [FULL, SLIDING],
    "intermediate_size": 37,
    "activation_sparsity_pattern": [0.6, 0.0],
}

CONFIGS: dict[str, Draw] = {
    "readers": partial(draw, attention_bias=False, tie_word_embeddings=True),
    "two_streams": partial(draw, attention_bias=True, tie_word_embeddings=False, altup_num_inputs=2, **TWO),
}

# the embedding is scaled by the root of its width, so that no projected stream is small
LEAST = {"streams.eps": "bounds streams far smaller than these, of whose sizes no key says anything"}
CASE = ParityCase(family="gemma3n_text", configs=CONFIGS, kind=Streams(), inert_fields=LEAST)
