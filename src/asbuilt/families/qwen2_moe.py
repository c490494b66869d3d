"""The qwen2_moe family: qwen2's attention, and experts beside a shared one that a gate of its own weights.

Qwen1.5-MoE (Qwen Team 2024, its blog post) and Qwen2-57B-A14B (arXiv 2407.10671).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Flag, Size, Values, but
from asbuilt.families.shared.names import EXPERTS, ROUTER, SHARED_EXPERT, STEMS, Names
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import RMS_EPS, LayerWindows, sizes


def _every_second(reader: ConfigReader, values: Values) -> list[bool]:
    """Returns which layers have windows, as transformers has it: every second one before `max_window_layers`."""
    key = "max_window_layers"
    most = reader.size(key, default=28, least=0)
    reader.overruled(key, "layer_types")
    reader.irrelevant(key, "layer_types, as it is written, says it")
    if not reader.config.get("use_sliding_window"):
        reader.defaults.pop(key, None)
    return [i % 2 == 0 and i < most for i in range(values["n_layers"])]


def _without_zero(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config without the window of 0 that transformers writes where none is used."""
    unused = config.get("sliding_window") == 0 and not config.get("use_sliding_window")
    return config | {"sliding_window": None} if unused else config


FAMILY = replace(
    llama.FAMILY,
    name="qwen2_moe",
    heads=("Qwen2MoeForCausalLM",),
    prepare=_without_zero,
    keys=(  # defaults as in transformers' Qwen2MoeConfig
        *but(
            sizes(n_vocab=151936, d_model=2048, d_ff=5632, n_layers=24, n_heads=16, n_kv_heads=16, context=32768),
            d_ff=experts.dense,
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_experts", "num_local_experts", n_experts=60, top_k=4), experts.renormalise()
        ),
        experts.expert_width(1408),
        Size("shared_expert_intermediate_size", "d_shared", default=5632, at="mixture.shared.d_ff"),
        RMS_EPS,
        Flag("qkv_bias", "bias", default=True),
        experts.DenseLayers(),
        LayerWindows(default=4096, usual=_every_second, switch="use_sliding_window"),
    ),
    build=partial(llama.build, output_bias=False, shared_gate=True),
    names=Names(
        stems=STEMS | ROUTER | SHARED_EXPERT | {"ffn.body.shared_gate": "mlp.shared_expert_gate"}, experts=EXPERTS
    ),
)
