"""The gemma3_text family: gemma2 with normed heads instead of capped scores, and a rotation of their own for windows.

Gemma Team 2025 (arXiv 2503.19786); the language model alone, as `Gemma3ForCausalLM` stores it.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families import gemma
from asbuilt.families.gemma2 import (
    FULL,
    SLIDING,
    every,
    read_activation,
    read_cap,
    read_scale,
    read_windows,
    write_more,
)
from asbuilt.families.gemma2 import STEMS as GEMMA2_STEMS
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import KINDS, ORIGINAL, read_scaling, write_rotary
from asbuilt.families.shared.table import Table
from asbuilt.spec import Model, Rotary

FAMILY = "gemma3_text"
HEADS = ("Gemma3ForCausalLM",)
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
SCALINGS = {kind: KINDS[kind] for kind in ("default", "linear", "yarn", "llama3")}

STEMS = GEMMA2_STEMS | {"attention.body.q_norm": "self_attn.q_norm", "attention.body.k_norm": "self_attn.k_norm"}


def read(config: dict[str, Any], name: str, prefix: str = "") -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' Gemma3TextConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name, prefix)
    dtype = read_common(reader, FAMILY, HEADS)
    sizes = gemma.read_sizes(
        reader,
        vocab_size=262208,
        hidden_size=2304,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=9216,
        max_position_embeddings=131072,
    )
    reader.only("attn_logit_softcapping", None, reason="heads are normed here instead, and transformers never caps")
    full, local = read_rotaries(reader, sizes["d_head"], sizes["max_positions"])
    windows = read_windows(reader, _usual(reader, gemma.read_depth(reader, 26)))
    more: dict[str, Any] = {
        "activation": read_activation(reader),
        "scale": read_scale(reader),
        "logit_softcap": read_cap(reader, "final_logit_softcapping", None),
    }
    reader.finish()
    layers = tuple((full if window is None else local, window) for window in windows)
    spec = gemma.build(layers=layers, sandwich=True, head_norms=True, name=name, **sizes, **more)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _usual(reader: ConfigReader, n_layers: int) -> tuple[str, ...]:
    """Returns the layer types that the older `sliding_window_pattern` stands for; `layer_types` may only agree."""
    usual = every(reader.size("sliding_window_pattern", default=6), n_layers)
    if reader.given("sliding_window_pattern") and reader.given("layer_types"):
        agreed = reader.config["layer_types"] == list(usual)
        reader.require("sliding_window_pattern", agreed, "what layer_types lists")
    reader.overruled("sliding_window_pattern", "layer_types")
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        reader.irrelevant(key, "layer_types, as it is written, says it")
    return usual


def read_rotaries(reader: ConfigReader, d_head: int, context: int) -> tuple[Rotary, Rotary]:
    """Returns the rotations of layers that see everything, and of those with a window.

    The newer `rope_parameters` has an object for each; the older keys are rope_theta with rope_scaling, and
    rope_local_base_freq.
    """
    theta = reader.number("rope_theta", default=THETA, above=1.0)
    local_theta = reader.number("rope_local_base_freq", default=LOCAL_THETA, above=1.0)
    older, newer = reader.nested("rope_scaling"), reader.nested("rope_parameters")
    if newer is None:
        return _rotary(reader, "rope_theta", older, theta, d_head, context), Rotary(d_rotary=d_head, theta=local_theta)
    if older is not None:
        raise reader.error("rope_scaling", "given beside rope_parameters", allowed="one of the two")
    full, local = newer.nested(FULL), newer.nested(SLIDING)
    newer.finish()
    return (
        _rotary(reader, "rope_theta", full, theta, d_head, context),
        _rotary(reader, "rope_local_base_freq", local, local_theta, d_head, context),
    )


def _rotary(
    reader: ConfigReader, outside: str, inner: ConfigReader | None, theta: float, d_head: int, context: int
) -> Rotary:
    """Returns a rotation of base `theta`, unless the object says another and the key `outside` of it nothing."""
    if inner is None:
        return Rotary(d_rotary=d_head, theta=theta)
    if inner.spelled("rope_theta"):
        said = inner.number("rope_theta", above=1.0)
        if outside in reader.config and said != theta:
            raise inner.error("rope_theta", f"disagrees with {outside} outside", value=said)
        theta = said
    inner.only("partial_rotary_factor", 1, None, reason="this family turns whole heads")
    original = inner.size(ORIGINAL) if ORIGINAL in inner.config else context
    return Rotary(d_rotary=d_head, theta=theta, scaling=read_scaling(inner, original, context, d_head, SCALINGS))


def write_rotaries(spec: Model) -> dict[str, Any]:
    """Returns the older keys, or the newer where layers with a window have a scaling, which the older cannot say."""
    kinds = {gemma.window_of(block) is None: (block, i) for i, block in enumerate(spec.blocks)}
    found = {full: gemma.rotary_of(*place, FAMILY) for full, place in kinds.items()}
    d_head = next(iter(found.values())).d_rotary
    full = found.get(True, Rotary(d_rotary=d_head, theta=THETA))
    local = found.get(False, Rotary(d_rotary=d_head, theta=LOCAL_THETA))
    if local.scaling is None:
        return write_rotary(full, spec.max_positions) | {"rope_local_base_freq": float(local.theta)}
    return {"rope_parameters": {FULL: _write_one(full, spec), SLIDING: _write_one(local, spec)}}


def _write_one(rotary: Rotary, spec: Model) -> dict[str, Any]:
    older = write_rotary(rotary, spec.max_positions)
    return {"rope_theta": older["rope_theta"], **(older["rope_scaling"] or {"rope_type": "default"})}


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    written = write_more(spec, FAMILY, HEADS[0]) | write_rotaries(spec)
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return gemma.table_of(spec, STEMS, FAMILY)
