"""deepseek_v4: layers of each kind, windows, blocks and choices within the text; streams; experts by token id."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from drawn import YARN, draw
from harness import TOKENS, Draw, Inputs, Kind, ParityCase, Trace, theirs
from torch import Tensor
from transformers import DeepseekV4Config, PreTrainedConfig, PreTrainedModel


class Streams(Kind):
    """Models of several residual streams, with tables of experts that are not all the same."""

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model, its tables drawn."""
        model = super().make(config)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.copy_(torch.stack([torch.randperm(config.n_routed_experts)[: table.shape[1]] for _ in table]))
        return model

    def published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors under the names that transformers reads, but does not find again when it writes."""

        def named(name: str) -> str:
            name = name.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.").replace("hc_head.hc", "hc_head")
            return name.replace("embed_tokens", "embed")

        return {named(name): tensor for name, tensor in tensors.items()}

    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns the trace, with all streams of a token in one vector."""
        return {path: x.flatten(2) for path, x in theirs(model, inputs["input_ids"]).items()}


SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
USUAL: dict[str, Any] = {
    "kind": DeepseekV4Config,
    "num_key_value_heads": 1,
    "num_attention_heads": 4,
    "hidden_size": 20,
    "head_dim": 24,
    "partial_rotary_factor": 16 / 24,
    "hidden_act": "silu",
    "num_hidden_layers": 3,
    "q_lora_rank": 14,
    "o_groups": 2,
    "o_lora_rank": 9,
    "sliding_window": TOKENS // 6,
    "index_n_heads": 12,
    "index_head_dim": 18,
    "index_topk": 7,
    "moe_intermediate_size": 13,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.7,
    "hc_eps": 0.05,
    "hc_sinkhorn_iters": 2,
    "intermediate_size": 13,
}


def of_kinds(rng: Random, kinds: list[str], **more: object) -> PreTrainedConfig:
    """Layers of these kinds, of which those with entries may have stretched RoPE."""
    rates = {SPARSE: 2, HEAVY: 10}
    bases = {"rope_theta": rng.uniform(50, 200), "compress_rope_theta": rng.uniform(50, 200)}
    return draw(rng, layer_types=kinds, compress_rates=rates, **{**USUAL, **bases, **more})  # type: ignore[arg-type]


CONFIGS: dict[str, Draw] = {
    "heavy": partial(
        of_kinds,
        kinds=[SLIDING, HEAVY],
        num_hidden_layers=2,
        mlp_layer_types=["hash_moe", "moe"],
        rope_parameters={**YARN, "factor": 4.0},
        tie_word_embeddings=False,
    ),
    "sparse": partial(
        of_kinds,
        kinds=[SPARSE, SPARSE],
        num_hidden_layers=2,
        mlp_layer_types=["moe", "hash_moe"],
        hc_mult=3,
        scoring_func="sigmoid",
        rope_parameters=None,
        tie_word_embeddings=False,
    ),
}

# other attentions have no sinks there; what weighs streams may be scaled down to little, or be two like numbers
CASE = ParityCase(
    family="deepseek_v4", configs=CONFIGS, kind=Streams(), attentions=("eager",), choosing=(".indexer.", "streams.")
)
