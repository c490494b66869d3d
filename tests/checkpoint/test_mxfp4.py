"""Packed experts: unpacked as by transformers, bit by bit; loaded, described and converted; other packings refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.families.shared.table import Mxfp4

E, F, M = 3, 32, 64
CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 11,
    "hidden_size": M,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
SIZES = st.integers(1, 3)


def drawn(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte, and scales from the least to those whose products a float still holds."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return packed, torch.randint(252, shape, generator=generator, dtype=torch.uint8)


@given(SIZES, SIZES, SIZES, strategies.SEEDS)
def test_against_transformers(experts: int, rows: int, blocks: int, seed: int) -> None:
    packed, scales = drawn(experts, rows, blocks, seed=seed)
    (have,) = Mxfp4().load([packed, scales])
    want = convert_moe_packed_tensors(packed, scales, dtype=torch.bfloat16)
    assert torch.equal(have.transpose(1, 2), want)
    assert Mxfp4().stored_shapes([tuple(have.shape)]) == [tuple(packed.shape), tuple(scales.shape)]


def test_rows_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="multiple of 32"):
        Mxfp4().stored_shapes([(2, 3, 33)])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of packed experts, and one of the same as plain tensors, as transformers unpacks them."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    save(strategies.randomised(read_config(CONFIG, "x").spec, 3, torch.bfloat16), plain, family="gpt_oss", carried={})
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    tensors = load_file(plain / "model.safetensors")
    unpacked, stored = dict(tensors), dict(tensors)
    for seed, name in enumerate(name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))):
        _, inputs, outputs = tensors[name].shape
        blocks, scales = drawn(E, outputs, inputs // 32, seed=seed)
        scales = scales % 4 + 124
        unpacked[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def test_loaded_is_what_is_unpacked(folders: tuple[Path, Path]) -> None:
    have, want = load(folders[0]), load(folders[1])
    assert {p.dtype for p in have.parameters()} == {torch.bfloat16}
    for (path, mine), (_, theirs) in zip(have.named_parameters(), want.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), path


def test_converted_is_plain(folders: tuple[Path, Path], tmp_path: Path) -> None:
    convert(folders[0], tmp_path / "out")
    have, want = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", folders[1]))
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in have)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_described_with_what_is_stored(folders: tuple[Path, Path]) -> None:
    packed, plain = (json.loads(CliRunner().invoke(cli, ["describe", str(f), "--json"]).stdout) for f in folders)
    assert (packed["quantization"], plain["quantization"]) == (MXFP4, None)
    assert packed["parameters"] == plain["parameters"]
    experts = 2 * E * 3 * F * M
    assert plain["stored_bytes"] - packed["stored_bytes"] == experts * 2 - experts // 32 * 17


def test_other_packings_are_described_and_not_loaded(folders: tuple[Path, Path]) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    for said in ({"quant_method": "gptq", "bits": 4}, {"load_in_4bit": True}):
        (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
        done = CliRunner().invoke(cli, ["describe", str(folders[0]), "--json"])
        assert json.loads(done.stdout)["quantization"] == said
        with pytest.raises(InputError, match="quantization_config"):
            load(folders[0])


def test_floats_in_place_of_bytes_are_refused(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_blocks"))
    save_file(tensors | {name: tensors[name].to(torch.float16)}, file)
    with pytest.raises(InputError, match=name):
        load(folders[0])
