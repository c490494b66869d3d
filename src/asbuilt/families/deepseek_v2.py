"""The deepseek_v2 family: latent attention, and softmax routing that may be limited to the best groups of experts.

DeepSeek-AI 2024 (arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asbuilt.families.shared import latent
from asbuilt.families.shared.experts import GROUPS, MOST_EXPERTS
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import ExpertGroups, Model, Router

# of transformers' DeepseekV2Config; num_experts_per_tok has none
DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
}
METHODS = {"greedy": False, "group_limited_greedy": True}


def _read_router(reader: ConfigReader, d_model: int, n_layers: int) -> Router:
    """Returns the router; under `greedy` the numbers of groups are without effect."""
    for key in ("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"):
        reader.irrelevant(key, "training only")
    reader.only("scoring_func", "softmax", reason="this family scores by softmax")
    reader.only("norm_topk_prob", False, None, reason="transformers and the published code differ in what follows")
    n_experts = reader.size(
        "n_routed_experts", "num_experts", default=DEFAULTS["n_routed_experts"], most=MOST_EXPERTS // n_layers
    )
    top_k = reader.size("num_experts_per_tok")
    limited = reader.choice("topk_method", choices=METHODS, default="greedy")
    groups = _read_groups(reader, n_experts) if limited else None
    for key in (*GROUPS, "topk_method"):
        reader.irrelevant(key, "carried, since without a limit they mean nothing")
    most = n_experts if groups is None else n_experts // groups.n_groups * groups.top_groups
    reader.require("num_experts_per_tok", top_k <= most, f"at most the {most} experts")
    scale = reader.number("routed_scaling_factor", default=1.0)
    return Router(d_model=d_model, n_experts=n_experts, top_k=top_k, groups=groups, scale=scale)


def _read_groups(reader: ConfigReader, n_experts: int) -> ExpertGroups | None:
    n_groups, top_groups = (reader.size(key) for key in GROUPS)
    reader.require("n_group", n_experts % n_groups == 0, f"a divisor of the {n_experts} experts")
    reader.require("topk_group", top_groups <= n_groups, f"at most the {n_groups} groups")
    return ExpertGroups(n_groups=n_groups, top_groups=top_groups, score="best") if top_groups < n_groups else None


def _write_router(router: Router, carried: Mapping[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {key: carried[key] for key in (*GROUPS, "topk_method") if key in carried}
    if router.groups is not None:
        numbers = (router.groups.n_groups, router.groups.top_groups, "group_limited_greedy")
        said = dict(zip((*GROUPS, "topk_method"), numbers, strict=True))
    elif METHODS.get(said.get("topk_method", "greedy")) and said.get("n_group") != said.get("topk_group"):
        said["topk_method"] = "greedy"
    return {
        "n_routed_experts": router.n_experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.renormalise,
        "routed_scaling_factor": float(router.scale),
        "scoring_func": router.scoring,
        **said,
    }


FAMILY = latent.Family(
    name="deepseek_v2",
    heads=("DeepseekV2ForCausalLM",),
    defaults=DEFAULTS,
    read_router=_read_router,
    write_router=_write_router,
)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    return latent.read(FAMILY, config, name)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    return latent.write(FAMILY, spec, carried, dtype)


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors, as on the hub: one matrix for each expert."""
    return latent.table(spec, FAMILY.name)
