"""The mimo_v2_flash family: values narrower than keys, and windows with sinks and twice as many key heads.

Xiaomi LLM-Core 2026 (arXiv 2601.02780). Both kinds of layers have RoPE on a third of each head, each its own base.
A published `sliding_window_size` counts the tokens before the one that looks, as in SGLang, for which the weights were
published, and so in transformers; the `sliding_window` beside it is then one too small.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families.shared import experts
from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Number, Only, Optional, Size, Values, but
from asbuilt.families.shared.names import ATTENTION, CORRECTED_ROUTER, EXPERTS, GATED, NO_BUFFERS, NORMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import TwoRopes
from asbuilt.families.shared.sizes import ATTENTION_BIAS, HeadWidth, LayerWindows, sizes
from asbuilt.spec import Block, LanguageModel, RMSNorm, Rotary, Router

ROPES = TwoRopes(("rope_theta", 5_000_000.0), ("swa_rope_theta", 10_000.0), partial=0.334)


def build(
    router: Router,
    *,
    windows: Sequence[int | None],
    d_value: int,
    d_expert: int,
    local: Rotary,
    dense: Collection[int] = (),
    value_scale: float | None = None,
    eps: float = 1e-5,
    bias: bool = False,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes; layers with a window have `local` RoPE, those in `dense` no experts."""
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    alike: dict[str, Any] = {"bias": bias, "value_scale": 1.0 if value_scale is None else value_scale}
    alike["d_value"] = None if d_value == made.head_width else d_value

    def block(window: int | None, sparse: bool) -> Block:
        own: dict[str, Any] = {"window": window, "sinks": True, "n_kv_heads": 2 * made.n_kv_heads}
        turned = made if window is None else replace(made, rotary=local)
        attention = turned.attention(**alike, **({} if window is None else own))
        return pre_norm(attention, made.mixture(router, d_expert) if sparse else made.gated(), norm)

    layers = [(window, i not in dense) for i, window in enumerate(windows)]
    kinds = {layer: block(*layer) for layer in set(layers)}
    return made.model(tuple(kinds[layer] for layer in layers), norm)


def _as_meant(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with windows that count the token that looks, and a null scale of weights, which is 1."""
    size = config.get("sliding_window_size")
    meant: dict[str, Any] = {"sliding_window": size + 1} if isinstance(size, int) and not isinstance(size, bool) else {}
    if config.get("routed_scaling_factor", 1.0) is None:
        meant["routed_scaling_factor"] = 1.0
    return {key: said for key, said in config.items() if key != "sliding_window_size" or not meant} | meant


def _marked(reader: ConfigReader, key: str, usual: list[int], why: str) -> list[bool]:
    """Returns the layers that a list marks by 1, not by 0."""
    said = reader.config[key] if reader.given(key) else usual
    ok = isinstance(said, list) and len(said) == len(usual) and all(one in (0, 1) for one in said)
    reader.require(key, ok, f"a list of {len(usual)} values, 0 or 1")
    reader.irrelevant(key, why)
    return [one == 1 for one in said]


def _windowed(reader: ConfigReader, values: Values) -> list[bool]:
    """Returns which layers have windows: all but the first and every sixth."""
    usual = [int(i > 0 and (i + 1) % 6 > 0) for i in range(values["n_layers"])]
    return _marked(reader, "hybrid_layer_pattern", usual, "layer_types, as it is written, says it")


class _Kinds(experts.LayerKinds):
    """Which layers have experts: all but the first, those that `moe_layer_freq` marks, or those of the newer list."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the lists."""
        usual = [int(i > 0) for i in range(values["n_layers"])]
        sparse = _marked(reader, "moe_layer_freq", usual, f"{self.key}, as it is written, says it")
        values["dense"] = frozenset(i for i, one in enumerate(sparse) if not one)
        super().read(reader, values)
        values.pop("n_dense", None)
        reader.require(self.key, len(values["dense"]) < values["n_layers"], "such that some layer has experts")


def _kv_heads(parts: Parts) -> int:
    """Returns the key heads of layers without a window."""
    return parts.n_kv_heads if parts.window is None else parts.n_kv_heads // 2


def _value_scale(parts: Parts) -> float | None:
    """Returns what values are multiplied by, null where they are not."""
    scale = parts.attention.value_scale
    return None if scale == 1.0 else scale


FAMILY = Family(
    name="mimo_v2_flash",
    heads=("MiMoV2FlashForCausalLM",),
    prepare=_as_meant,
    keys=(  # defaults as in transformers' MiMoV2FlashConfig
        *but(
            sizes(n_vocab=152576, d_model=4096, d_ff=16384, n_layers=48, n_heads=64, n_kv_heads=4, context=131072),
            d_head=HeadWidth(192),
            rotary=ROPES,
            n_kv_heads={
                "at": _kv_heads,
                "must": (
                    lambda values: values["n_heads"] % (2 * values["n_kv_heads"]) == 0,
                    lambda values: f"half a divisor of num_attention_heads = {values['n_heads']}",
                ),
            },
            d_ff=experts.dense,
        ),
        Size("v_head_dim", "d_value", default=128, at="attention.value_width"),
        Only("swa_num_attention_heads", lambda values: values["n_heads"], reason="all layers have as many heads"),
        Only("swa_num_key_value_heads", lambda values: 2 * values["n_kv_heads"], reason="windows have twice as many"),
        Only("swa_head_dim", lambda values: values["d_head"], reason="heads of all layers are as wide"),
        Only("swa_v_head_dim", lambda values: values["d_value"], reason="values of all layers are as wide"),
        Only("add_swa_attention_sink_bias", True, reason="layers with a window have sinks"),
        Only("add_full_attention_sink_bias", False, reason="layers without a window have no sinks"),
        Optional("attention_value_scale", "value_scale", of=Number, default=0.707, at=_value_scale),
        experts.routed(
            Only("scoring_func", "sigmoid", reason="this family scores by sigmoid"),
            Only("topk_method", "noaux_tc", reason="this family chooses by corrected scores"),
            *experts.counts("n_routed_experts", "num_local_experts", n_experts=256, top_k=8),
            experts.Groups(n_group=1, topk_group=1, score="two_best"),
            experts.renormalise(True),
            experts.routed_scale(1.0),
            scoring="sigmoid",
            correction=True,
            eps=experts.EPS,
        ),
        experts.expert_width(2048),
        Only("n_shared_experts", None, 0, reason="this family has no shared expert"),
        Number("rms_norm_eps", "eps", default=1e-5, most=1.0, also=("layernorm_epsilon",)),
        ATTENTION_BIAS,
        LayerWindows(default=129, usual=_windowed, required=True),
        Irrelevant("sliding_window says it", "attention_chunk_size"),
        _Kinds(),
    ),
    build=build,
    names=Names(
        stems=NORMS | ATTENTION | GATED | CORRECTED_ROUTER | {"attention.body.sinks": "self_attn.attention_sink_bias"},
        experts=EXPERTS,
        ignored=NO_BUFFERS | {r"model\.mtp\..*": "prediction layers, which are not built"},
    ),
)
