"""The gpt_bigcode family: gpt2 whose matrices are stored outputs first, with one key head or as many as queries have.

SantaCoder (Ben Allal et al. 2023, arXiv 2301.03988) and StarCoder (Li et al. 2023, arXiv 2305.06161).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import gpt2
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Size, activation, depth, eps, tied
from asbuilt.families.shared.names import Fused, Names, by_key_head
from asbuilt.families.shared.sizes import four_times
from asbuilt.families.shared.table import Concat, Layout
from asbuilt.spec import Attention, Block, Model
from asbuilt.spec.part import LARGEST_SIZE


def build(*, multi_query: bool = True, scaled: bool = True, **sizes: Any) -> Model:  # noqa: ANN401
    """Returns the model; scores are multiplied by d_head^-0.5 if `scaled`. Other sizes are those of `gpt2.build`."""
    return gpt2.build(n_kv_heads=1 if multi_query else None, scale_by_width=scaled, **sizes)


def _joined(block: Block, rows: tuple[int, ...]) -> Layout:
    """Returns the layout of q, k, v: one after the other with one key head, else head by head."""
    body = block.branches[0].body
    one = isinstance(body, Attention) and body.n_kv_heads == 1
    return Concat(rows) if one else by_key_head(block, rows)


FAMILY = replace(
    gpt2.FAMILY,
    name="gpt_bigcode",
    heads=("GPTBigCodeForCausalLM",),
    keys=(  # defaults as in transformers' GPTBigCodeConfig
        # d_ff is 4 times that
        Size("n_embd", "d_model", default=768, also=("hidden_size",), most=LARGEST_SIZE // 4),
        Size("n_head", "n_heads", default=12, also=("num_attention_heads",), divides="d_model"),
        Size("n_positions", "max_positions", default=1024, also=("max_position_embeddings",)),
        Size("vocab_size", "n_vocab", default=50257),
        depth("n_layer", 12, "num_hidden_layers"),
        Size(
            "n_inner",
            "d_ff",
            default=four_times,
            null=four_times,
            at=lambda parts: None if parts.d_ff == 4 * parts.d_model else parts.d_ff,
        ),
        eps("layer_norm_epsilon", 1e-5),
        activation("activation_function", "gelu_pytorch_tanh"),
        Flag("multi_query", "multi_query", default=True, at=lambda parts: parts.n_kv_heads == 1),
        Only(
            "num_key_value_heads",
            lambda values: 1 if values["multi_query"] else values["n_heads"],
            reason="multi_query says it",
        ),
        Flag("scale_attn_weights", "scaled", default=True, at=lambda parts: parts.attention.scale is None),
        tied(True),
        Irrelevant("how it is computed, not what", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        Irrelevant("how other programs run it", "inference_runner", "max_batch_size", "max_sequence_length"),
        Irrelevant("how other programs run it", "validate_runner_input", "pre_allocate_kv_cache", "pad_key_length"),
        Irrelevant("how other programs run it", "runner_max_sequence_length"),
        gpt2.SUMMARY,
    ),
    build=build,
    names=Names(
        stems=gpt2.STEMS,
        outside=gpt2.OUTSIDE,
        layers="transformer.h",
        fused={"attn.c_attn": Fused.qkv(_joined)},
        ignored=gpt2.MASKS,
    ),
)
