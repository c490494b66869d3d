"""The falcon_h1 family: attention and Mamba-2 side by side in every layer, with factors on what each reads and gives.

TII 2025 (arXiv 2507.22448), section 2; the factors ("multipliers") let one learning rate suit all widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from asbuilt.families import bamba
from asbuilt.families.shared import state_space
from asbuilt.families.shared.dimensions import sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import first
from asbuilt.families.shared.key import Flag, Irrelevant, Key, Number, Only, Size, Values, but, eps
from asbuilt.families.shared.names import Names, in_parallel
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_number
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, sizes
from asbuilt.spec import Block, Branch, LanguageModel, Mamba2, Parallel, RMSNorm
from asbuilt.spec.mamba2 import OutputGate

READS, GIVES = ("attention_in_multiplier", "ssm_in_multiplier"), ("attention_out_multiplier", "ssm_out_multiplier")


def build(
    *,
    eps: float,
    bias: bool,
    mlp_bias: bool,
    ssm_bias: bool,
    ssm_output_bias: bool,
    gate: OutputGate,
    ssm_scales: tuple[float, ...],
    key_scale: float,
    gate_scale: float,
    ffn_scale: float,
    embedding_scale: float,
    logit_scale: float,
    **values: Any,  # noqa: ANN401  # sizes, factors and fields of Mamba-2
) -> LanguageModel:
    """Returns the model of these sizes; a factor on the keys is one on the scores."""
    own = {key: values.pop(key) for key in ("d_state", "n_groups", "kernel", "conv_bias", "dt_min", "dt_max")}
    own |= {"n_heads": values.pop("ssm_heads"), "d_head": values.pop("ssm_head")}
    own |= {"bias": ssm_bias, "output_bias": ssm_output_bias, "gate": gate, "eps": eps}
    factors = {name: tuple(values.pop(key) for key in keys) for name, keys in SCALES.items()}
    made = sized(values)
    own["scales"] = None if set(ssm_scales) == {1.0} else ssm_scales
    norm = RMSNorm(d=made.d_model, eps=eps)
    scale = scores(made.head_width, key_scale)
    both = Parallel(
        attention=made.attention(bias=bias, output_bias=bias, scale=scale),
        ffn=state_space.mamba2(made.d_model, **own),
        **factors,
    )
    ffn = made.gated(mlp_bias, gate_scale=gate_scale)
    branches = Branch(name="parallel", body=both, norm=norm), Branch(name="ffn", body=ffn, norm=norm, scale=ffn_scale)
    blocks = (Block(branches=branches),) * made.n_layers
    return made.model(blocks, norm, embedding_scale=embedding_scale, logit_scale=logit_scale)


def scores(d_head: int, key_scale: float) -> float:
    """Returns the factor on the scores of heads whose keys are multiplied by `key_scale`."""
    return d_head**-0.5 * key_scale


def _key_scale(parts: Parts) -> float:
    """Returns the factor on the keys that gives the spec's factor on the scores: the config's, or the shortest."""
    scale, width = parts.score_scale, parts.d_head
    nearly, said = scale * width**0.5, parts.carried.get("key_multiplier")
    decimals = (float(f"{nearly:.{digits}g}") for digits in range(1, 18))
    beside = (nearly + steps * math.ulp(nearly) for steps in (-1, 1, -2, 2))  # the roots are rounded, too
    given = (float(said),) if said is not None else ()
    return next((x for x in (*given, *decimals, *beside) if scores(width, x) == scale), nearly)


def _both(parts: Parts) -> Parallel:
    return parts.expect(parts.first.body, Parallel, f"blocks.0.{parts.first.name}.body")


SCALES = {"input_scales": READS, "output_scales": GIVES}


def _scale(field: str, i: int) -> Number:
    """Returns the key of one of the factors of what is side by side."""
    key = SCALES[field][i]
    return Number(key, key, default=1.0, at=lambda parts: getattr(_both(parts), field)[i])


class _Factors:
    """A list of factors, all 1 where it is missing or null, which go `into` one argument each, or all into one."""

    def __init__(self, key: str, count: int, into: tuple[str, ...], at: Callable[[Parts], tuple[float, ...]]) -> None:
        self.key, self.count, self.into, self.at = key, count, into, at

    def read(self, reader: ConfigReader, values: Values) -> None:
        said = reader.config[self.key] if reader.given(self.key) else [1.0] * self.count
        ok = isinstance(said, list | tuple) and len(said) == self.count and all(is_number(x) and x > 0 for x in said)
        reader.require(self.key, ok, f"a list of {self.count} numbers above 0")
        factors = tuple(map(float, said))
        values |= {self.into[0]: factors} if len(self.into) == 1 else dict(zip(self.into, factors, strict=True))

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: list(self.at(parts))}


class _Width:
    """`mamba_d_ssm`, the width of all heads, which null makes `mamba_expand` times the stream; `mamba_d_head`."""

    keys = ("mamba_d_ssm", "mamba_expand", "mamba_d_head")

    def read(self, reader: ConfigReader, values: Values) -> None:
        whole, expand, width = self.keys
        null = reader.size(expand, default=2) * values["d_model"]
        reader.irrelevant(expand, f"{whole}, as it is written, says it")
        reader.irrelevant(whole, "carried so that a null stays one")
        inner, heads = reader.size(whole, default=1024, null=null), values["ssm_heads"]
        reader.require("mamba_n_heads", inner % heads == 0, f"a divisor of {whole} = {inner}")
        values["ssm_head"] = inner // heads
        if reader.given(width) and reader.config[width] != "auto":
            reader.require(width, reader.size(width) == inner // heads, f"{inner // heads}, or auto")

    def write(self, parts: Parts) -> dict[str, Any]:
        part, (whole, expand, width) = first(Mamba2)(parts), self.keys
        null = parts.carried.get(whole, 0) is None and parts.carried.get(expand, 2) * parts.d_model == part.d_inner
        return {whole: None if null else part.d_inner, width: part.d_head}


class _Gate:
    """`mamba_rms_norm`, whether there is a norm, and `mamba_norm_before_gate`, which is unused where there is none."""

    keys = norm, order = "mamba_rms_norm", "mamba_norm_before_gate"

    def read(self, reader: ConfigReader, values: Values) -> None:
        normed, after = reader.flag(self.norm, default=False), reader.flag(self.order, default=True)
        values["gate"] = ("after_norm" if after else "before_norm") if normed else "no_norm"
        if not normed:
            reader.unused(self.order, "there is no norm")

    def write(self, parts: Parts) -> dict[str, Any]:
        gate = first(Mamba2)(parts).gate
        return {self.norm: False} if gate == "no_norm" else {self.norm: True, self.order: gate == "after_norm"}


MAMBA: tuple[Key, ...] = (
    Size("mamba_n_heads", "ssm_heads", default=128, at=first(Mamba2, "n_heads")),
    _Width(),
    *(key for key in bamba.MAMBA.keys if getattr(key, "into", "") in ("d_state", "n_groups", "kernel", "conv_bias")),
    Flag("mamba_proj_bias", "ssm_bias", default=False, at=first(Mamba2, "bias")),
    Flag("projectors_bias", "ssm_output_bias", default=False, at=first(Mamba2, "output_bias")),
    _Gate(),
    _Factors("ssm_multipliers", 5, ("ssm_scales",), lambda parts: first(Mamba2)(parts).scales or (1.0,) * 5),
    state_space.StepLimits(),
)
STEMS = {
    "parallel.norm": "input_layernorm",
    **in_parallel({f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkvo"}),
    **{f"parallel.body.ffn.{part}": f"mamba.{name}" for part, name in state_space.OF_MAMBA2.items()},
    "ffn.norm": "pre_ff_layernorm",
    **{f"ffn.body.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}

FAMILY = Family(
    name="falcon_h1",
    heads=("FalconH1ForCausalLM",),
    keys=(  # defaults as in transformers' FalconH1Config
        *but(
            sizes(n_vocab=128000, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, context=8192),
            activation=lambda _: state_space.silu("hidden_act"),
        ),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        MLP_BIAS,
        *MAMBA,
        *(_scale(field, i) for field in SCALES for i in (0, 1)),
        Number("key_multiplier", "key_scale", default=1.0, at=_key_scale, carried="several give the same scores"),
        _Factors(
            "mlp_multipliers",
            2,
            ("gate_scale", "ffn_scale"),
            lambda parts: (parts.at("ffn.gate_scale"), parts.last.scale),
        ),
        Number("embedding_multiplier", "embedding_scale", default=1.0),
        Number("lm_head_multiplier", "logit_scale", default=1.0),
        state_space.COMPUTED,
        state_space.INITIAL,
        Only("attn_layer_indices", None, reason="all layers of this family are alike"),
        Only("mamba_use_mlp", True, None, reason="each layer of this family has a feed-forward"),
        Irrelevant("intermediate_size says it", "mlp_expansion_factor"),
        Irrelevant("how it is computed, not what", "mamba_chunk_size"),
    ),
    build=build,
    padding=0,
    names=Names(
        stems=STEMS,
        outside={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    ),
)
