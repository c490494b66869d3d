"""Recipes of small models with mixtures of experts, and the bytes that FSDP sends of them beyond the plan's."""

from __future__ import annotations

from asbuilt.train.recipe import Recipe

MIXTRAL = (
    'model.config={model_type="mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=2, '
    "num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, "
    "max_position_embeddings=8, head_dim=8}"
)
# A shared expert with a gate, a dense block before the mixtures, and results that are not weighed to a sum of 1.
QWEN = (
    'model.config={model_type="qwen2_moe", hidden_size=16, intermediate_size=24, num_hidden_layers=3, '
    "num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=12, "
    "shared_expert_intermediate_size=20, mlp_only_layers=[0], max_position_embeddings=8}"
)
# Sigmoid scores with a correction, groups of experts, latent attention, a shared expert.
DEEPSEEK = (
    'model.config={model_type="deepseek_v3", hidden_size=16, intermediate_size=24, moe_intermediate_size=12, '
    "num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, "
    "n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, "
    "qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, max_position_embeddings=8, num_nextn_predict_layers=0}"
)
MIXTURES = {
    "mixtral": (MIXTRAL, "experts.auxiliary=0.02", "experts.z_loss=0.01"),
    "qwen-moe": (QWEN, "experts.auxiliary=0.5", "experts.capacity=1.1", "experts.sequence=0.1"),
    "deepseek": (DEEPSEEK, "experts.bias_rate=0.01"),
}


def padding(made: Recipe, ranks: int) -> int:
    """Bytes of the row of a shared expert's gate, which FSDP pads for each of so many ranks that divide weights."""
    if made.model.config["model_type"] != "qwen2_moe" or made.parallel.shard == 1:
        return 0
    # twice gathered and once scattered for a micro-batch: 16 numbers in two mixtures, in each other rank's place
    return made.step.accumulate * 3 * 2 * (16 * 4 * (ranks - 1)) * (ranks - 1) // ranks
