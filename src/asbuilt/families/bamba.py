"""The bamba family: Mamba-2 in most layers, attention in those listed, with RoPE on half of each head.

IBM 2024 (huggingface.co/blog/bamba). Each layer has a gated feed-forward.
"""

from __future__ import annotations

from typing import Any, Unpack

from asbuilt.families.shared import state_space
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import Where, block, first
from asbuilt.families.shared.key import Flag, Irrelevant, Size, Values, but, eps
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, sizes
from asbuilt.spec import Attention, LanguageModel, Mamba2, RMSNorm


class _Layers:
    """`attn_layer_indices`, the layers that have attention."""

    key = "attn_layer_indices"

    def read(self, reader: ConfigReader, values: Values) -> None:
        said = reader.config[self.key] if reader.given(self.key) else []
        ok = isinstance(said, list) and all(is_whole(i) and 0 <= i < values["n_layers"] for i in said)
        reader.require(self.key, ok, f"a list of layers, each 0 to {values['n_layers'] - 1}")
        values["attends"] = tuple(i in said for i in range(values["n_layers"]))

    def write(self, parts: Parts) -> dict[str, Any]:
        blocks = enumerate(parts.model.blocks)
        return {self.key: [i for i, block in blocks if isinstance(block.branches[0].body, Attention)]}


class _HeadWidth:
    """`mamba_d_head`; `auto` is what `mamba_expand` times the stream leaves for each head, and else must be that."""

    key = "mamba_d_head"
    keys = (key, "mamba_expand")

    def read(self, reader: ConfigReader, values: Values) -> None:
        expand, heads = reader.size("mamba_expand", default=2), values["ssm_heads"]
        whole = expand * values["d_model"]
        reader.require("mamba_n_heads", whole % heads == 0, f"a divisor of mamba_expand * hidden_size = {whole}")
        values["ssm_head"] = whole // heads
        if reader.given(self.key) and reader.config[self.key] != "auto":
            reader.require(self.key, reader.size(self.key) == whole // heads, f"{whole // heads}, or auto")

    def write(self, parts: Parts) -> dict[str, Any]:
        part = first(Mamba2)(parts)
        return {self.key: part.d_head, "mamba_expand": part.d_inner // parts.d_model}


def build(
    *,
    attends: tuple[bool, ...],
    eps: float,
    bias: bool,
    mlp_bias: bool,
    **values: Any,  # noqa: ANN401  # sizes, and fields of Mamba-2
) -> LanguageModel:
    """Returns the model of these sizes; `attends` says which layers have attention."""
    mixer = taken(values, eps)
    made = _sized(**values)
    norm = RMSNorm(d=made.d_model, eps=eps)
    attention = made.attention(bias=bias, output_bias=bias)
    kinds = {attend: block(attention if attend else mixer, made.gated(mlp_bias), norm) for attend in set(attends)}
    return made.model(tuple(kinds[attend] for attend in attends), norm)


def taken(values: dict[str, Any], eps: float) -> Mamba2:
    """Returns Mamba-2, its fields taken out of the values of the keys `MAMBA`."""
    own = {key: values.pop(key) for key in ("d_state", "n_groups", "kernel", "conv_bias", "dt_min", "dt_max")}
    bias = values.pop("ssm_bias")
    sizes = {"n_heads": values.pop("ssm_heads"), "d_head": values.pop("ssm_head"), "bias": bias, "output_bias": bias}
    return state_space.mamba2(values["d_model"], **sizes, **own, eps=eps)


def _sized(**sizes: Unpack[Sizes]) -> Any:  # noqa: ANN401
    return sized(sizes)


STEMS = {
    **dict.fromkeys(("mixer.norm", "attention.norm"), "input_layernorm"),
    "ffn.norm": "pre_ff_layernorm",
    **state_space.stems("mixer", "mamba"),
    **{f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"ffn.body.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}

MAMBA = Where(
    Mamba2,
    lambda values: not all(values["attends"]),
    Size("mamba_n_heads", "ssm_heads", default=128, at=first(Mamba2, "n_heads")),
    _HeadWidth(),
    Size("mamba_d_state", "d_state", default=256, at=first(Mamba2, "d_state")),
    Size("mamba_n_groups", "n_groups", default=1, divides="ssm_heads", at=first(Mamba2, "n_groups")),
    Size("mamba_d_conv", "kernel", default=4, at=first(Mamba2, "conv.kernel")),
    Flag("mamba_conv_bias", "conv_bias", default=True, at=first(Mamba2, "conv.bias")),
    Flag("mamba_proj_bias", "ssm_bias", default=False, at=first(Mamba2, "bias")),
    state_space.StepLimits(),
)
FAMILY = Family(
    name="bamba",
    heads=("BambaForCausalLM",),
    keys=(  # defaults as in transformers' BambaConfig
        *but(
            sizes(n_vocab=128000, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, context=262144),
            rotary={"partial": 0.5},
            activation=lambda _: state_space.silu("hidden_act"),
        ),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        MLP_BIAS,
        _Layers(),
        MAMBA,
        state_space.COMPUTED,
        Irrelevant("how it is computed, not what", "mamba_chunk_size"),
    ),
    build=build,
    names=Names(
        stems=STEMS,
        outside={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    ),
)
