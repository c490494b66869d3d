"""The gemma2 family: gemma with norms after the branches too, windows on every other layer, and capped scores, logits.

Gemma Team 2024 (arXiv 2408.00118).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families import gemma
from asbuilt.families.shared.common import ACTIVATION_NAMES, config_of, read_common, read_layer_types, require_same
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import read_rotary, write_rotary
from asbuilt.families.shared.table import Table
from asbuilt.spec import Activation, Model

FAMILY = "gemma2"
HEADS = ("Gemma2ForCausalLM",)
SLIDING, FULL = "sliding_attention", "full_attention"

STEMS = gemma.STEMS | {
    "attention.post_norm": "post_attention_layernorm",
    "ffn.norm": "pre_feedforward_layernorm",
    "ffn.post_norm": "post_feedforward_layernorm",
}


def every(pattern: int, n_layers: int) -> tuple[str, ...]:
    """Returns layer types of which every `pattern`th, counted from 1, sees all tokens and the others a window."""
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(n_layers))


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' Gemma2Config.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    sizes = gemma.read_sizes(
        reader,
        vocab_size=256000,
        hidden_size=2304,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=9216,
        max_position_embeddings=8192,
    )
    rotary = read_rotary(reader, sizes["d_head"], sizes["max_positions"])
    windows = read_windows(reader, every(2, gemma.read_depth(reader, 26)))
    more: dict[str, Any] = {
        "activation": read_activation(reader),
        "scale": read_scale(reader),
        "softcap": read_cap(reader, "attn_logit_softcapping", 50.0),
        "logit_softcap": read_cap(reader, "final_logit_softcapping", 30.0),
    }
    reader.finish()
    layers = tuple((rotary, window) for window in windows)
    spec = gemma.build(layers=layers, sandwich=True, name=name, **sizes, **more)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def read_windows(reader: ConfigReader, usual: tuple[str, ...]) -> tuple[int | None, ...]:
    """Returns each layer's window; `usual` are the layer types where the config does not list them."""
    reader.irrelevant("sliding_window_size", "sliding_window is what is read")
    types = read_layer_types(reader, usual)
    if SLIDING not in types:
        reader.irrelevant("sliding_window", "no layer has a window")
        return (None,) * len(types)
    window = reader.size("sliding_window", default=4096)
    return tuple(window if kind == SLIDING else None for kind in types)


def read_activation(reader: ConfigReader) -> Activation:
    """Returns the activation: `hidden_activation` says it, and `hidden_act` beside it may only say the same."""
    activation = reader.choice("hidden_activation", choices=ACTIVATION_NAMES, default="gelu_pytorch_tanh")
    if reader.given("hidden_act"):
        same = reader.choice("hidden_act", choices=ACTIVATION_NAMES) == activation
        reader.require("hidden_act", same, "the same as hidden_activation")
    reader.irrelevant("hidden_act", "says again what hidden_activation says")
    return activation


def read_scale(reader: ConfigReader) -> float:
    """Returns what scores are multiplied by: query_pre_attn_scalar^-0.5."""
    return reader.number("query_pre_attn_scalar", default=256) ** -0.5


def read_cap(reader: ConfigReader, key: str, default: float | None) -> float | None:
    """Returns what scores or logits are capped at; null means that they are not."""
    if reader.spelled(key) is None:
        return default
    return reader.number(key) if reader.given(key) else None


def write_more(spec: Model, family: str, head: str) -> dict[str, Any]:
    """Returns what gemma 2 and 3 write alike: sizes, windows, activation, scale, and the cap of the logits."""
    attention, ffn, _ = gemma.first_parts(spec, family)
    windows = [gemma.window_of(block) for block in spec.blocks]
    window = next((width for width in windows if width is not None), None)
    return {
        **gemma.write_sizes(spec, family, head),
        "hidden_activation": gemma.written_activation(ffn),
        "query_pre_attn_scalar": _scalar(attention.d_head**-0.5 if attention.scale is None else attention.scale),
        "final_logit_softcapping": None if spec.language_head is None else spec.language_head.softcap,
        "layer_types": [FULL if width is None else SLIDING for width in windows],
        **({} if window is None else {"sliding_window": window}),
    }


def _scalar(scale: float) -> int | float:
    """Returns the number whose root `scale` divides by, whole where that gives the same scale."""
    scalar = scale**-2
    return round(scalar) if round(scalar) >= 1 and round(scalar) ** -0.5 == scale else scalar


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, *_ = gemma.first_parts(spec, FAMILY)
    written = write_more(spec, FAMILY, HEADS[0]) | {
        "attn_logit_softcapping": attention.softcap,
        **write_rotary(gemma.rotary_of(spec.blocks[0], 0, FAMILY), spec.max_positions),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return gemma.table_of(spec, STEMS, FAMILY)
