"""phimoe: two experts of five chosen in turn, some near the best and some far from it; longrope with two mscales.

transformers 5.24 computes every length with the short list; the published code uses the long one beyond the original
context, so its model is given the length here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from drawn import D_HEAD, WINDOW, draw, wide
from harness import TOKENS, Draw, Kind, ParityCase
from torch import Tensor, nn
from transformers import PhimoeConfig, PreTrainedConfig

ORIGINAL = TOKENS * 2 // 3
USUAL: dict[str, Any] = {"kind": PhimoeConfig, "num_local_experts": 5, "router_jitter_noise": 0.3}


class ByLength(Kind):
    """Language models whose RoPE is told how long the text is."""

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  a model, or a model and what was amiss
        """Returns transformers' model, whose frequencies follow from the largest position."""
        loaded = super().load(folder, **settings)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        rotary = getattr(model, "model", model).rotary_emb
        plain, length = rotary.rope_init_fn, [0]

        def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            length[0] = int((args[1] if len(args) > 1 else kwargs["position_ids"]).max()) + 1

        rotary.register_forward_pre_hook(note, with_kwargs=True)
        if rotary.rope_type != "default":
            rotary.rope_init_fn = lambda config, *_, **__: plain(config, seq_len=length[0])
        return loaded


def longrope(rng: Random, **more: object) -> PreTrainedConfig:
    """A text that is beyond the original context, though half of it is not; nor is it with the original doubled."""
    short, long = ([rng.uniform(1, 4) for _ in range(D_HEAD // 2)] for _ in range(2))
    rope = {
        "rope_type": "longrope",
        "rope_theta": rng.uniform(50, 200),
        "short_factor": short,
        "long_factor": long,
        "short_mscale": 1.2,
        "long_mscale": 1.2,
        "original_max_position_embeddings": ORIGINAL,
        **more,
    }
    return draw(rng, rope_parameters=rope, **USUAL)


CONFIGS: dict[str, Draw] = {
    "bare": partial(draw, attention_bias=False, lm_head_bias=False, **USUAL),
    "biased": partial(draw, attention_bias=True, lm_head_bias=True, sliding_window=WINDOW, **USUAL),
    "wide": partial(wide, attention_bias=True, lm_head_bias=True, **USUAL),
    "longrope": longrope,
    "longrope_two_factors": partial(longrope, long_mscale=0.7),
}

CASE = ParityCase(family="phimoe", configs=CONFIGS, kind=ByLength())
