"""Packed weights: each way of packing against bytes counted here, exempt modules, configs that are a stranger's."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import InputError, catalog, cost, open_model
from asbuilt.families import llama, mixtral, read_config
from asbuilt.plan import serve
from asbuilt.plan.devices import device
from asbuilt.plan.placement import Placement
from asbuilt.plan.quantised import quantised
from asbuilt.plan.stored.methods import METHODS, read_packing
from asbuilt.spec import Model, Rotary, Router, weights
from asbuilt.spec.part import Weight

CONFIGS = Path(__file__).parents[2].parent / "shared" / "models"
# d_ff and d_model are no multiples of the groups, so the last group of a row is a short one
SPEC = llama.build(
    n_vocab=300,
    d_model=96,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    d_ff=200,
    max_positions=64,
    rotary=Rotary(d_rotary=16),
    tied=False,
    name="tiny",
)
MATRICES = [w.shape for _, w, owner in weights(SPEC) if owner.kind in ("attention", "ffn") and len(w.shape) == 2]
REST = 2 * (cost.total_parameters(SPEC) - sum(math.prod(shape) for shape in MATRICES))


def stored(said: dict[str, Any], spec: Model = SPEC, dtype: str = "bf16") -> int:
    return serve(spec, "l4", dtype=quantised(spec, said, dtype, "llama")).weight_bytes


def of_matrices(each: Any) -> int:  # noqa: ANN401
    return math.ceil(REST + sum(each(out, inside) for out, inside in MATRICES))


PACKED = [
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        lambda o, i: o * i / 2 + o * math.ceil(i / 64) * (2 + 0.5) + 4 * i,
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
        lambda o, i: o * i / 2 + o * math.ceil(i / 32) * 2.5,
    ),
    ({"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": False}, lambda o, i: o * i / 2 + o * 2),
    (
        {"quant_method": "fp8", "weight_block_size": [64, 32]},
        lambda o, i: o * i + 4 * math.ceil(o / 64) * math.ceil(i / 32),
    ),
    ({"quant_method": "fp8"}, lambda o, i: o * i + 4),
    ({"quant_method": "fbgemm_fp8"}, lambda o, i: o * i + 4 * o),
    ({"load_in_8bit": True, "quant_method": "bitsandbytes"}, lambda o, i: o * i + 4 * o),
    ({"load_in_4bit": True}, lambda o, i: o * i * (0.5 + 4 / 64)),
    ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, lambda o, i: o * i * (0.5 + 1 / 64 + 4 / 64 / 256)),
    (
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False, "type": "int"}
                }
            },
        },
        lambda o, i: o * i / 2 + o * math.ceil(i / 16) * 2.5,
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "tensor", "type": "float"}}},
        },
        lambda o, i: o * i + 2,
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "ignore": ["re:.*lm_head"],
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "type": "float"},
                    "input_activations": {"num_bits": 4},
                }
            },
        },
        lambda o, i: o * i / 2 + o * math.ceil(i / 16) + 8,
    ),
    (
        {
            "config_groups": {
                "group_0": {
                    "weights": {
                        "num_bits": 4,
                        "strategy": "group",
                        "group_size": 32,
                        "type": "float",
                        "scale_dtype": "torch.uint8",
                    }
                }
            },
            "ignore": ["lm_head"],
        },
        lambda o, i: o * i / 2 + o * math.ceil(i / 32),
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 8, "strategy": "block", "type": "float", "block_structure": [64, 32]}
                }
            },
        },
        lambda o, i: o * i + 4 * math.ceil(o / 64) * math.ceil(i / 32),
    ),
    ({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, lambda o, i: o * i + 8),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"},
        lambda o, i: o * i / 2 + o * math.ceil(i / 16) + 8,
    ),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, lambda o, i: o * i / 2 + o * math.ceil(i / 16) + 4),
    ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, lambda o, i: o * i + o * math.ceil(i / 32)),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        lambda o, i: o * i + 4 * math.ceil(o / 128) * math.ceil(i / 128),
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, lambda o, i: o * i + 4 * o),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32},
        lambda o, i: o * i / 2 + o * math.ceil(i / 32) * 2,
    ),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 32}, lambda o, i: o * i / 2 + o * math.ceil(i / 32) * 2.5),
    (
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 8, "strategy": "channel", "type": "float"},
                    "input_activations": {"num_bits": 8},
                }
            },
        },
        lambda o, i: o * i + 2 * o,
    ),
]


@pytest.mark.parametrize(("said", "each"), PACKED, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "bytes")
def test_bytes(said: dict[str, Any], each: Any) -> None:  # noqa: ANN401
    assert stored(said) == pytest.approx(of_matrices(each), abs=8)  # rounded up by kind


def compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights, **more}}}


# Of a matrix of 258 rows of 516, 133,128 numbers: 4 bits are 66,564 bytes. A row has 5 groups of 128, 17 of 32, 33 of
# 16, 9 of 64; there are 3 x 5 tiles of 128 and 5 x 17 of 64 by 32. Beside the bytes what is multiplied in.
ONE_MATRIX = [
    ({"quant_method": "gptq"}, 66_564 + 1_290 * 2.5 + 4 * 516, None),
    ({"quant_method": "gptq", "bits": 3, "group_size": -1}, 49_923 + 258 * 2.375 + 4 * 516, None),
    ({"quant_method": "gptq", "group_size": 1}, 66_564 + 133_128 * 2.5 + 4 * 516, None),
    ({"quant_method": "awq"}, 66_564 + 1_290 * 2.5, None),
    ({"quant_method": "awq", "zero_point": False}, 66_564 + 1_290 * 2, None),
    ({"quant_method": "awq", "w_bit": 8}, 133_128 + 1_290 * 3, None),
    ({"quant_method": "awq", "bits": 2, "w_bit": 8}, 33_282 + 1_290 * 2.25, None),
    ({"quant_method": "auto-round"}, 66_564 + 1_290 * 2.5, None),
    ({"quant_method": "fp8"}, 133_128 + 4, "fp8"),
    ({"quant_method": "FP8", "weight_block_size": [128, 128]}, 133_128 + 4 * 15, "fp8"),
    ({"quant_method": "fp8", "weight_block_size": [64, 32]}, 133_128 + 4 * 85, "fp8"),
    ({"quant_method": "fp8", "weight_block_size": [65_536, 1]}, 133_128 + 4 * 516, "fp8"),
    ({"quant_method": "fbgemm_fp8"}, 133_128 + 4 * 258, "fp8"),
    ({"quant_method": "mxfp4"}, 66_564 + 258 * 17, None),
    ({"quant_method": "bitsandbytes"}, 133_128 + 4 * 258, "int8"),
    ({"load_in_8bit": True}, 133_128 + 4 * 258, "int8"),
    ({"load_in_4bit": True}, 66_564 + 133_128 / 16, None),
    ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 66_564 + 133_128 / 64 + 133_128 / 4096, None),
    (compressed({}), 133_128 + 2, None),
    (compressed({"num_bits": 4}), 66_564 + 2, None),
    (compressed({"strategy": "channel", "type": "int"}, input_activations={}), 133_128 + 2 * 258, "int8"),
    (compressed({"strategy": "channel", "symmetric": False}), 133_128 + 3 * 258, None),
    (compressed({"strategy": "block", "block_structure": [64, 32]}), 133_128 + 4 * 85, None),
    (compressed({"num_bits": 4, "strategy": "group", "group_size": 32}), 66_564 + 258 * 17 * 2, None),
    (compressed({"num_bits": 4, "strategy": "group", "group_size": 1}), 66_564 + 133_128 * 2, None),
    (
        compressed({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        66_564 + 4_386 * 2.5,
        None,
    ),
    (
        compressed({"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
        66_564 + 4_386,
        None,
    ),
    (compressed({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}), 66_564 + 258 * 33 + 4, None),
    (
        compressed(
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "type": "float"}, input_activations={}
        ),
        66_564 + 258 * 33 + 8,
        "fp4",
    ),
    (compressed({"num_bits": 8, "type": "float"}, input_activations={}), 133_128 + 2, "fp8"),
    ({"quant_algo": "FP8"}, 133_128 + 8, "fp8"),
    ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, 133_128 + 4 * 258, "fp8"),
    ({"quant_algo": "FP8_PB_WO"}, 133_128 + 4 * 15, None),
    ({"quant_algo": "MXFP8"}, 133_128 + 258 * 17, "fp8"),
    ({"quant_algo": "NVFP4"}, 66_564 + 258 * 33 + 8, "fp4"),
    ({"quant_algo": "NVFP4", "group_size": 32}, 66_564 + 258 * 17 + 8, "fp4"),
    ({"quant_algo": "W4A16_NVFP4"}, 66_564 + 258 * 33 + 4, None),
    ({"quant_algo": "W4A16_NVFP4", "group_size": 65_536}, 66_564 + 258 + 4, None),
    ({"quant_algo": "MXFP4"}, 66_564 + 258 * 17, None),
    ({"quant_algo": "W4A16_MXFP4"}, 66_564 + 258 * 17, None),
    ({"quant_algo": "W4A8_MXFP4_FP8"}, 66_564 + 258 * 17 + 4, None),
    ({"quant_algo": "W4A8_NVFP4_FP8"}, 66_564 + 258 * 33 + 8, None),
    ({"quant_algo": "W4A8_AWQ"}, 66_564 + 1_290 * 2 + 8, None),
    ({"quant_algo": "W4A16_AWQ"}, 66_564 + 1_290 * 2, None),
    ({"quant_algo": "INT4_AWQ", "group_size": 1}, 66_564 + 133_128 * 2, None),
    ({"quant_algo": "INT4_AWQ"}, 66_564 + 1_290 * 2, None),
    ({"quant_algo": "W8A16"}, 133_128 + 2 * 258, None),
    ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, 133_128 + 4 * 258, "int8"),
    ({"quant_algo": "INT8_SQ"}, 133_128 + 4 * 258, "int8"),
    ({"group_size": 12, "bits": 4}, 66_564 + 258 * 43 * 4, None),
    ({"group_size": 43, "bits": 2, "mode": "affine"}, 33_282 + 258 * 12 * 4, None),
    ({"group_size": 516, "bits": 8}, 133_128 + 258 * 4, None),
]


@pytest.mark.parametrize(("said", "nbytes", "compute"), ONE_MATRIX, ids=lambda x: str(x)[:70])
def test_bytes_of_one_matrix_and_of_a_stack(said: dict[str, Any], nbytes: float, compute: str | None) -> None:
    packing = read_packing(said)
    assert packing.rule is not None
    assert packing.rule(Weight(shape=(258, 516), role="matrix")) == nbytes
    assert packing.rule(Weight(shape=(3, 258, 516), role="matrix", init="depth_scaled")) == 3 * nbytes
    assert packing.compute == compute
    method, mlx = said.get("quant_method", "").lower(), "quant_method" not in said and "bits" in said
    algorithm = f"modelopt {said.get('quant_algo')}" if "quant_algo" in said else "mlx" if mlx else "bitsandbytes"
    assert packing.method == (method or algorithm)
    assert (packing.heads, packing.tables) == (mlx or method == "compressed-tensors", mlx)
    assert packing.vision == (method not in ("gptq", "awq", "auto-round"))


@pytest.mark.parametrize(
    ("key", "least", "most", "said"),
    [
        ("bits", 2, 8, lambda n: {"quant_method": "gptq", "bits": n}),
        ("bits", 2, 8, lambda n: {"quant_method": "awq", "bits": n}),
        ("w_bit", 2, 8, lambda n: {"quant_method": "awq", "w_bit": n}),
        ("bits", 2, 8, lambda n: {"quant_method": "auto-round", "bits": n}),
        ("bits", 2, 8, lambda n: {"group_size": 64, "bits": n}),
        ("num_bits", 2, 8, lambda n: compressed({"num_bits": n})),
        ("group_size", 1, 65_536, lambda n: {"quant_method": "gptq", "group_size": n}),
        ("group_size", 1, 65_536, lambda n: {"quant_method": "awq", "group_size": n}),
        ("group_size", 1, 65_536, lambda n: {"quant_method": "auto-round", "group_size": n}),
        ("group_size", 8, 65_536, lambda n: {"group_size": n, "bits": 4}),
        ("group_size", 1, 65_536, lambda n: {"quant_algo": "NVFP4", "group_size": n}),
        ("group_size", 1, 65_536, lambda n: compressed({"strategy": "group", "group_size": n})),
        ("weight_block_size", 1, 65_536, lambda n: {"quant_method": "fp8", "weight_block_size": [n, 128]}),
        ("weight_block_size", 1, 65_536, lambda n: {"quant_method": "fp8", "weight_block_size": [128, n]}),
        (
            "config_groups",
            1,
            64,
            lambda n: {"config_groups": {str(i): {"weights": {}, "targets": ["lm_head"]} for i in range(n)}},
        ),
        (
            "quantized_layers",
            1,
            64,
            lambda n: {"quantized_layers": {f"m{i}": {"quant_algo": "NVFP4", "group_size": i + 1} for i in range(n)}},
        ),
    ],
)
def test_the_first_and_the_last_number_that_is_allowed(key: str, least: int, most: int, said: Any) -> None:  # noqa: ANN401
    for number in (least, most):
        assert read_packing(said(number)).method
    for number in (least - 1, most + 1):
        with pytest.raises(InputError) as refused:
            read_packing(said(number))
        assert refused.value.field == f"quantization_config.{key}"


COMPUTE = [
    (PACKED[-1][0], "fp8"),
    ({"quant_method": "awq"}, "bf16"),
    ({"quant_method": "fp8"}, "fp8"),
    ({"quant_method": "mxfp4"}, "bf16"),
    ({"load_in_8bit": True}, "int8"),
    ({"quant_algo": "NVFP4"}, "fp4"),
    ({"quant_algo": "W4A16_NVFP4"}, "bf16"),
    ({"quant_algo": "MXFP8"}, "fp8"),
]


@pytest.mark.parametrize(("said", "compute"), COMPUTE, ids=lambda x: str(x)[:50])
def test_what_products_run_at(said: dict[str, Any], compute: str) -> None:
    held = quantised(SPEC, said, "bf16", "llama")
    assert (held.compute, held.activation) == (compute, "bf16")


def test_what_is_not_packed_keeps_its_dtype() -> None:
    assert quantised(SPEC, PACKED[0][0], "float16", "llama").compute == "fp16"
    assert stored({"quant_method": "mxfp4"}, dtype="float32") == stored({"quant_method": "mxfp4"}) + REST


HEAD, TABLE = 300 * 96, 300 * 96


def test_heads_and_tables_where_they_are_packed_too() -> None:
    """A linear map like others for compressed-tensors, which is told to leave it; mlx packs tables too."""
    eight = {"config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "channel"}}}}
    assert stored({**eight, "ignore": ["lm_head"]}) - stored(eight) == HEAD * 2 - (HEAD + 2 * 300)
    assert stored({"quant_method": "gptq"}) - stored({"quant_method": "gptq", "lm_head": True}) == pytest.approx(
        HEAD * 2 - (HEAD / 2 + 300 * 2.5 + 4 * 96)
    )
    matrices = sum(o * i for o, i in MATRICES) + HEAD + TABLE
    rows = sum(o * i // 8 for o, i in MATRICES) + 2 * 300 * 96 // 8
    vectors = 2 * (cost.total_parameters(SPEC) - matrices)
    assert stored({"group_size": 8, "bits": 4}) == pytest.approx(matrices / 2 + 4 * rows + vectors, abs=8)
    # rows of 200 are no groups of 32, and mlx leaves them
    left = sum(o * i for o, i in MATRICES if i == 200)
    assert stored({"group_size": 32, "bits": 4}) == 2 * left + (matrices - left) * 5 / 8 + vectors


def test_routers_and_stacks_of_experts() -> None:
    """Three matrices of each of four experts with a float32 scale of its own; the router stays in bf16."""
    spec = mixtral.FAMILY.build(
        router=Router(d_model=8, n_experts=4, top_k=2),
        n_vocab=11,
        d_model=8,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        d_ff=12,
        max_positions=32,
        rotary=Rotary(d_rotary=2),
        tied=False,
        name="tiny",
    )
    experts, attention, rest = 4 * 3 * 96, 64 + 32 + 32 + 64, 88 + 88 + 24 + 32
    held = quantised(spec, {"quant_method": "fp8"}, "bf16", "mixtral")
    assert serve(spec, "l4", dtype=held).weight_bytes == experts + 12 * 4 + attention + 4 * 4 + 2 * rest
    # of the four experts one is left out of one matrix
    said = {"quant_method": "fp8", "ignore": ["model.layers.0.block_sparse_moe.experts.2.w1", "*.gate"]}
    less = quantised(spec, said, "bf16", "mixtral")
    assert serve(spec, "l4", dtype=less).weight_bytes == serve(spec, "l4", dtype=held).weight_bytes + 96 - 4


def test_experts_in_one_stack_are_named_apart() -> None:
    """By quantisers, which pack linear maps: of four experts one is left out of ups, another packed in eight bits."""
    config = {"model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 96}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    spec = read_config(
        {**config, **sizes, "vocab_size": 32, "num_local_experts": 4, "num_experts_per_tok": 1}, "x"
    ).spec

    def held(said: dict[str, Any]) -> int:
        return serve(spec, "l4", dtype=quantised(spec, said, "bf16", "llama4_text")).weight_bytes

    usual = held({"quant_algo": "MXFP4"})
    named = "model.layers.0.feed_forward.experts.{}.up_proj"
    assert held({"quant_algo": "MXFP4", "exclude_modules": [named.format(2)]}) - usual == 64 * 32 * (2 - 17 / 32)
    stack = {"quant_algo": "MXFP4", "exclude_modules": ["model.layers.0.feed_forward.experts.down_proj"]}
    assert held(stack) - usual == 4 * 64 * 32 * (2 - 17 / 32)
    head = {"lm_head": {"quant_algo": "FP8"}}
    more = {named.format(1): {"quant_algo": "FP8"}, named.format(3): {"quant_algo": "MXFP4"}}
    less = held({"quantized_layers": head}) - held({"quantized_layers": head | more})
    assert less == 64 * 32 * (4 - 1 - 17 / 32) - 8


MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "FP8"},
    },
    "exclude_modules": ["model.layers.1.mlp.up_proj"],
}


def test_layers_that_are_packed_in_different_ways() -> None:
    """Of layer 0 the queries in fp8, of layer 1 gate and down in four bits, the head in fp8; all else in bf16."""
    plain = 2 * cost.total_parameters(SPEC)
    queries, head = 96 * 96, 300 * 96
    four = 2 * 200 * 96
    less = (queries - 8) + (head - 8) + four * 1.5 - (200 * 96 // 16 + 96 * 13) - 8
    assert stored(MIXED) == plain - less
    held = quantised(SPEC, MIXED, "bf16", "llama")
    assert "the cache in fp8, as published" in held.note
    assert held.compute == "bf16"  # not all of it is multiplied in eight bits
    eight = {"quantized_layers": {"lm_head": {"quant_algo": "FP8"}, "model.layers.0.mlp": {"quant_algo": "MXFP8"}}}
    assert quantised(SPEC, eight, "bf16", "llama").compute == "fp8"


def test_groups_that_name_their_modules() -> None:
    groups = {
        "a": {"weights": {"num_bits": 8, "strategy": "channel"}, "targets": ["re:.*self_attn.*"]},
        "b": {"weights": {"num_bits": 4, "strategy": "channel"}, "targets": ["re:.*down_proj$"]},
    }
    eight = sum(o * i + 2 * o for o, i in [(96, 96), (32, 96), (32, 96), (96, 96)])
    four = 96 * 200 / 2 + 2 * 96
    less = 3 * (2 * (96 * 96 * 2 + 32 * 96 * 2 + 96 * 200) - eight - four)
    assert stored({"config_groups": groups}) == 2 * cost.total_parameters(SPEC) - less
    again = {"weights": {"num_bits": 2, "strategy": "channel"}, "targets": ["re:.*q_proj"]}
    assert stored({"config_groups": {**groups, "c": again}}) == stored({"config_groups": groups})  # the first counts


# Bytes of a matrix of (o, i) in the ways of packing that state little else.
MORE = [
    (
        {"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 32}},
        lambda o, i: o * i / 2 + o * math.ceil(i / 32) * 4,
    ),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, lambda o, i: o * i + o * 2),
    (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}},
        },
        lambda o, i: o * i / 2 + o * math.ceil(i / 64) * 4,
    ),
    (
        {
            "quant_method": "torchao",
            "quant_type": {
                "default": {
                    "_type": "Float8DynamicActivationFloat8WeightConfig",
                    "_data": {"granularity": [{"_type": "PerRow"}]},
                }
            },
        },
        lambda o, i: o * i + o * 4,
    ),
    (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 8, "axis": 1}}},
        lambda o, i: o * i / 2 + o * i // 8 * 4,
    ),
    (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 8, "axis": 1}}},
        lambda o, i: o * i / 10 * 4 + o * i // 8 * 4,
    ),
    (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
            "exclude": ["lm_head"],
        },
        lambda o, i: o * i + 4,
    ),
    (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
            },
        },
        lambda o, i: o * i / 2 + o * math.ceil(i / 32),
    ),
    ({"quant_method": "quanto", "weights": "int8"}, lambda o, i: o * i + o * 2),
    ({"quant_method": "eetq"}, lambda o, i: o * i + o * 2),
    ({"quant_method": "bitnet"}, lambda o, i: o * i / 4 + 2),
    ({"quant_method": "bitnet", "quantization_mode": "online"}, lambda o, i: o * i * 2),
    ({"quant_method": "metal", "bits": 8, "group_size": 8}, lambda o, i: o * i + o * i // 8 * 4),
    ({"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4}, lambda o, i: o * i / 2 + o * math.ceil(i / 32)),
    (
        {"quant_method": "auto-round", "data_type": "nv_fp", "bits": 4},
        lambda o, i: o * i / 2 + o * math.ceil(i / 16) + 4,
    ),
]


def of_torchao(name: str, **data: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": data}}}


def of_quark(weight: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, **more}}


# Of the matrix of 258 rows of 516 as above, the bytes and what is multiplied in.
NAMED_KINDS = [
    (of_torchao("Int4WeightOnlyConfig"), 66_564 + 1_290 * 4, None),
    (of_torchao("Int8WeightOnlyConfig"), 133_128 + 258 * 2, None),
    (of_torchao("Int8WeightOnlyConfig", group_size=64), 133_128 + 258 * 9 * 2, None),
    (of_torchao("Int8DynamicActivationInt8WeightConfig"), 133_128 + 258 * 2, "int8"),
    (of_torchao("Int8DynamicActivationInt4WeightConfig"), 133_128 + 258 * 17 * 3, None),
    (of_torchao("IntxWeightOnlyConfig"), 133_128 + 258 * 3, None),
    (
        of_torchao("Int8DynamicActivationIntxWeightConfig", weight_granularity={"_data": {"group_size": 32}}),
        133_128 + 258 * 17 * 3,
        None,
    ),
    (of_torchao("IntxWeightOnlyConfig", granularity={"_data": {"group_size": 64}}), 133_128 + 258 * 9 * 3, None),
    (of_torchao("Float8WeightOnlyConfig"), 133_128 + 258 * 4, None),
    (of_torchao("Float8DynamicActivationFloat8WeightConfig"), 133_128 + 4, "fp8"),
    (of_torchao("Float8DynamicActivationInt4WeightConfig"), 66_564 + 1_290 * 4, None),
    (of_torchao("MXFPInferenceConfig", weight_dtype={"_data": "float4_e2m1fn_x2"}), 66_564 + 258 * 17, None),
    (of_torchao("MXFPInferenceConfig"), 133_128 + 258 * 17, None),
    (of_torchao("NVFP4InferenceConfig"), 66_564 + 258 * 33 + 4, "fp4"),
    ({"quant_method": "torchao", "quant_type": "int8_dynamic_activation_int8_weight"}, 133_128 + 258 * 2, "int8"),
    ({"quant_method": "torchao", "quant_type": "float8_weight_only"}, 133_128 + 258 * 4, None),
    (of_quark({"dtype": "int8", "qscheme": "per_channel"}), 133_128 + 258 * 4, None),
    (of_quark({"dtype": "fp8_e4m3"}, input_tensors={"dtype": "fp8_e4m3"}), 133_128 + 4, "fp8"),
    (
        of_quark({"dtype": "uint4", "qscheme": "per_group", "group_size": 64, "symmetric": False}),
        66_564 + 258 * 9 * 2.5,
        None,
    ),
    (of_quark({"dtype": "fp6_e2m3"}), 99_846 + 4, None),
    ({"quant_method": "quanto", "weights": "int4"}, 66_564 + 1_290 * 4, None),
    ({"quant_method": "quanto", "weights": "int2"}, 33_282 + 1_290 * 4, None),
    ({"quant_method": "quanto", "weights": "float8"}, 133_128 + 258 * 2, None),
    ({"quant_method": "quanto"}, 133_128 + 258 * 2, None),
    ({"quant_method": "hqq", "quant_config": {"nbits": 8, "group_size": None}}, 133_128 + 258 * 4, None),
    ({"quant_method": "mxfp8"}, 133_128 + 258 * 17, "fp8"),
    ({"quant_method": "auto-round", "bits": 8, "data_type": "mx_fp8"}, 133_128 + 258 * 17, None),
    ({"bits": 4, "group_size": 12, "mode": "affine"}, 66_564 + 258 * 43 * 4, None),
]


@pytest.mark.parametrize(("said", "nbytes", "compute"), NAMED_KINDS, ids=lambda x: str(x)[:90])
def test_bytes_of_one_matrix_by_the_name_of_its_kind(said: dict[str, Any], nbytes: float, compute: str | None) -> None:
    packing = read_packing(said)
    assert packing.rule is not None
    assert packing.rule(Weight(shape=(258, 516), role="matrix")) == nbytes
    assert packing.compute == compute


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_modes_of_mlx(mode: str) -> None:
    """An 8-bit scale per group, of rows that are whole groups."""
    rule = read_packing({"bits": 4, "group_size": 32, "mode": mode}).rule
    assert rule is not None
    bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    assert rule(Weight(shape=(10, 96), role="matrix")) == 960 * bits / 8 + 960 / group
    assert rule(Weight(shape=(10, 72), role="matrix")) is None


def test_heads_and_tables_of_torchao() -> None:
    said = {**of_torchao("Int8WeightOnlyConfig"), "include_input_output_embeddings": True}
    assert (read_packing(said).heads, read_packing(said).tables) == (True, True)
    assert (read_packing(said | {"include_input_output_embeddings": False}).heads) is False


def test_modules_by_name_of_hqq() -> None:
    """Those that are named are packed, by the ends of their names."""
    four = {"weight_quant_params": {"nbits": 4, "group_size": 8}}
    said = {"quant_method": "hqq", "quant_config": {"mlp.up_proj": four}}
    assert stored(said) == 2 * cost.total_parameters(SPEC) - 3 * 200 * 96 * (2 - 0.5 - 4 / 8)


def test_quark_states_the_cache_too() -> None:
    said = of_quark({"dtype": "fp8_e4m3"}) | {
        "kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}
    }
    assert read_packing(said).kv == "fp8"
    assert read_packing(of_quark({"dtype": "fp8_e4m3"})).kv is None


@pytest.mark.parametrize(("said", "each"), MORE, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "bytes")
def test_bytes_of_other_ways(said: dict[str, Any], each: Any) -> None:  # noqa: ANN401
    assert stored(said) == pytest.approx(of_matrices(each), abs=8)  # rounded up by kind


@pytest.mark.parametrize("method", ["exl2", "EXL3"])
def test_bits_on_average(method: str) -> None:
    matrices, head = sum(o * i for o, i in MATRICES), 300 * 96
    rest = 2 * (cost.total_parameters(SPEC) - matrices - head)
    said = {"quant_method": method, "bits": 4.25, "head_bits": 6}
    assert stored(said) == pytest.approx(matrices * 4.25 / 8 + head * 6 / 8 + rest, abs=8)


def four(o: int, i: int) -> float:
    return o * i / 2 + o * math.ceil(i / 128) * 2.5


def eight(o: int, i: int) -> float:
    return o * i + o * math.ceil(i / 128) * 3


# A way of packing in which some modules differ; how many bytes more than if all were alike.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    (
        {"quant_method": "gptq"},
        {"dynamic": {"-:.*layers\\.0\\.mlp.*": {}, "+:.*mlp.*": {"bits": 8}}},
        # the first pattern that matches counts
        sum(2 * o * i - four(o, i) - 4 * i for o, i in [(200, 96), (200, 96), (96, 200)])
        + 2 * sum(eight(o, i) - four(o, i) for o, i in [(200, 96), (200, 96), (96, 200)]),
    ),
    (
        {"quant_method": "gptq"},
        {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj", "mlp.down_proj"]]},
        3 * sum(2 * o * i - four(o, i) - 4 * i for o, i in [(32, 96), (96, 96), (200, 96)]),
    ),
    (
        {"quant_method": "auto-round"},
        {"extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16}, ".*self_attn\\.q_proj": {"bits": 8}}},
        2 * 200 * 96 - four(200, 96) + 3 * (eight(96, 96) - four(96, 96)),
    ),
    (
        {"bits": 4, "group_size": 8},
        {"model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 8}, "lm_head": False},
        200 * 96 / 2 + 300 * 96 * (2 - 1),
    ),
    (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
        },
        {"layer_quant_config": {"*.1.mlp.up_proj": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}},
        200 * 4 - 4,
    ),
]


@pytest.mark.parametrize(("usual", "some", "more"), DIFFERENT, ids=lambda x: str(x)[:60])
def test_modules_that_are_packed_differently(usual: dict[str, Any], some: dict[str, Any], more: float) -> None:
    assert stored(usual | some) - stored(usual) == pytest.approx(more, abs=8)


def test_modules_by_name_of_torchao() -> None:
    """Nothing by default, one module in four bits and another, named as well, as it is."""
    names = {"_default": None, "model.layers.0.mlp.up_proj": {"_type": "Int4WeightOnlyConfig"}, "lm_head": None}
    kind = {"default": {"_type": "ModuleFqnToConfig", "_data": {"module_fqn_to_config": names}}}
    less = 2 * 200 * 96 - (200 * 96 / 2 + 200 * 4)
    said = {"quant_method": "torchao", "quant_type": kind}
    assert stored(said) == 2 * cost.total_parameters(SPEC) - less


@pytest.mark.parametrize(
    ("said", "kv"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, "fp8"),
        ({"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "int8"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "bf16"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, "bf16"),
        ({**compressed({"num_bits": 8}), "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({**compressed({"num_bits": 8}), "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "bf16"),
        ({**compressed({"num_bits": 8}), "kv_cache_scheme": {"num_bits": [8], "type": "int"}}, "bf16"),
        ({**compressed({"num_bits": 8}), "kv_cache_scheme": None}, "bf16"),
    ],
    ids=str,
)
def test_the_cache_is_planned_as_published(said: dict[str, Any], kv: str) -> None:
    """Unless asked for otherwise; a dtype that caches are not planned in is named in the note."""
    held = quantised(SPEC, said, "bf16", "llama")
    plan, asked = serve(SPEC, "l4", dtype=held), serve(SPEC, "l4", dtype=held, kv_dtype="fp16")
    assert plan.document()["kv_dtype"] == kv
    assert asked.document()["kv_dtype"] == "fp16"
    unplanned = kv == "bf16" and (said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo"))
    assert ("are not planned" in held.note) == bool(unplanned)


def test_experts_in_four_bits_beside_fp8() -> None:
    """DeepSeek-V4's, and NVIDIA's of it: what those exempt stays in fp8. Scales of tiles are one byte each."""
    spec = mixtral.FAMILY.build(
        router=Router(d_model=64, n_experts=4, top_k=2),
        n_vocab=11,
        d_model=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_ff=32,
        max_positions=32,
        rotary=Rotary(d_rotary=16),
        tied=False,
        name="tiny",
    )
    said = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    plain = serve(spec, "l4", dtype=quantised(spec, said, "bf16", "mixtral")).weight_bytes
    both = serve(spec, "l4", dtype=quantised(spec, said | {"expert_dtype": "fp4"}, "bf16", "mixtral")).weight_bytes
    stacks, attention = 2 * 4 * 3 * 64 * 32, 2 * (64 * 64 * 2 + 32 * 64 * 2)
    assert plain - both == stacks / 2 + 4 * stacks / 1024 - stacks / 32 + 3 * attention / 1024
    layers = {"model.layers.0.block_sparse_moe.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    again = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["*.self_attn.*"]}
    held = quantised(spec, said | {"expert_dtype": "fp4"} | again, "bf16", "mixtral")
    assert serve(spec, "l4", dtype=held).weight_bytes - both == stacks / 2 / 32 + 12 * 8
    assert held.name == "quantised (fp8 + NVFP4)"


PATTERNS = [
    (["model.layers.0.mlp"], [(0, "gate"), (0, "up"), (0, "down")]),
    (["mlp.gate_proj"], [(i, "gate") for i in range(3)]),
    (["re:.*mlp.gate_proj$"], [(i, "gate") for i in range(3)]),
    (["re:.*mlp\\.gate$"], []),  # no module of that name here; gate_proj is another one
    (["model.layers.*.mlp.up_proj"], [(i, "up") for i in range(3)]),
    (["re:^model.layers.\\d+.mlp.down_proj$", "lm_head"], [(i, "down") for i in range(3)]),
    (["re:.*mlp.*_proj", "re:(a+)+$"], [(i, name) for i in range(3) for name in ("gate", "up", "down")]),
    (["model.layers.0.mlp*", "*.layers.1.*.up_proj"], [(0, "gate"), (0, "up"), (0, "down"), (1, "up")]),
    (["language_model.model.layers.0.mlp"], [(0, "gate"), (0, "up"), (0, "down")]),
    (["mlp.gate", "gate", "layers.0.ml", "up_pro"], []),  # whole pieces of a name
    (["lm_head", "embed_tokens"], []),
]


@pytest.mark.parametrize(("patterns", "exempt"), PATTERNS, ids=str)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore", "llm_int8_skip_modules", "exclude_modules"])
def test_exempt_modules(patterns: list[str], exempt: list[tuple[int, str]], key: str) -> None:
    """In some layers and not in others, too."""
    all_packed = stored({"quant_method": "mxfp4"})
    shapes = {"gate": (200, 96), "up": (200, 96), "down": (96, 200)}
    more = sum(o * i * 2 - (o * i // 2 + o * math.ceil(i / 32)) for o, i in (shapes[name] for _, name in exempt))
    assert stored({"quant_method": "mxfp4", key: patterns}) == all_packed + more


def test_the_published_bytes_of_gpt_oss() -> None:
    """What model.safetensors.index.json of openai/gpt-oss-20b states as total_size."""
    file = CONFIGS / "gpt-oss-20b.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    source = open_model(file)
    held = quantised(source.spec, source.reading.quantization, "bf16", source.family)
    assert serve(source.spec, "h100-sxm", dtype=held).weight_bytes == 13_761_264_768


def test_the_published_bytes_of_kimi_k2_thinking() -> None:
    """Its card: experts in int4 by groups of 32, 594 GB; the architecture is that of Kimi-K2-Instruct."""
    file = CONFIGS.parent / "frontier" / "moonshotai--Kimi-K2-Instruct" / "config.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    source = open_model(file)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    exempt = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    held = quantised(source.spec, compressed(weights) | {"ignore": exempt}, "bf16", source.family)
    assert round(device(source.spec, Placement(), held).stages[0].folds.total_bytes / 1e9) == 594


def test_over_devices() -> None:
    """Each device has its share of a packed matrix, and stages between them all of it."""
    held = quantised(SPEC, PACKED[0][0], "bf16", "llama")
    whole, half = serve(SPEC, "l4", dtype=held), serve(SPEC, "l4", dtype=held, tp=2)
    norms = cost.parameters(SPEC)["norm"] * 2
    assert half.weight_bytes == pytest.approx((whole.weight_bytes - norms) / 2 + norms, abs=8)


WRONG: list[dict[str, Any]] = [
    {"quant_method": "magic"},
    {},
    {"quant_method": "gptq", "bits": 40},
    {"quant_method": "gptq", "group_size": "wide"},
    {"quant_method": "fp8", "weight_block_size": [0, 1]},
    {"quant_method": "fp8", "weight_block_size": [128]},
    {"quant_method": "gptq", "group_size": 0},
    {"quant_method": "awq", "group_size": -2},
    {"quant_method": "auto-round", "group_size": True},
    {"quant_method": "fp8", "weight_block_size": [128, True]},
    {"quant_method": "fp8", "weight_block_size": [128, 128, 128]},
    {"quant_method": "fp8", "quant_algo": "FP8"},
    {"quant_method": "fp8", "quantized_layers": {}},
    {"quantized_layers": {}},
    {"quantized_layers": [1]},
    {"quantized_layers": {"lm_head": 3}},
    {"quant_algo": 3},
    {"quant_algo": "FP9"},
    {"config_groups": {"a": {}}},
    {"config_groups": {"a": {"weights": {}}, "b": 3}},
    {"config_groups": []},
    {"config_groups": {}},
    {"config_groups": {"a": {"weights": {}}, "b": {"weights": {}}}},
    {"config_groups": {"a": {"weights": {"strategy": "group"}}}},
    {"config_groups": {"a": {"weights": {}, "targets": ["no_such_module"]}}},
    {"quant_method": "compressed-tensors"},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {}}}},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"strategy": "magic"}}}},
    {"quant_method": "mxfp4", "ignore": "lm_head"},
    {"quant_method": "mxfp4", "ignore": [3]},
    {"quant_method": "mxfp4", "ignore": ["re:(a)\\1"]},
    {"quant_method": "mxfp4", "ignore": ["re:(a"]},
    {"quant_method": "mxfp4", "ignore": ["x" * 999]},
    {"quant_method": ["fp8"]},
    {"quant_method": {"fp8": 1}},
    {"quant_method": "fp8", "quant_algo": "NVFP4"},
    {"quant_algo": "NVFP5"},
    {"quant_algo": ["FP8"]},
    {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "magic"}}},
    {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"of.another.model": {"quant_algo": "FP8"}}},
    {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
    {"quant_algo": "NVFP4", "group_size": 0},
    {"config_groups": {"a": {"weights": {"num_bits": 8}, "targets": ["of.another.model"]}}},
    {"group_size": 64, "bits": 4, "mode": "magic"},
    {"config_groups": {str(i): {"weights": {"num_bits": 8}, "targets": ["lm_head"]} for i in range(65)}},
    {"quantized_layers": {f"a{i}": {"quant_algo": "NVFP4", "group_size": i} for i in range(1, 66)}},
    {"quant_method": "mxfp4", "ignore": ["a"] * 200_001},
    {"quant_method": "gptq", "modules_in_block_to_quantize": [["no_such_module"]]},
    {"quant_method": "gptq", "modules_in_block_to_quantize": "self_attn.q_proj"},
    {"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 9}}},
    {"quant_method": "gptq", "dynamic": {"(": {"bits": 8}}},
    {"quant_method": "gptq", "dynamic": {"a": 8}},
    {"quant_method": "gptq", "dynamic": [1]},
    {"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 17}}},
    {"quant_method": "auto-round", "extra_config": {"lm_head": 8}},
    {"quant_method": "auto-round", "data_type": "magic"},
    {"group_size": 64, "bits": 4, "model.layers.0.mlp.up_proj": {"bits": 9}},
    {"group_size": 64, "bits": 4, "mode": "magic"},
    {"quant_method": "fp8", "expert_dtype": "fp3"},
    {"quant_method": "torchao"},
    {"quant_method": "torchao", "quant_type": "magic"},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "MagicConfig"}}},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": [1]}}},
    {"quant_method": "hqq"},
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 5, "group_size": 64}}},
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}, "scale_quant_params": {"nbits": 8}}},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "magic"}}},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "magic"}}},
    {"quant_method": "quark", "global_quant_config": {}, "layer_type_quant_config": {"Linear": {}}},
    {"quant_method": "quanto", "weights": "int3"},
    {"quant_method": "eetq", "weights": "int4"},
    {"quant_method": "bitnet", "quantization_mode": "magic"},
    {"quant_method": "exl2", "bits": 4.0},
    {"quant_method": "exl2", "bits": "4", "head_bits": 6},
    {"config_groups": {"a": {"weights": {"num_bits": 8}}}, "sparsity_config": {"format": "sparse-bitmask"}},
]


@pytest.mark.parametrize("said", WRONG, ids=lambda said: str(said)[:60])
def test_what_is_not_understood_is_refused_by_name(said: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        quantised(SPEC, said, "bf16", "llama")
    assert refused.value.field.startswith("quantization_config")


def test_a_model_that_says_nothing_of_packing() -> None:
    with pytest.raises(InputError, match="has no quantization_config"):
        quantised(catalog.find("gpt2").spec(), None, "bf16", "gpt2")


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(
    VALUES,
    st.sampled_from((*METHODS, None)),
    st.sampled_from(
        (
            *("bits", "group_size", "weight_block_size", "config_groups", "ignore", "modules_to_not_convert", "mode"),
            *("dynamic", "extra_config", "quant_type", "quant_config", "global_quant_config", "layer_quant_config"),
            *("quantized_layers", "kv_cache_scheme", "expert_dtype", "weights", "data_type", "module"),
        )
    ),
)
def test_any_value_is_planned_or_refused(value: object, method: str | None, key: str) -> None:
    with suppress(InputError):
        said = {"quant_method": method} if method else {"bits": 4, "group_size": 32}
        assert quantised(SPEC, {**said, key: value}, "bf16", "llama").name


def test_nothing_that_is_sparse_and_no_modules_change_nothing() -> None:
    """A word that all is dense, a group that names nothing, a table of exceptions that is empty."""
    groups = {"a": {"weights": {"num_bits": 8, "strategy": "channel"}}}
    plain = stored({"config_groups": groups})
    assert stored({"config_groups": groups, "sparsity_config": {"format": "dense"}}) == plain
    assert stored({"config_groups": groups, "sparsity_config": {}}) == plain
    assert stored({"config_groups": {**groups, "b": {"weights": {"num_bits": 2}, "targets": []}}}) == plain


def test_groups_of_layers_by_name() -> None:
    """Of layer 1's up, 200 x 96, four bits and a byte for each 32 numbers of a row, and a float32 for the matrix."""
    said = {"quantized_layers": {"model.layers.1.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 32}}}
    assert stored(said) == 2 * cost.total_parameters(SPEC) - 2 * 19_200 + 9_600 + 200 * 3 + 4


def test_products_of_groups_that_are_multiplied_in_different_ways_are_not_in_eight_bits() -> None:
    eight = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}}
    other = {"weights": {"num_bits": 4}, "targets": ["re:.*q_proj"]}
    assert quantised(SPEC, {"config_groups": {"a": eight}}, "bf16", "llama").compute == "fp8"
    assert quantised(SPEC, {"config_groups": {"a": eight, "b": other}}, "bf16", "llama").compute == "bf16"


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        ("float32", "fp32"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float64", "bf16"),
        (None, "bf16"),
        ("fp8", "bf16"),
    ],
)
def test_what_activations_are_in(dtype: str | None, activation: str) -> None:
    held = quantised(SPEC, {"quant_method": "awq"}, dtype, "llama")
    assert (held.activation, held.compute) == (activation, activation)


@pytest.mark.parametrize(
    ("said", "text", "nbytes"),
    [
        ({"quant_method": "fp8"}, False, 1_048_580),
        ({"quant_method": "fp8"}, True, 2_097_152),
        ({"quant_method": "gptq"}, False, 2_097_152),
    ],
)
def test_what_becomes_of_images_may_be_left_as_it_is(said: dict[str, Any], text: bool, nbytes: int) -> None:
    """The queries of LLaVA's tower are 1,024 x 1,024: a byte each and a float32, or two bytes each."""
    row = catalog.find("llava-1.5-7b")
    held = quantised(row.spec(), said, "fp16", row.family, text=text).held
    path = "vision.tower.blocks.0.attention.body.q.weight"
    weight, owner = next((weight, owner) for name, weight, owner in weights(row.spec()) if name == path)
    assert held(path, weight, owner) == nbytes


def test_nvfp4_by_name_is_what_model_optimizer_stores() -> None:
    """Half a byte a number, a byte per 16 of a row, two float32 a matrix; products at fp4 where the machine has it."""
    packed = of_matrices(lambda out, inside: out * inside / 2 + out * math.ceil(inside / 16) + 8)
    assert serve(SPEC, "b300", dtype="nvfp4").weight_bytes == packed
    assert stored({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}) == packed
    blackwell, hopper = (serve(SPEC, name, dtype="nvfp4", context=64) for name in ("b300", "h100-sxm"))
    assert blackwell.capacity.machine.rate(blackwell.precision.compute) == (13.5e15, "fp4")
    assert hopper.capacity.machine.rate(hopper.precision.compute) == (989.4e12, "bf16")


@pytest.mark.parametrize(("kv", "block"), [("q8_0", 34), ("q5_1", 24), ("q5_0", 22), ("q4_1", 20), ("q4_0", 18)])
def test_llama_cpp_s_caches(kv: str, block: int) -> None:
    """Blocks of 32 numbers: keys and values of 32 layers, 8 heads of 128, for 512 tokens."""
    found = serve(catalog.find("llama-3.1-8b").spec(), "rtx-3090", dtype="q4_k_m", kv_dtype=kv, context=512)
    assert found.caches is not None
    assert found.caches.paged == 2 * 32 * 8 * 128 * 512 // 32 * block


def test_no_other_block_format_is_a_cache() -> None:
    with pytest.raises(InputError, match=r"kv-dtype: not a format for caches.*q8_0"):
        serve(SPEC, "l4", kv_dtype="q6_k")
