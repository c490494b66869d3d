"""The afmoe family: gated attention with RoPE in windows alone, norms around each branch, corrected sigmoid routing.

Arcee AI 2025, the model cards and published code of Trinity.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Values, but, eps
from asbuilt.families.shared.names import ATTENTION, EXPERTS, GATED, QK_NORMS, SHARED_EXPERTS, Names
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import HeadWidth, LayerWindows, every_but_last, sizes
from asbuilt.spec import Model

STEMS = {
    "attention.norm": "input_layernorm",
    "attention.post_norm": "post_attention_layernorm",
    "ffn.norm": "pre_mlp_layernorm",
    "ffn.post_norm": "post_mlp_layernorm",
    "attention.body.gate": "self_attn.gate_proj",
    "ffn.body.router": "mlp.router.gate",
    "ffn.body.router.correction": "mlp.expert_bias",
}


def build(*, scaled: bool = False, windows: tuple[int | None, ...] = (), **values: Any) -> Model:  # noqa: ANN401
    """Returns the model; layers without a window have no RoPE, `scaled` embeddings are multiplied by d_model^0.5.

    Other `values` are those of `llama.build`.
    """
    return llama.build(
        windows=windows,
        rope_layers=tuple(window is not None for window in windows),
        head_norms=True,
        gating="channel",
        norm_at="both",
        embedding_scale=values["d_model"] ** 0.5 if scaled else 1.0,
        **values,
    )


def _by_interval(reader: ConfigReader, values: Values) -> tuple[bool, ...]:
    """Returns which layers have windows: all but the last of each `global_attn_every_n_layers`."""
    key = "global_attn_every_n_layers"
    interval = reader.size(key, default=4)
    reader.overruled(key, "layer_types")
    reader.irrelevant(key, "layer_types, as it is written, says it")
    return every_but_last(values["n_layers"], interval)


FAMILY = replace(
    llama.FAMILY,
    name="afmoe",
    heads=("AfmoeForCausalLM",),
    keys=(  # defaults as in transformers' AfmoeConfig
        *but(
            sizes(n_vocab=200192, d_model=2048, d_ff=6144, n_layers=32, n_heads=16, context=16384),
            d_head=HeadWidth(128),
            d_ff=experts.dense,
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=64, top_k=6),
            replace(experts.routed_scale(1.0), key="route_scale"),
            Only("score_func", "sigmoid", reason="this family scores by sigmoid"),
            Only("route_norm", True, reason="weights are always divided by their sum"),
            scoring="sigmoid",
            correction=True,
            renormalise=True,
            eps=experts.EPS,
        ),
        *but(
            experts.fine_grained(d_expert=1408, n_shared=2, n_dense=1),
            n_shared={"key": "num_shared_experts"},
            n_dense={"key": "num_dense_layers"},
        ),
        eps("rms_norm_eps", 1e-5),
        Only("attention_bias", False, reason="gates without biases beside maps with are not supported"),
        LayerWindows(default=1024, usual=_by_interval, required=True),
        Flag("mup_enabled", "scaled", default=False, at=lambda parts: parts.embedding_scale != 1.0),
        Only("n_group", 1, None, reason="the best experts are taken, whatever their groups"),
        Only("topk_group", 1, None, reason="the best experts are taken, whatever their groups"),
        Only("num_expert_groups", 1, None, reason="the best experts are taken, whatever their groups"),
        Only("num_limited_groups", 1, None, reason="the best experts are taken, whatever their groups"),
        Irrelevant("training only", "load_balance_coeff"),
        Irrelevant("how products are computed", "use_grouped_mm"),
    ),
    build=build,
    names=Names(stems=ATTENTION | GATED | QK_NORMS | SHARED_EXPERTS | STEMS, experts=EXPERTS),
)
