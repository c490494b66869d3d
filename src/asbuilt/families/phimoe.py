"""The phimoe family: mixtral with LayerNorms, biases, and a router that chooses its two experts one after the other.

Abdin et al. 2024 (arXiv 2404.14219), Phi-3.5-MoE; the router: Liu et al. 2024 (arXiv 2409.12136). Beyond the original
context longrope has its long list, as in the published code; transformers 5.24 keeps the short one there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families import llama, mixtral
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Fixed, Flag, Irrelevant, Number, Values, but, eps
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import MOST_FACTOR, ORIGINAL, ROPE_OBJECTS, Kinds, Rope
from asbuilt.families.shared.sizes import ATTENTION_BIAS, sizes, window
from asbuilt.spec import LanguageModel, LayerNorm, LongRope, Scaling


def _longrope(inner: ConfigReader, original: int, context: int, d_rotary: int) -> Scaling:
    """Returns the lists of divisors and the factors on cos and sin, which are said for either, and never derived."""
    short, long = (inner.numbers(key, d_rotary // 2) for key in ("short_factor", "long_factor"))
    within, beyond = (inner.number(key, most=MOST_FACTOR) for key in ("short_mscale", "long_mscale"))
    inner.irrelevant("factor", "the two mscales say what would follow from it")
    inner.irrelevant("attention_factor", "the two mscales stand in its place")
    return LongRope(
        short_factors=short,
        long_factors=long,
        original_context=original,
        attention_factor=within,
        long_attention_factor=None if beyond == within else beyond,
    )


class _LongRope(Rope):
    """The RoPE keys, with longrope and its two mscales."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the keys; raises InputError where the original context is said beside the RoPE object alone."""
        super().read(reader, values)
        inside = [reader.config[name] for name in ROPE_OBJECTS if reader.given(name)]
        lost = reader.given(ORIGINAL) and not any(ORIGINAL in one for one in inside)
        if isinstance(values["rotary"].scaling, LongRope) and lost:
            raise reader.error(
                ORIGINAL, "looked for in the RoPE object alone", fix="say it in rope_scaling, with the two lists"
            )

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, the original context beside the RoPE object and in it, where either is looked for."""
        scaling = parts.rotary.scaling
        if not isinstance(scaling, LongRope):
            return super().write(parts)
        beyond = scaling.long_attention_factor
        said = {
            "rope_type": "longrope",
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
            "short_mscale": float(scaling.attention_factor),
            "long_mscale": float(scaling.attention_factor if beyond is None else beyond),
            ORIGINAL: scaling.original_context,
        }
        theta = float(parts.rotary.theta)
        return {"rope_theta": theta, ORIGINAL: scaling.original_context, "rope_scaling": said}


KINDS: Kinds = {"default": lambda *_: None, "longrope": _longrope}


def build(*, head_bias: bool = False, **values: Any) -> LanguageModel:  # noqa: ANN401  what llama's takes
    """Returns the model of these sizes, whose head may have a bias."""
    made = llama.build(norms=LayerNorm, **values)
    assert made.language_head is not None
    return replace(made, head=replace(made.language_head, bias=head_bias))


def _nearness(parts: Parts) -> float:
    """Returns the router's; raises InputError where it chooses otherwise."""
    found = parts.mixture.router.nearness
    if found is None:
        raise InputError(
            "a phimoe config cannot express this", field="router.nearness", value=found, allowed="a number"
        )
    return found


FAMILY = replace(
    llama.FAMILY,
    name="phimoe",
    heads=("PhimoeForCausalLM", "PhiMoEForCausalLM"),  # the second in published files
    keys=(  # defaults as in transformers' PhimoeConfig
        *but(
            sizes(
                n_vocab=32064,
                d_model=4096,
                d_ff=6400,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                context=131072,
            ),
            rotary=_LongRope(theta=1e6, kinds=KINDS),
        ),
        experts.routed(
            experts.counts("num_local_experts", n_experts=16)[0],
            Fixed("num_experts_per_tok", 2, reason="the router of this family chooses two experts, whatever it says"),
            Number(
                "router_jitter_noise",
                "nearness",
                default=0.01,
                make=lambda said: 2 * said,
                back=lambda found: found / 2,
                at=_nearness,
            ),
            top_k=2,
        ),
        Irrelevant("training only", "input_jitter_noise"),
        eps("rms_norm_eps", 1e-5),
        window(None),
        ATTENTION_BIAS,
        Flag("lm_head_bias", "head_bias", default=False, at="head.bias"),
    ),
    build=build,
    names=mixtral.FAMILY.names,
)
