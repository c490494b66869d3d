"""The ministral3 family: mistral whose queries are scaled by their position, and YaRN unless said.

Mistral AI 2025, the model cards and published code of Ministral 3 and Devstral 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asbuilt.families import mistral
from asbuilt.families.shared.key import Only, Values, but, eps
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import KINDS, ORIGINAL, Rope, read_rotary, usual_scaling, write_rotary_object
from asbuilt.families.shared.sizes import NullableHeadWidth, sizes, window
from asbuilt.spec import QueryTemperature, Scaling

BETA = "llama_4_scaling_beta"
# what a config without RoPE keys means
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


class _TemperedRope(Rope):
    """The RoPE keys, whose object also says how queries grow with each `original_max_position_embeddings` tokens."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        context = values["max_positions"]
        found: Values = {"temperature": None}

        def tempered(
            kind: Callable[..., Scaling | None], inner: ConfigReader, original: int, *more: int
        ) -> Scaling | None:
            beta = inner.number(BETA, default=0.0, above=-1.0)
            inner.require(BETA, beta >= 0, "a number of at least 0")
            inner.require(ORIGINAL, not beta or inner.given(ORIGINAL), f"given beside {BETA}")
            inner.only("max_position_embeddings", context, reason="repeats the key outside")
            if beta:
                found["temperature"] = QueryTemperature(scale=beta, floor=original, from_zero=True)
            return kind(inner, original, *more)

        kinds = {name: lambda *given, kind=kind: tempered(kind, *given) for name, kind in KINDS.items()}
        rotary = read_rotary(reader, values["d_head"], context, default_theta=self.theta, kinds=kinds)
        values |= {"rotary": rotary, **found}

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the object; both numbers are always there, since transformers needs them."""
        found, rope = parts.attention.temperature, write_rotary_object(parts.rotary, parts.max_positions)
        beta, floor = (
            (0.0, rope.get(ORIGINAL, parts.max_positions)) if found is None else (float(found.scale), found.floor)
        )
        return {"rope_parameters": rope | {ORIGINAL: floor, BETA: beta}}


FAMILY = replace(
    mistral.FAMILY,
    name="ministral3",
    heads=("Ministral3ForCausalLM",),
    padding=11,
    prepare=usual_scaling(ROPE),
    keys=(  # defaults as in transformers' Ministral3Config
        *but(
            sizes(n_vocab=131072, d_model=4096, d_ff=14336, n_layers=34, n_heads=32, n_kv_heads=8, context=262144),
            d_head=NullableHeadWidth(128),
            rotary=_TemperedRope(),
        ),
        eps("rms_norm_eps", 1e-5),
        window(None),
        Only("layer_types", None, reason="all layers of this family are alike"),
    ),
)
