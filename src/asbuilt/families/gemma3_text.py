"""The gemma3_text family: gemma2 with normed heads instead of capped scores, and a rotation of their own for windows.

Gemma Team 2025 (arXiv 2503.19786); the language model alone, as `Gemma3ForCausalLM` stores it.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families import gemma
from asbuilt.families.gemma2 import ACTIVATION, SANDWICH, SCALE, Windows, cap, every
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only, Values
from asbuilt.families.shared.names import QK_NORMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import KINDS, ORIGINAL, read_scaling, write_rotary
from asbuilt.families.shared.sizes import FULL, SLIDING
from asbuilt.spec import Model, Rotary

SCALINGS = {kind: KINDS[kind] for kind in ("default", "linear", "yarn", "llama3")}


def _usual(reader: ConfigReader, n_layers: int) -> tuple[str, ...]:
    """Returns the layer types that the older `sliding_window_pattern` stands for; `layer_types` may only agree."""
    key = "sliding_window_pattern"
    usual = every(reader.size(key, default=6), n_layers)
    if reader.given(key) and reader.given("layer_types"):
        reader.require(key, reader.config["layer_types"] == list(usual), "what layer_types lists")
    reader.overruled(key, "layer_types")
    for one in (key, f"_{key}"):
        reader.irrelevant(one, "layer_types, as it is written, says it")
    return usual


class _Rotaries:
    """The rotations of layers that see everything, and of those with a window.

    The newer `rope_parameters` has an object for each; the older keys are rope_theta with rope_scaling, and
    rope_local_base_freq.
    """

    usual = (FULL, "rope_theta", 1_000_000.0), (SLIDING, "rope_local_base_freq", 10_000.0)

    def read(self, reader: ConfigReader, values: Values) -> None:
        older, newer = reader.nested("rope_scaling"), reader.nested("rope_parameters")
        if newer is not None and older is not None:
            raise reader.error("rope_scaling", "given beside rope_parameters", allowed="one of the two")
        thetas = [reader.number(key, default=theta, above=1.0) for _, key, theta in self.usual]
        inside = [older, None] if newer is None else [newer.nested(kind) for kind, _, _ in self.usual]
        if newer is not None:
            newer.finish()
        given = zip(self.usual, inside, thetas, strict=True)
        values["rotaries"] = [self._one(reader, key, inner, theta, values) for (_, key, _), inner, theta in given]

    @staticmethod
    def _one(reader: ConfigReader, outside: str, inner: ConfigReader | None, theta: float, values: Values) -> Rotary:
        """Returns a rotation of base `theta`, unless the object says another and the key `outside` of it nothing."""
        d_head, context = values["d_head"], values["max_positions"]
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

    def write(self, parts: Parts) -> dict[str, Any]:
        d_head, context = parts.d_head, parts.max_positions
        found = {
            True: Rotary(d_rotary=d_head, theta=self.usual[0][2]),
            False: Rotary(d_rotary=d_head, theta=self.usual[1][2]),
        }
        for i, layer in enumerate(parts.attentions):
            found[layer.window is None] = parts.expect(layer.positions, Rotary, f"blocks.{i}.attention.body.positions")
        full, local = found[True], found[False]
        if local.scaling is None:
            return write_rotary(full, context) | {self.usual[1][1]: float(local.theta)}
        both = [write_rotary(rotary, context) for rotary in (full, local)]
        objects = [
            {"rope_theta": one["rope_theta"], **(one["rope_scaling"] or {"rope_type": "default"})} for one in both
        ]
        return {"rope_parameters": dict(zip((FULL, SLIDING), objects, strict=True))}


def _build(*, rotaries: list[Rotary], windows: tuple[int | None, ...], **values: Any) -> Model:  # noqa: ANN401
    layers = [(rotaries[window is not None], window) for window in windows]
    return gemma.build(layers=layers, sandwich=True, head_norms=True, **values)


FAMILY = Family(
    name="gemma3_text",
    heads=("Gemma3ForCausalLM",),
    keys=(  # defaults as in transformers' Gemma3TextConfig
        *gemma.keys(
            {"activation": ACTIVATION, "rotary": _Rotaries()},
            n_vocab=262208,
            d_model=2304,
            d_ff=9216,
            n_layers=26,
            n_heads=8,
            n_kv_heads=4,
            d_head=256,
            context=131072,
            ties=True,
        ),
        Windows(_usual),
        SCALE,
        Only("attn_logit_softcapping", None, reason="heads are normed here instead, and transformers never caps"),
        cap("final_logit_softcapping", "logit_softcap", None),
    ),
    build=_build,
    names=Names(stems=SANDWICH | QK_NORMS),
)
