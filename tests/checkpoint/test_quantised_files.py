"""Quantised checkpoints: packed here by hand as their layouts are published, loaded as the matrices they stand for.

Codes, scales and zero points are drawn; what they mean is computed here in float64, from the codes and not from the
packed words. Packing is written the way quantisers pack, number by number.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from asbuilt import cost
from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import Contents, load
from asbuilt.checkpoint.quantised import Expanded
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.dtypes import BLOCKS
from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.formats.safetensors import read_header
from asbuilt.kernels.packed import expand
from asbuilt.spec import weights

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
Array = np.ndarray[Any, Any]
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """One way of packing: what a config says, and a matrix drawn in it, as stored and as it is meant."""

    said: dict[str, Any]
    draw: Callable[[np.random.Generator, int, int], tuple[Parts, Array]]
    tables: bool = False


def codes(rng: np.random.Generator, o: int, i: int, bits: int) -> Array:
    return rng.integers(0, 2**bits, (o, i))


def halves(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.tensor(rng.uniform(0.01, 0.1, shape)).half()


def words(numbers: Array, bits: int) -> Tensor:
    """Rows of numbers, one after the other, the lowest bits first, in 32-bit words."""
    found = (numbers[..., None] >> np.arange(bits)) & 1
    flat = found.reshape(*numbers.shape[:-1], -1).astype(np.uint8)
    padded = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 32)])
    return torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view("<i4").copy())


def number(tensor: Tensor) -> Array:
    return tensor.double().numpy()


def spread(scales: Array, o: int, i: int, block: tuple[int, int]) -> Array:
    rows, columns = np.arange(o) // block[0], np.arange(i) // block[1]
    return scales[rows][:, columns]


# Integers


def gptq(bits: int, group: int, *, ordered: bool = False, second: bool = False) -> Way:
    """AutoGPTQ's: transposed, scales (G, O), zero points less one; `ordered`: groups of inputs in any order."""

    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        size = i if group == -1 else group
        groups = math.ceil(i / size)
        of = rng.permutation(np.arange(i) // size) if ordered else np.arange(i) // size
        code, zero, scale = codes(rng, o, i, bits), rng.integers(1, 2**bits, (groups, o)), halves(rng, groups, o)
        stored = zero if second else zero - 1
        parts = {
            "qweight": words(code, bits).t().contiguous(),
            "qzeros": words(stored, bits),
            "scales": scale,
            "g_idx": torch.tensor(of, dtype=torch.int32),
        }
        return parts, (code - zero[of].T) * number(scale)[of].T

    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": False}
    return Way(said | ({"checkpoint_format": "gptq_v2"} if second else {}), draw)


def three_bits_of_autogptq(row: list[int]) -> list[int]:
    """The words that AutoGPTQ's `pack` makes of 32 numbers, three bits each, two of them in two words."""
    first = sum(row[k] << 3 * k for k in range(10)) | (row[10] & 3) << 30
    second = row[10] >> 2 | sum(row[11 + k] << (3 * k + 1) for k in range(10)) | (row[21] & 1) << 31
    third = row[21] >> 1 | sum(row[22 + k] << (3 * k + 2) for k in range(10))
    return [first, second, third]


def test_three_bits_are_one_after_the_other() -> None:
    row = np.random.default_rng(0).integers(0, 8, 32)
    wanted = three_bits_of_autogptq([int(n) for n in row])
    assert words(row[None], 3)[0].numpy().view("<u4").tolist() == wanted


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_words(numbers: Array) -> Tensor:
    """AutoAWQ's `gemm`: eight columns in a word, those of even numbers first."""
    rows, columns = numbers.shape
    made = np.zeros((rows, columns // 8), dtype=np.uint32)
    for place, column in enumerate(ORDER):
        made |= (numbers[:, column::8].astype(np.uint32)) << np.uint32(4 * place)
    return torch.from_numpy(made.view("<i4").copy())


def awq(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
    code, zero, scale = codes(rng, o, i, 4), codes(rng, o, i // 32, 4), halves(rng, i // 32, o)
    parts = {"qweight": awq_words(code.T), "qzeros": awq_words(zero.T), "scales": scale}
    of = np.arange(i) // 32
    return parts, (code - zero[:, of]) * number(scale).T[:, of]


def compressed(bits: int, group: int | None, *, zeros: bool = False, ordered: bool = False) -> Way:
    """compressed-tensors' pack-quantized: numbers around zero, moved up by half their range before packing."""

    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        size, half = group or i, 2 ** (bits - 1)
        groups = math.ceil(i / size)
        of = rng.permutation(np.arange(i) // size) if ordered else np.arange(i) // size
        code, scale = codes(rng, o, i, bits), halves(rng, o, groups).bfloat16()
        zero = rng.integers(-half, half, (o, groups)) if zeros else np.zeros((o, groups), dtype=int)
        parts = {
            "weight_packed": words(code, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([o, i]),
        }
        if zeros:
            parts["weight_zero_point"] = words((zero + half).T, bits).t().contiguous()
        if ordered:
            parts["weight_g_idx"] = torch.tensor(of, dtype=torch.int32)
        return parts, (code - half - zero[:, of]) * number(scale)[:, of]

    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "group_size": group}
    weights["strategy"] = "channel" if group is None else "group"
    return Way(of_groups(weights, "pack-quantized"), draw)


def of_groups(weights: dict[str, Any], format: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    group = {"targets": ["Linear"], "weights": weights, **more}
    said = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    return {**said, "config_groups": {"group_0": group}}


def mlx(bits: int, group: int) -> Way:
    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        code, scale, bias = codes(rng, o, i, bits), halves(rng, o, i // group), -halves(rng, o, i // group)
        of = np.arange(i) // group
        packed = words(code, bits).numpy().view("<u4").copy()
        parts = {"weight": torch.from_numpy(packed), "scales": scale, "biases": bias}
        return parts, code * number(scale)[:, of] + number(bias)[:, of]

    return Way({"bits": bits, "group_size": group}, draw, tables=True)


# Floats


def eight(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.tensor(rng.normal(0, 1, shape)).to(torch.float8_e4m3fn)


def block_fp8(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
    """DeepSeek-V3's, with tiles at the edges that are not whole."""
    code = eight(rng, o, i)
    scale = torch.tensor(rng.uniform(0.01, 0.1, (math.ceil(o / 40), math.ceil(i / 24)))).float()
    parts = {"weight": code, "weight_scale_inv": scale}
    return parts, number(code) * spread(number(scale), o, i, (40, 24))


def per_tensor(end: str, shape: tuple[int, ...], *more: str) -> Callable[..., tuple[Parts, Array]]:
    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        code, scale = eight(rng, o, i), torch.tensor(rng.uniform(0.01, 0.1, shape)).float()
        beside = {one: torch.tensor(0.5) for one in more}
        return {"weight": code, end: scale, **beside}, number(code) * float(scale.flatten()[0])

    return draw


def per_row(dtype: torch.dtype, *, zeros: bool = False, column: bool = True) -> Callable[..., tuple[Parts, Array]]:
    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        whole = torch.tensor(rng.integers(-128, 128, (o, i)))
        code = whole.to(dtype) if dtype == torch.int8 else eight(rng, o, i)
        scale = halves(rng, o, 1).bfloat16()
        zero = torch.tensor(rng.integers(-9, 9, (o, 1)), dtype=torch.int8)
        parts = {"weight": code, "weight_scale": scale if column else scale.flatten()}
        if zeros:
            parts["weight_zero_point"] = zero
        return parts, (number(code) - (number(zero) if zeros else 0)) * number(scale)

    return draw


def microscaled(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
    code, exponent = eight(rng, o, i), rng.integers(115, 130, (o, i // 32))
    parts = {"weight": code, "weight_scale": torch.tensor(exponent, dtype=torch.uint8)}
    return parts, number(code) * spread(2.0 ** (exponent - 127), o, i, (1, 32))


def e2m1(code: Array) -> Array:
    """A sign, two bits of exponent biased by one, and one of fraction (OCP MX v1.0, table 5)."""
    sign, exponent, fraction = 1 - 2 * (code >> 3), code >> 1 & 3, code & 1
    return sign * np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))


def pairs(code: Array) -> Tensor:
    return torch.tensor(code[:, ::2] | code[:, 1::2] << 4, dtype=torch.uint8)


def nvfp4(names: tuple[str, str, str], *, divides: bool) -> Callable[..., tuple[Parts, Array]]:
    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        code, scale = codes(rng, o, i, 4), torch.tensor(rng.uniform(0.5, 400, (o, i // 16))).to(torch.float8_e4m3fn)
        whole = torch.tensor(rng.uniform(1e-4, 1e-3)).float()
        stored = (1 / whole).reshape(1) if divides else whole
        parts = {names[0]: pairs(code), names[1]: scale, names[2]: stored}
        parts["input_global_scale" if divides else "input_scale"] = torch.tensor(2.0)
        return parts, e2m1(code) * spread(number(scale), o, i, (1, 16)) * float(whole)

    return draw


def mxfp4(names: tuple[str, str], dtype: torch.dtype = torch.uint8) -> Callable[..., tuple[Parts, Array]]:
    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        code, exponent = codes(rng, o, i, 4), rng.integers(115, 130, (o, i // 32))
        scale = torch.tensor(exponent, dtype=torch.uint8)
        parts = {names[0]: pairs(code).view(dtype), names[1]: scale}
        if dtype != torch.uint8:  # DeepSeek-V4's
            parts[names[1]] = scale.view(torch.float8_e8m0fnu)
        return parts, e2m1(code) * spread(2.0 ** (exponent - 127), o, i, (1, 32))

    return draw


def mlx_floats(mode: str) -> Way:
    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        group = 16 if mode == "nvfp4" else 32
        exponent = rng.integers(115, 130, (o, i // group))
        scale, meant = torch.tensor(exponent, dtype=torch.uint8), 2.0 ** (exponent - 127)
        if mode == "nvfp4":
            small = torch.tensor(rng.uniform(0.5, 4, (o, i // group))).to(torch.float8_e4m3fn)
            scale, meant = small.view(torch.uint8), number(small)
        if mode == "mxfp8":
            code = eight(rng, o, i)
            raw, numbers = code.view(torch.uint8), number(code)
        else:
            four = codes(rng, o, i, 4)
            raw, numbers = pairs(four), e2m1(four)
        packed = torch.from_numpy(raw.numpy().view("<u4").copy())
        return {"weight": packed, "scales": scale}, numbers * spread(meant, o, i, (1, group))

    return Way({"bits": 4, "group_size": 32, "mode": mode}, draw, tables=True)


# bitsandbytes

# The quantiles of a normal distribution that NF4 has (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def bnb4(double: bool, storage: torch.dtype = torch.uint8) -> Way:
    def draw(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
        code, table = codes(rng, o, i, 4).flatten(), torch.tensor(NF4, dtype=torch.float32)
        n = math.ceil(o * i / 64)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [o, i]}
        raw = torch.tensor(code[::2] << 4 | code[1::2], dtype=torch.uint8)
        parts = {"weight": raw.view(storage)[:, None], "weight.quant_map": table}
        if double:
            again = torch.tensor(np.sort(rng.uniform(-1, 1, 256))).float()
            index, of = rng.integers(0, 256, n), torch.tensor(rng.uniform(0.01, 0.1, math.ceil(n / 256))).float()
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            parts |= {"weight.absmax": torch.tensor(index, dtype=torch.uint8), "weight.nested_absmax": of}
            parts |= {"weight.nested_quant_map": again}
            scale = number(again)[index] * number(of)[np.arange(n) // 256] + 0.0625
        else:
            one = torch.tensor(rng.uniform(0.01, 0.1, n)).float()
            parts["weight.absmax"], scale = one, number(one)
        text = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        meant = number(table)[code] * scale[np.arange(o * i) // 64]
        return parts, meant.reshape(o, i)

    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Way(said | {"bnb_4bit_use_double_quant": double}, draw)


def bnb8(rng: np.random.Generator, o: int, i: int) -> tuple[Parts, Array]:
    code, scale = rng.integers(-127, 128, (o, i)), torch.tensor(rng.uniform(1, 10, o)).float()
    parts = {
        "weight": torch.tensor(code, dtype=torch.int8),
        "SCB": scale,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, code * number(scale)[:, None] / 127


MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
FOUR = FLOAT | {"num_bits": 4}
QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
WAYS = {
    "gptq-4": gptq(4, 32),
    "gptq-4-act-order": gptq(4, 32, ordered=True),
    "gptq-8-v2": gptq(8, 32, second=True),
    "gptq-3-rows": gptq(3, -1),
    "gptq-2": gptq(2, 16),
    "awq": Way({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "auto-round": Way(
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32},
        gptq(4, 32).draw,
    ),
    "compressed-4": compressed(4, 32),
    "compressed-4-zeros": compressed(4, 32, zeros=True),
    "compressed-4-act-order": compressed(4, 32, ordered=True),
    "compressed-8-rows": compressed(8, None),
    "compressed-3-zeros": compressed(3, 16, zeros=True),
    "mlx-4": mlx(4, 32),
    "mlx-3": mlx(3, 32),
    "mlx-6": mlx(6, 16),
    "mlx-8": mlx(8, 32),
    "mlx-mxfp4": mlx_floats("mxfp4"),
    "mlx-nvfp4": mlx_floats("nvfp4"),
    "mlx-mxfp8": mlx_floats("mxfp8"),
    "fp8-blocks": Way({**FP8, "weight_block_size": [40, 24]}, block_fp8),
    "fp8-static": Way(FP8, per_tensor("weight_scale_inv", (), "activation_scale")),
    "modelopt-fp8": Way({**MODELOPT, "quant_algo": "FP8"}, per_tensor("weight_scale", (1,), "input_scale", "k_scale")),
    "modelopt-rows": Way(
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, per_row(torch.float8_e4m3fn, column=False)
    ),
    "modelopt-mxfp8": Way({**MODELOPT, "quant_algo": "MXFP8"}, microscaled),
    "modelopt-nvfp4": Way(
        {**MODELOPT, "quant_algo": "NVFP4", "group_size": 16},
        nvfp4(("weight", "weight_scale", "weight_scale_2"), divides=False),
    ),
    "fbgemm": Way({"quant_method": "fbgemm_fp8"}, per_row(torch.float8_e4m3fn)),
    "compressed-fp8": Way(of_groups({**FLOAT, "strategy": "channel"}, "float-quantized"), per_row(torch.float8_e4m3fn)),
    "compressed-int8": Way(
        of_groups({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"), per_row(torch.int8)
    ),
    "compressed-int8-zeros": Way(
        of_groups({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, "int-quantized"),
        per_row(torch.int8, zeros=True),
    ),
    "compressed-nvfp4": Way(
        of_groups(
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"
        ),
        nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), divides=True),
    ),
    "compressed-mxfp4": Way(
        of_groups({**FOUR, "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
        mxfp4(("weight_packed", "weight_scale")),
    ),
    "quark-mxfp4": Way(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
        },
        mxfp4(("weight", "weight_scale")),
    ),
    "deepseek-fp4": Way(
        {**FP8, "weight_block_size": [32, 32], "expert_dtype": "fp4"}, mxfp4(("weight", "scale"), torch.int8)
    ),
    "nf4": bnb4(double=False),
    "nf4-double": bnb4(double=True),
    "nf4-in-bf16": bnb4(double=True, storage=torch.bfloat16),
    "int8": Way({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of plain matrices."""
    folder = tmp_path_factory.mktemp("saved") / "plain"
    save(strategies.randomised(read_config(CONFIG, "x").spec, 3, torch.float32), folder, family="llama", carried={})
    return folder


def written(saved: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """A folder of packed matrices, and one of what they stand for, in float32."""
    way, rng = WAYS[name], np.random.default_rng(len(name))
    plain, packed = folder / "plain", folder / "packed"
    shutil.copytree(saved, plain)
    tensors = load_file(plain / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for key, tensor in tensors.items():
        inside = ".layers." in key and tensor.ndim == 2
        if inside or (way.tables and tensor.ndim == 2):
            base = key.removesuffix(".weight")
            del stored[key]
            parts, matrix = way.draw(rng, *tensor.shape)
            stored |= {f"{base}.{end}": part for end, part in parts.items()}
            meant[key] = torch.from_numpy(matrix).float()
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": way.said}))
    save_file(stored, packed / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    return packed, plain


@pytest.mark.parametrize("name", WAYS)
def test_loaded_is_what_is_meant(saved: Path, name: str, tmp_path: Path) -> None:
    packed, plain = written(saved, tmp_path, name)
    have, want = load(packed, dtype="float32"), load(plain, dtype="float32")
    for (path, mine), (_, theirs) in zip(have.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7, msg=f"{name}: {path}")


# Blocks that the matrices are held in with `packed`; the others are expanded: groups of 16 integers or out of order,
# 8-bit floats, codebooks, and integers of 6 and 8 bits with zero points or biases.
HELD = {
    **dict.fromkeys(("gptq-4", "gptq-3-rows", "awq", "auto-round", "compressed-4-zeros"), "int4_zero"),
    **dict.fromkeys(("compressed-mxfp4", "quark-mxfp4", "deepseek-fp4", "mlx-mxfp4"), "mxfp4"),
    **dict.fromkeys(("modelopt-nvfp4", "compressed-nvfp4"), "nvfp4_wide"),
    **dict.fromkeys(("mlx-4", "mlx-3"), "q4_1"),
    **dict.fromkeys(("compressed-8-rows", "compressed-int8"), "q8_0"),
    "compressed-4": "q4_0",
    "mlx-nvfp4": "nvfp4",
    "int8": "int8_wide",
}


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_what_stays_packed_is_the_same_numbers(saved: Path, name: str, tmp_path: Path) -> None:
    folder, _ = written(saved, tmp_path, name)
    if name not in HELD:
        with pytest.raises(InputError, match="no blocks that can stay packed"):
            load(folder, packed=True)
        assert not Contents(open_model(folder, weights=True), packed=None).formats
        return
    mine, theirs = load(folder, "float32", packed=True), load(folder, "float32")
    format, own = HELD[name], (one for one in weights(mine.spec) if one[0].startswith("blocks"))
    inside = {path: weight for path, weight, _ in own if weight.role == "matrix"}
    for path, weight in inside.items():
        assert weight.format == (format if weight.shape[-1] % BLOCKS[format][0] == 0 else None)
        have = mine.get_parameter(path)
        have = have if weight.format is None else expand(have, format, torch.float32)
        assert torch.equal(have, theirs.get_parameter(path)), path
    ids = torch.randint(32, (2, 9))
    assert torch.equal(mine(ids), theirs(ids))
    held = sum(parameter.nbytes for parameter in mine.parameters())
    assert held == cost.weight_bytes(mine.spec, "fp32") < sum(parameter.nbytes for parameter in theirs.parameters())


@pytest.mark.parametrize("name", ["gptq-4-act-order", "modelopt-nvfp4", "fp8-blocks", "nf4-double", "mlx-3"])
def test_converted_and_described(saved: Path, name: str, tmp_path: Path) -> None:
    packed, plain = written(saved, tmp_path, name)
    convert(packed, tmp_path / "out", dtype="float32")
    have, want = load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors")
    assert have.keys() == want.keys()
    for key, tensor in have.items():
        torch.testing.assert_close(tensor, want[key], rtol=2e-6, atol=1e-7)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    done = CliRunner().invoke(cli, ["describe", str(packed), "--json"])
    document = json.loads(done.stdout)
    assert document["stored_bytes"] == sum(t.nbytes for t in load_file(packed / "model.safetensors").values())
    # what is billed without the file: all but the tables and texts of bitsandbytes, and scales of activations
    beside = ("quant_map", "nf4", "weight_format", "input_scale")
    stored = load_file(packed / "model.safetensors")
    billed = sum(tensor.nbytes for key, tensor in stored.items() if not key.endswith(beside))
    assert document["packed"]["weight_bytes"] == pytest.approx(billed, rel=0.02)


@pytest.mark.parametrize("power", [False, True])
def test_fp8_as_transformers_expands_it(saved: Path, power: bool, tmp_path: Path) -> None:
    packed, _ = written(saved, tmp_path, "modelopt-mxfp8" if power else "fp8-static")
    stored, have = load_file(packed / "model.safetensors"), load(packed, dtype="float32")
    dequantise = Fp8Dequantize(None)._dequantize_one
    for i in range(2):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        scale = stored[f"{name}_scale" if power else f"{name}_scale_inv"]
        want = dequantise(stored[name], scale if power else scale.reshape(1, 1), torch.float32)
        assert torch.equal(have.get_parameter(f"blocks.{i}.ffn.body.up.weight"), want)
    mine = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scales = torch.arange(100, 116, dtype=torch.uint8).view(4, 4)
    from asbuilt.kernels.dequantise import four_bit_floats

    theirs = dequantise(mine.view(torch.int8), scales, torch.float32)
    assert torch.equal(four_bit_floats(mine, scales, 32), theirs)


def broken(parts: dict[str, Tensor], key: str, how: str) -> dict[str, Tensor]:
    """One tensor of a packed matrix is missing, of another dtype, a row short, or of another rank."""
    tensor = parts[key]
    if how == "missing":
        return {name: one for name, one in parts.items() if name != key}
    if how == "dtype":
        return {**parts, key: torch.zeros(tensor.shape, dtype=torch.float64)}
    if how == "short":
        return {**parts, key: tensor[:-1].clone() if tensor.ndim else torch.zeros(3, dtype=torch.float32)}
    return {**parts, key: tensor[None, None, None].clone()}


IGNORED = ("input_scale", "input_global_scale", "activation_scale", "k_scale", "weight_format")


def expanded_shapes(folder: Path, said: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors as they are matched with a model's; none where the headers are refused."""
    try:
        found = Expanded(read_header(folder / "model.safetensors"), said, "x")
    except InputError:
        return {}
    return {name: one.shape for name, one in found.headers.items()}


@pytest.mark.parametrize("name", WAYS)
def test_what_does_not_fit_together_is_refused(name: str, tmp_path: Path) -> None:
    """In its headers, or because the matrix would have another shape than the model's."""
    parts, _ = WAYS[name].draw(np.random.default_rng(0), 64, 96)
    for key, how in itertools.product(parts, ("missing", "dtype", "short", "rank")):
        optional = how == "missing" and key.endswith(("g_idx", "zero_point"))
        any_rank = key.endswith(("absmax", "weight_scale_inv", "weight_scale")) or name.startswith("nf4")
        if optional or (how == "rank" and any_rank) or key in IGNORED:  # as many numbers in another shape
            continue
        save_file({f"m.{end}": one for end, one in broken(parts, key, how).items()}, tmp_path / "model.safetensors")
        assert expanded_shapes(tmp_path, WAYS[name].said) != {"m.weight": (64, 96)}, f"{key} {how}"


LEAVES = st.none() | st.booleans() | st.integers(-2, 200) | st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
KEYS = (
    "bits",
    "group_size",
    "mode",
    "weight_block_size",
    "config_groups",
    "checkpoint_format",
    "version",
    "m",
    "format",
)


@given(name=st.sampled_from(sorted(WAYS)), value=VALUES, key=st.sampled_from(KEYS))
def test_whatever_a_config_says_a_matrix_is_expanded_or_refused(name: str, value: object, key: str) -> None:
    parts, _ = WAYS[name].draw(np.random.default_rng(0), 24, 96)
    with tempfile.TemporaryDirectory() as folder, suppress(InputError):
        save_file({f"m.{end}": part for end, part in parts.items()}, Path(folder) / "model.safetensors")
        found = Expanded(read_header(Path(folder) / "model.safetensors"), WAYS[name].said | {key: value}, "x")
        assert found.headers.keys() == {"m.weight"}
        assert tuple(found("m.weight").shape) == found.headers["m.weight"].shape


def test_groups_that_are_not_there_are_refused(saved: Path, tmp_path: Path) -> None:
    packed, _ = written(saved, tmp_path, "gptq-4-act-order")
    stored = load_file(packed / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.g_idx"
    for wrong in (-1, 2):
        stored[key] = torch.full_like(stored[key], wrong)
        save_file(stored, packed / "model.safetensors")
        with pytest.raises(InputError, match="groups that are not there"):
            load(packed)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "awq", "format": "gemv_fast"},
        {"quant_method": "auto-round", "packing_format": "auto_round"},
        {"quant_method": "hqq"},
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(saved: Path, said: dict[str, Any], tmp_path: Path) -> None:
    packed, _ = written(saved, tmp_path, "gptq-4")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    with pytest.raises(InputError, match="quantization_config"):
        load(packed)
    assert CliRunner().invoke(cli, ["describe", str(packed), "--json"]).exit_code == 0


def test_biases_that_autogptq_adds(saved: Path, tmp_path: Path) -> None:
    """Zero ones are passed over; others would be lost, and are refused."""
    packed, plain = written(saved, tmp_path, "gptq-4")
    stored, want = load_file(packed / "model.safetensors"), load(plain, dtype="float32")
    biases = {
        key.replace("qweight", "bias"): torch.zeros(one.shape[1]).half()
        for key, one in stored.items()
        if "qweight" in key
    }
    save_file(stored | biases, packed / "model.safetensors")
    for mine, theirs in zip(load(packed, dtype="float32").parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
    save_file(stored | {key: one + 1 for key, one in biases.items()}, packed / "model.safetensors")
    with pytest.raises(InputError, match="unexpected"):
        load(packed)


def test_a_cache_that_alone_is_quantised_leaves_weights_plain(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "x")
    (tmp_path / "x" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    stored = load_file(saved / "model.safetensors")
    scales = {
        f"model.layers.{i}.self_attn.{end}": torch.tensor(2.0) for i in range(2) for end in ("k_scale", "v_scale")
    }
    save_file(stored | scales, tmp_path / "x" / "model.safetensors")
    for mine, theirs in zip(load(tmp_path / "x").parameters(), load(saved).parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_floats_without_their_scales_are_refused(saved: Path, tmp_path: Path) -> None:
    packed, _ = written(saved, tmp_path, "fp8-static")
    stored = load_file(packed / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(stored, packed / "model.safetensors")
    with pytest.raises(InputError, match="without a scale"):
        load(packed)


MOE = CONFIG | {"num_experts_per_tok": 2, "head_dim": 16}
MIXTURES = {
    "qwen3_moe": MOE | {"model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 32},
    "llama4_text": MOE | {"model_type": "llama4_text", "num_local_experts": 3, "intermediate_size_mlp": 96},
}
INSIDE = {"qwen3_moe": "mlp", "llama4_text": "feed_forward"}


def experts(way: Way, rng: np.random.Generator, end: str, stack: Tensor, *, together: bool) -> Parts:
    """The packed matrices of a layer's experts, apart or stacked, by name; `stack` becomes what they stand for."""
    found: list[Parts] = []
    for matrix in stack:
        parts, meant = way.draw(rng, *matrix.shape)
        matrix.copy_(torch.from_numpy(meant).float())
        found.append(parts)
    if together:
        return {f"switch_mlp.{end}_proj.{key}": torch.stack([one[key] for one in found]) for key in found[0]}
    return {f"experts.{e}.{end}_proj.{key}": part for e, one in enumerate(found) for key, part in one.items()}


@pytest.mark.parametrize(
    ("family", "name", "stacked"),
    [
        ("qwen3_moe", "mlx-4", True),
        ("qwen3_moe", "mlx-nvfp4", True),
        ("qwen3_moe", "modelopt-nvfp4", False),
        ("llama4_text", "compressed-fp8", False),
        ("llama4_text", "awq", False),
    ],
)
def test_experts_apart_and_in_stacks(family: str, name: str, stacked: bool, tmp_path: Path) -> None:
    """mlx has one stack of the experts that are apart elsewhere, and quantisers take the stacks of others apart."""
    way, rng, plain, packed = WAYS[name], np.random.default_rng(1), tmp_path / "plain", tmp_path / "packed"
    model = strategies.randomised(read_config(MIXTURES[family], "x").spec, 3, torch.float32)
    stored: Parts = {}
    with torch.no_grad():
        for i, end in itertools.product(range(2), ("gate", "up", "down")):
            stack = model.get_parameter(f"blocks.{i}.ffn.body.{end}")
            made = experts(way, rng, end, stack, together=stacked)
            stored |= {f"model.layers.{i}.{INSIDE[family]}.{key}": part for key, part in made.items()}
    save(model, plain, family=family, carried={})
    kept = {key: one for key, one in load_file(plain / "model.safetensors").items() if ".experts." not in key}
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": way.said}))
    save_file(kept | stored, packed / "model.safetensors")
    numbers, stack = sum(one.numel() for one in model.parameters()), model.get_parameter("blocks.0.ffn.body.up").numel()
    # the model in two bytes a number; a stack in four, and beside it its experts where they are apart
    assert Contents(open_model(packed)).needs("bfloat16") == 2 * numbers + 4 * (1 if stacked else 2) * stack
    have = load(packed, dtype="float32").named_parameters()
    for (path, mine), (_, theirs) in zip(have, model.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7, msg=path)
    one = next(key for key in stored if key.endswith(("weight", "qweight")))
    save_file(kept | {key: part for key, part in stored.items() if key != one}, packed / "model.safetensors")
    with pytest.raises(InputError):
        load(packed)


OTHERS: dict[str, dict[str, Any]] = {
    "phi3": CONFIG | {"pad_token_id": 0},
    "gpt2": {"vocab_size": 32, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 80},
}


@pytest.mark.parametrize("family", OTHERS)
def test_matrices_that_are_stored_as_one_or_transposed(family: str, tmp_path: Path) -> None:
    """Blocks are of the matrix as it is stored; the family's layout comes after."""
    spec = read_config(OTHERS[family] | {"model_type": family}, "x").spec
    save(strategies.randomised(spec, 3, torch.float32), tmp_path / "plain", family=family, carried={})
    stored, rng = load_file(tmp_path / "plain" / "model.safetensors"), np.random.default_rng(0)
    meant = dict(stored)
    for key in [key for key, one in stored.items() if one.ndim == 2 and (".h." in key or ".layers." in key)]:
        parts, matrix = block_fp8(rng, *stored[key].shape)
        meant[key] = torch.from_numpy(matrix).float()
        stored |= {key.removesuffix("weight") + end: part for end, part in parts.items()}
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    save_file(stored, tmp_path / "packed" / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    said = {"quantization_config": WAYS["fp8-blocks"].said}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config | said))
    have, want = (load(tmp_path / name, dtype="float32") for name in ("packed", "plain"))
    for mine, theirs in zip(have.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


def test_stacks_in_8_bits_with_scales_beside_them(tmp_path: Path) -> None:
    """modelopt's llama4: stacks as they are, inputs first, named without `weight`; a scale for each expert."""
    model = strategies.randomised(read_config(MIXTURES["llama4_text"], "x").spec, 3, torch.float32)
    save(model, tmp_path / "plain", family="llama4_text", carried={})
    stored, rng = load_file(tmp_path / "plain" / "model.safetensors"), np.random.default_rng(0)
    meant = dict(stored)
    for key in [key for key in stored if ".experts." in key]:
        code, scale = eight(rng, *stored[key].shape), torch.tensor(rng.uniform(0.01, 0.1, 3)).float()
        meant[key] = code.float() * scale[:, None, None]
        stored |= {key: code, f"{key}_weight_scale": scale, f"{key}_input_scale": torch.tensor(1.0)}
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    save_file(stored, tmp_path / "packed" / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    said = {"quantization_config": {**MODELOPT, "quant_algo": "FP8"}}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config | said))
    have, want = (load(tmp_path / name, dtype="float32") for name in ("packed", "plain"))
    for mine, theirs in zip(have.parameters(), want.parameters(), strict=True):
        assert torch.equal(mine, theirs)
