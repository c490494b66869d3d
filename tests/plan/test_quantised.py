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
from asbuilt.families import llama
from asbuilt.plan import serve
from asbuilt.plan.quantised import quantised
from asbuilt.spec import Model, Rotary, weights

CONFIGS = Path(__file__).parents[2].parent / "shared" / "models"
# d_ff and d_model are no multiples of the groups, so the last group of a row is a short one
SPEC = llama.build(n_vocab=300, d_model=96, n_layers=3, n_heads=6, n_kv_heads=2, d_ff=200, max_positions=64,
                   rotary=Rotary(d_rotary=16), tied=False, name="tiny")  # fmt: skip
MATRICES = [w.shape for _, w, owner in weights(SPEC) if owner.kind in ("attention", "ffn") and len(w.shape) == 2]
REST = 2 * (cost.total_parameters(SPEC) - sum(math.prod(shape) for shape in MATRICES))


def stored(said: dict[str, Any], spec: Model = SPEC, dtype: str = "bf16") -> int:
    return serve(spec, "l4", dtype=quantised(spec, said, dtype, "llama")).weight_bytes


def of_matrices(each: Any) -> int:  # noqa: ANN401
    return math.ceil(REST + sum(each(out, inside) for out, inside in MATRICES))


PACKED = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 64},
     lambda o, i: o * i / 2 + o * math.ceil(i / 64) * (2 + 0.5) + 4 * i),
    ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
     lambda o, i: o * i / 2 + o * math.ceil(i / 32) * 2.5),
    ({"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": False}, lambda o, i: o * i / 2 + o * 2),
    ({"quant_method": "fp8", "weight_block_size": [64, 32]},
     lambda o, i: o * i + 4 * math.ceil(o / 64) * math.ceil(i / 32)),
    ({"quant_method": "fp8"}, lambda o, i: o * i + 4),
    ({"quant_method": "fbgemm_fp8"}, lambda o, i: o * i + 4 * o),
    ({"load_in_8bit": True, "quant_method": "bitsandbytes"}, lambda o, i: o * i + 4 * o),
    ({"load_in_4bit": True}, lambda o, i: o * i * (0.5 + 4 / 64)),
    ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, lambda o, i: o * i * (0.5 + 1 / 64 + 4 / 64 / 256)),
    ({"quant_method": "compressed-tensors",
      "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16,
                                                "symmetric": False, "type": "int"}}}},
     lambda o, i: o * i / 2 + o * math.ceil(i / 16) * 2.5),
    ({"quant_method": "compressed-tensors",
      "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel", "type": "float"},
                                    "input_activations": {"num_bits": 8}}}},
     lambda o, i: o * i + 2 * o),
]  # fmt: skip


@pytest.mark.parametrize(("said", "each"), PACKED, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "bytes")
def test_bytes(said: dict[str, Any], each: Any) -> None:  # noqa: ANN401
    assert stored(said) == pytest.approx(of_matrices(each), abs=8)  # rounded up by kind


def test_what_multiplies_in_eight_bits() -> None:
    activated = PACKED[-1][0]
    assert quantised(SPEC, activated, "bf16", "llama").compute == "fp8"
    assert quantised(SPEC, PACKED[0][0], "float16", "llama").compute == "fp16"


PATTERNS = [
    (["model.layers.0.mlp"], [(0, "gate"), (0, "up"), (0, "down")]),
    (["mlp.gate_proj"], [(i, "gate") for i in range(3)]),
    (["re:.*mlp.gate_proj$"], [(i, "gate") for i in range(3)]),
    (["re:.*mlp\\.gate$"], []),  # no module of that name here; gate_proj is another one
    (["model.layers.*.mlp.up_proj"], [(i, "up") for i in range(3)]),
    (["re:^model.layers.\\d+.mlp.down_proj$", "lm_head"], [(i, "down") for i in range(3)]),
    (["lm_head", "embed_tokens"], []),
]


@pytest.mark.parametrize(("patterns", "exempt"), PATTERNS, ids=str)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore", "llm_int8_skip_modules"])
def test_exempt_modules(patterns: list[str], exempt: list[tuple[int, str]], key: str) -> None:
    """In some layers and not in others, too."""
    all_packed = stored({"quant_method": "mxfp4"})
    shape = SPEC.blocks[0].branches[1].body.holds()["gate.weight"]
    more = round(len(exempt) * shape.size * (2 - 17 / 32))
    assert stored({"quant_method": "mxfp4", key: patterns}) == all_packed + more


def test_the_published_bytes_of_gpt_oss() -> None:
    """What model.safetensors.index.json of openai/gpt-oss-20b states as total_size."""
    file = CONFIGS / "gpt-oss-20b.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    source = open_model(file)
    held = quantised(source.spec, source.reading.quantization, "bf16", source.family)
    assert serve(source.spec, "h100-sxm", dtype=held).weight_bytes == 13_761_264_768


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
    {"quant_method": "compressed-tensors"},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {}}}},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"strategy": "magic"}}}},
    {"quant_method": "mxfp4", "ignore": "lm_head"},
    {"quant_method": "mxfp4", "ignore": [3]},
    {"quant_method": "mxfp4", "ignore": ["re:(a+)+$"]},
    {"quant_method": "mxfp4", "ignore": ["*" * 9]},
    {"quant_method": "mxfp4", "ignore": ["x" * 999]},
]


@pytest.mark.parametrize("said", WRONG, ids=lambda said: str(said)[:60])
def test_what_is_not_understood_is_refused_by_name(said: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        quantised(SPEC, said, "bf16", "llama")
    assert refused.value.field.startswith("quantization_config")


def test_a_model_that_says_nothing_of_packing() -> None:
    with pytest.raises(InputError, match="says nothing of packed weights"):
        quantised(catalog.find("gpt2").spec(), None, "bf16", "gpt2")


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(VALUES, st.sampled_from(("gptq", "awq", "fp8", "mxfp4", "bitsandbytes", "compressed-tensors", "fbgemm_fp8")),
       st.sampled_from(("bits", "group_size", "weight_block_size", "config_groups", "ignore",
                        "modules_to_not_convert")))  # fmt: skip
def test_any_value_is_planned_or_refused(value: object, method: str, key: str) -> None:
    with suppress(InputError):
        assert quantised(SPEC, {"quant_method": method, key: value}, "bf16", "llama").name
