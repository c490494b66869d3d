"""The hunyuan_v1_moe family: hunyuan_v1_dense with experts in every layer, beside a shared one of the same width.

Hunyuan-A13B: Tencent 2025, its technical report and model card. Numbers that may be told layer by layer must be equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import hunyuan_v1_dense, llama
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Irrelevant, Only, but
from asbuilt.families.shared.names import EXPERTS, STEMS, Names

# which may be a list, of one number for each layer
LISTED = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
SHARED = {f"ffn.body.shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}


def _alike(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with the number of all layers in the place of a list of equal ones."""
    lists = {key: config[key] for key in LISTED if isinstance(config.get(key), list) and config[key]}
    same = {key: said[0] for key, said in lists.items() if all(one == said[0] for one in said)}
    return config | same


FAMILY = replace(
    llama.FAMILY,
    name="hunyuan_v1_moe",
    heads=("HunYuanMoEV1ForCausalLM",),
    padding=0,
    prepare=_alike,
    keys=(  # defaults as in transformers' HunYuanMoEV1Config
        *hunyuan_v1_dense.keys(n_vocab=290943, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048),
        experts.TRAINING,
        experts.routed(
            *but(
                experts.counts("num_experts", "num_local_experts", n_experts=1, top_k=1),
                top_k={"key": "moe_topk", "also": ("num_experts_per_tok",)},
            ),
            renormalise=True,
        ),
        Only("moe_intermediate_size", lambda values: values["d_ff"], reason="experts are intermediate_size wide"),
        Only("num_shared_expert", 1, reason="there is one shared expert"),
        Only("use_mixed_mlp_moe", True, reason="there is one shared expert"),
        Only("norm_topk_prob", True, reason="weights are always divided by their sum"),
        Only("group_limited_greedy", False, reason="the best experts are taken, whatever their groups"),
        Only("routed_scaling_factor", 1, False, reason="weights are not multiplied"),
        Only("moe_layer_num_skipped", 0, reason="every layer has experts"),
        Irrelevant("training only", "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"),
        Irrelevant("of groups, which are not used", "n_group", "topk_group"),
    ),
    build=lambda **values: hunyuan_v1_dense.BUILD(n_shared=1, **values),
    names=Names(stems=STEMS | hunyuan_v1_dense.QK_NORMS | SHARED | {"ffn.body.router": "mlp.gate.wg"}, experts=EXPERTS),
)
