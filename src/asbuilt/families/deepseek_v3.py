"""The deepseek_v3 family: latent attention, corrected sigmoid routing within groups, layers that predict further on.

DeepSeek-AI 2024 (arXiv 2412.19437). On disk as on the hub; there weights lie in 8 bits with a scale for each tile,
which is told by `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asbuilt.families.shared import experts, latent
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import Model, Router

# of transformers' DeepseekV3Config
DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}
EPS = 1e-20  # of the sum that chosen scores are divided by


def usual_router(d_model: int, n_experts: int, top_k: int, scale: float) -> Router:
    """Returns a router of this family to one group of experts."""
    return Router(
        d_model=d_model,
        n_experts=n_experts,
        top_k=top_k,
        scoring="sigmoid",
        renormalise=True,
        correction=True,
        eps=EPS,
        scale=scale,
    )


def _read_router(reader: ConfigReader, d_model: int, n_layers: int) -> Router:
    reader.only("scoring_func", "sigmoid", reason="this family scores by sigmoid")
    reader.only("topk_method", "noaux_tc", reason="this family chooses by corrected scores, within groups")
    return experts.read_grouped_router(
        reader, d_model, n_layers, DEFAULTS, scoring="sigmoid", score="two_best", correction=True, eps=EPS
    )


def _write_router(router: Router, carried: Mapping[str, Any]) -> dict[str, Any]:
    said = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return said | experts.write_grouped_router(router, carried)


FAMILY = latent.Family(
    name="deepseek_v3",
    heads=("DeepseekV3ForCausalLM",),
    defaults=DEFAULTS,
    read_router=_read_router,
    write_router=_write_router,
    interleave_key="rope_interleave",
    predicts=True,
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
