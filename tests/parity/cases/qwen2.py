"""qwen2: windows on no layer, on the later ones, on all, and as `layer_types` says; heads of their own width."""

from __future__ import annotations

from functools import partial
from typing import Any

from drawn import WINDOW, common, draw
from harness import Draw, ParityCase
from transformers import PreTrainedConfig, Qwen2Config


def windows(kind: type[PreTrainedConfig]) -> dict[str, Draw]:
    """Configs with windows, told in each way."""
    three: dict[str, Any] = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "late_windows": partial(draw, kind=kind, max_window_layers=1, **three),
        "windows": partial(draw, kind=kind, max_window_layers=0, **three),
        "no_late_layer": partial(draw, kind=kind, max_window_layers=3, **three),
        "layer_types": partial(draw, kind=kind, layer_types=types, **three),
        "unused_window": partial(draw, kind=kind, use_sliding_window=False, sliding_window=WINDOW, max_window_layers=0),
    }


CASE = ParityCase(family="qwen2", configs=common(Qwen2Config) | windows(Qwen2Config))
