"""gemma2: norms on both sides, windows and caps well within the text, a scale that is not the heads' width's."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import TOKENS, Draw, ParityCase
from transformers import Gemma2Config

from cases.gemma import ACTIVATIONS, sizes

# Under relu the gated product is homogeneous, and the norm after it hides nearly all of the eps of the norm before it.
SMOOTH = tuple(name for name in ACTIVATIONS if name != "relu")
FULL, SLIDING = "full_attention", "sliding_attention"


def draw(rng: Random, **more: object) -> Gemma2Config:
    """A config of one layer with a window and one without; `more` overrides."""
    drawn = {
        **sizes(rng),
        "hidden_activation": rng.choice(SMOOTH),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50, 200)},
        "query_pre_attn_scalar": rng.randrange(20, 40),
        "sliding_window": rng.randrange(6, TOKENS // 3),
        "attn_logit_softcapping": rng.uniform(1, 4),
        "final_logit_softcapping": rng.uniform(8, 20),
        **more,
    }
    return Gemma2Config(**drawn)


CONFIGS: dict[str, Draw] = {
    "bare": partial(draw, attention_bias=False, tie_word_embeddings=True),
    "biased_untied": partial(draw, attention_bias=True, tie_word_embeddings=False),
    "uncapped": partial(draw, attn_logit_softcapping=None, final_logit_softcapping=None),
    "usual_scale": partial(draw, query_pre_attn_scalar=16),
    "listed": partial(draw, layer_types=[FULL, SLIDING]),
    "no_window": partial(draw, layer_types=[FULL, FULL]),
}
CONFIGS |= {activation: partial(draw, hidden_activation=activation) for activation in SMOOTH}

# sdpa leaves the scores uncapped, and says so
CASE = ParityCase(family="gemma2", configs=CONFIGS, attentions=("eager",))
