"""The gemma2 family: gemma with norms after the branches too, windows on every other layer, and capped scores, logits.

Gemma Team 2024 (arXiv 2408.00118).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asbuilt.families import gemma
from asbuilt.families.shared.common import ACTIVATION_NAMES, read_layer_types
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Choice, Number, Optional, Values
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import FULL, SLIDING
from asbuilt.spec import Model, Rotary

SANDWICH = STEMS | {
    "attention.post_norm": "post_attention_layernorm",
    "ffn.norm": "pre_feedforward_layernorm",
    "ffn.post_norm": "post_feedforward_layernorm",
}


def every(pattern: int, n_layers: int) -> tuple[str, ...]:
    """Returns layer types of which every `pattern`th, counted from 1, sees all tokens and the others a window."""
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(n_layers))


@dataclass(frozen=True)
class Windows:
    """Each layer's window, where `layer_types` says so; `usual` are the types where a config does not list them."""

    usual: Callable[[ConfigReader, int], tuple[str, ...]]

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the windows; the key of their size counts for nothing where no layer has one."""
        reader.irrelevant("sliding_window_size", "sliding_window is what is read")
        types = read_layer_types(reader, self.usual(reader, values.pop("n_layers")))
        size = None
        if SLIDING in types:
            size = reader.size("sliding_window", default=4096)
        else:
            reader.irrelevant("sliding_window", "no layer has a window")
        values["windows"] = tuple(size if kind == SLIDING else None for kind in types)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the types, and the window where there is one."""
        windows = [layer.window for layer in parts.attentions]
        size = next((one for one in windows if one is not None), None)
        types = {"layer_types": [FULL if one is None else SLIDING for one in windows]}
        return types if size is None else types | {"sliding_window": size}


def _scalar(scale: float) -> int | float:
    """Returns the number whose root `scale` divides by, whole where that gives the same scale."""
    scalar = scale**-2
    return round(scalar) if round(scalar) >= 1 and round(scalar) ** -0.5 == scale else scalar


ACTIVATION = Choice(
    "hidden_activation",
    "activation",
    again="hidden_act",
    choices=ACTIVATION_NAMES,
    default="gelu_pytorch_tanh",
    written={"gelu_tanh": "gelu_pytorch_tanh"},
)
SCALE = Number(
    "query_pre_attn_scalar",
    "scale",
    default=256,
    make=lambda scalar: scalar**-0.5,
    back=_scalar,
    at=lambda parts: parts.score_scale,
)


def cap(key: str, into: str, default: float | None) -> Optional:
    """Returns the key of what scores or logits are capped at; null means that they are not."""
    return Optional(key, into, default=default, of=Number)


def _build(*, rotary: Rotary, windows: tuple[int | None, ...], **values: Any) -> Model:  # noqa: ANN401
    return gemma.build(layers=[(rotary, window) for window in windows], sandwich=True, **values)


FAMILY = Family(
    name="gemma2",
    heads=("Gemma2ForCausalLM",),
    keys=(  # defaults as in transformers' Gemma2Config
        *gemma.keys(
            {"activation": ACTIVATION},
            n_vocab=256000,
            d_model=2304,
            d_ff=9216,
            n_layers=26,
            n_heads=8,
            n_kv_heads=4,
            d_head=256,
            context=8192,
            ties=True,
        ),
        Windows(lambda _, n_layers: every(2, n_layers)),
        SCALE,
        cap("attn_logit_softcapping", "softcap", 50.0),
        cap("final_logit_softcapping", "logit_softcap", 30.0),
    ),
    build=_build,
    names=Names(stems=SANDWICH),
)
