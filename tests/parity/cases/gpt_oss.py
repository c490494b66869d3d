"""gpt_oss: sinks, windows told in each way, experts with biases, the gate's limit within what it is given."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import D_HEAD, WINDOW, draw, wide, yarn
from harness import Draw, ParityCase
from transformers import GptOssConfig

USUAL: dict[str, Any] = {
    "kind": GptOssConfig,
    "head_dim": D_HEAD,
    "hidden_act": "silu",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "swiglu_limit": 0.7,
    "swiglu_alpha": 1.3,
}
CONFIGS: dict[str, Draw] = {
    "usual": partial(yarn, tie_word_embeddings=False, **USUAL),
    "wide": partial(wide, tie_word_embeddings=True, **USUAL),
    "listed": partial(
        draw,
        attention_bias=False,
        layer_types=["full_attention", "sliding_attention"],
        **USUAL | {"num_experts_per_tok": 3},
    ),
}

# scaled-dot-product attention has no sinks there
CASE = ParityCase(family="gpt_oss", configs=CONFIGS, attentions=("eager",))
