"""The phi3 family: llama's blocks with q, k, v and gate, up stored as one matrix each, longrope, and optional windows.

Abdin et al. 2024 (arXiv 2404.14219); longrope: Ding et al. 2024 (arXiv 2402.13753).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared.key import Only, Values, but, eps
from asbuilt.families.shared.names import NORMS, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import MOST_FACTOR, ORIGINAL, partial_factor, read_rotary
from asbuilt.families.shared.sizes import DerivedHeadWidth, sizes, window
from asbuilt.spec import LongRope, Scaling


class _LongRotary:
    """The RoPE keys; the original context stands beside the RoPE object, and is 4096 by default.

    One inside the object must agree with it; alone it is ignored, as in transformers, which overwrites it.
    """

    into = "rotary"

    def read(self, reader: ConfigReader, values: Values) -> None:
        original = reader.size(ORIGINAL, default=4096)

        def longrope(inner: ConfigReader, agreed: int, context: int, d_rotary: int) -> Scaling:
            short, long = (inner.numbers(key, d_rotary // 2) for key in ("short_factor", "long_factor"))
            factor = _attention_factor(inner, context, original)
            return LongRope(short_factors=short, long_factors=long, original_context=original, attention_factor=factor)

        kinds = {"default": lambda *_: None, "longrope": longrope, "su": longrope}
        rotary = read_rotary(reader, values["d_head"], values["max_positions"], partial=1.0, kinds=kinds)
        if rotary.scaling is None:
            reader.irrelevant(ORIGINAL, "positions are not scaled")
        values["rotary"] = rotary

    def write(self, parts: Parts) -> dict[str, Any]:
        rotary = parts.rotary
        written: dict[str, Any] = {"rope_theta": float(rotary.theta), "rope_scaling": None}
        if rotary.d_rotary != parts.d_head:
            written["partial_rotary_factor"] = partial_factor(rotary.d_rotary, parts.d_head)
        if isinstance(rotary.scaling, LongRope):
            written[ORIGINAL] = rotary.scaling.original_context
            written["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": list(rotary.scaling.short_factors),
                "long_factor": list(rotary.scaling.long_factors),
                "attention_factor": float(rotary.scaling.attention_factor),
            }
        return written


def _attention_factor(inner: ConfigReader, context: int, original: int) -> float:
    """Returns sqrt(1 + ln(factor) / ln(original context)) unless the object says otherwise (transformers' longrope)."""
    factor = inner.number("factor", default=context / original, null=context / original, most=MOST_FACTOR)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return inner.number("attention_factor", default=usual, null=usual, most=MOST_FACTOR)


FAMILY = replace(
    llama.FAMILY,
    name="phi3",
    heads=("Phi3ForCausalLM",),
    padding=32000,
    keys=(  # defaults as in transformers' Phi3Config
        *but(
            sizes(n_vocab=32064, d_model=3072, d_ff=8192, n_layers=32, n_heads=32, context=4096),
            d_head=DerivedHeadWidth(),
            rotary=_LongRotary(),
        ),
        eps("rms_norm_eps", 1e-5),
        window(None),
        Only("attention_bias", False, reason="no matrix of this family has a bias"),
        Only("mlp_bias", False, reason="no matrix of this family has a bias"),
        Only("lm_head_bias", False, reason="no matrix of this family has a bias"),
        Only("full_attn_mod", 1, reason="all layers of this family have the same attention"),
        Only("interpolate_factor", 1, reason="positions are scaled by rope_scaling alone"),
    ),
    names=Names(
        stems=NORMS | {"attention.body.o": "self_attn.o_proj", "ffn.body.down": "mlp.down_proj"},
        fused={"self_attn.qkv_proj": Fused.qkv(), "mlp.gate_up_proj": Fused(stems=("ffn.body.gate", "ffn.body.up"))},
    ),
)
