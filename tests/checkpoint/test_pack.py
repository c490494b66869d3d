"""Quantised folders that are written: read by us and by transformers as the same numbers, or nothing left of them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import asbuilt
import asbuilt.families
from asbuilt.checkpoint import save as saving
from asbuilt.checkpoint.load import load, stored_bytes
from asbuilt.checkpoint.pack import FOLDER_FORMATS, folder_format, write_packed
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.kernels import rounding
from asbuilt.spec import Model

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
ERRORS = {"fp8": 0.03, "int8": 0.01, "int4": 0.13, "nvfp4": 0.11, "mxfp4": 0.13}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in bfloat16; rows of 192 divide into groups of 64, not of 128."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    made = tiny.build("llama", 31, **WIDE, vocab_size=48, dtype=torch.bfloat16)
    for parameter in made.parameters():
        parameter.data.mul_(0.2)
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("format", FOLDER_FORMATS)
def test_what_is_read_is_what_was_rounded(wide: Path, tmp_path: Path, format: str) -> None:
    summary = write_packed(wide, tmp_path / "q", format)
    was, now = (load(path, dtype="float32").state_dict() for path in (wide, tmp_path / "q"))
    rows = {path: row for row in summary.rows for path in row.paths}
    assert len(rows) == 14
    for path, x in was.items():
        if path not in rows:
            assert torch.equal(now[path], x), path
            continue
        wanted = {
            "fp8": lambda x: rounding.fp8(x, (32, 32)),
            "int8": lambda x: rounding.int8(x, torch.bfloat16),
            "int4": lambda x: rounding.int4(x, 64, torch.bfloat16),
            "nvfp4": rounding.nvfp4,
            "mxfp4": rounding.mxfp4,
        }[format](x)[1]
        assert torch.equal(now[path], wanted), path
        error = float((now[path] - x).norm() / x.norm())
        assert rows[path].error == pytest.approx(error, rel=1e-4)
        assert 0 < error < ERRORS[format]
    assert sum(summary.after.values()) == stored_bytes(tmp_path / "q")
    assert sum(summary.before.values()) == stored_bytes(wide)
    assert sum(row.nbytes for row in summary.rows) < 0.6 * sum(2 * was[path].numel() for path in rows)
    source = open_model(tmp_path / "q")
    assert source.spec == replace(open_model(wide).spec, name=source.spec.name)


@pytest.mark.parametrize("format", FOLDER_FORMATS)
def test_transformers_reads_the_same(wide: Path, tmp_path: Path, format: str) -> None:
    """4-bit floats are expanded to bfloat16 there, whatever is asked for."""
    if format != "fp8" and find_spec("compressed_tensors") is None:
        pytest.skip("compressed-tensors is not installed (pip install -e '.[dev]')")
    write_packed(wide, tmp_path / "q", format)
    narrow = format in ("nvfp4", "mxfp4")
    more: dict[str, Any] = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if format == "fp8" else {}
    dtype = torch.bfloat16 if narrow else torch.float32
    transformers.logging.set_verbosity_error()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=dtype, attn_implementation="eager", **more)
    ids = torch.randint(48, (1, 20))
    with torch.inference_mode():
        ours, plain = (load(path, dtype=dtype)(ids).float() for path in (tmp_path / "q", wide))
        difference = float((theirs.eval()(ids).logits.float() - ours).abs().max())
    assert difference <= (0.05 if narrow else 1e-5) * float(ours.abs().max())
    assert float((plain - ours).abs().max()) > 3 * difference


def test_what_stays_is_said(wide: Path, tmp_path: Path) -> None:
    summary = write_packed(wide, tmp_path / "q", "int4", kept=["blocks.0.ffn.*", "blocks.1.attention.body.q"])
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    mlp = [f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up")]
    assert set(said["ignore"]) == {"lm_head", "model.embed_tokens", *mlp, "model.layers.1.self_attn.q_proj"}
    assert len(summary.rows) == 10
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert "model.layers.0.self_attn.q_proj.weight_packed" in stored
    with pytest.raises(InputError, match=r"by: no weight has such a path.*blocks\.7"):
        write_packed(wide, tmp_path / "r", "int4", kept=["blocks.7.*"])
    assert not (tmp_path / "r").exists()


def mixture() -> Model:
    config = {
        "model_type": "mixtral",
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    return asbuilt.families.read_config(config, "x").spec


@pytest.mark.parametrize("format", FOLDER_FORMATS)
def test_experts_one_by_one(tmp_path: Path, format: str) -> None:
    model = asbuilt.build(mixture(), seed=5)
    asbuilt.save(model, tmp_path / "m", family="mixtral")
    weighs = {f"blocks.{i}.ffn.body.down": torch.rand(3, 96) ** 3 for i in (0, 1)}
    summary = write_packed(tmp_path / "m", tmp_path / "q", format, importance=weighs)
    assert len(summary.rows) == 2 * (4 + 3 * 3)
    assert sum(row.output_error is not None for row in summary.rows) == 2 * 3
    was, now = model.state_dict(), load(tmp_path / "q", dtype="float32").state_dict()
    for i in (0, 1):
        path = f"blocks.{i}.ffn.body.down"
        for e in range(3):
            wanted = {
                "fp8": lambda x, e=e: rounding.fp8(x, (32, 32)),
                "int8": lambda x, e=e: rounding.int8(x),
                "int4": lambda x, e=e: rounding.int4(x, 32, importance=weighs[path][e]),  # noqa: B023
                "nvfp4": lambda x, e=e: rounding.nvfp4(x),
                "mxfp4": lambda x, e=e: rounding.mxfp4(x),
            }[format](was[path][e])[1]
            assert torch.equal(now[path][e], wanted)
        assert torch.equal(now[f"blocks.{i}.ffn.body.router.weight"], was[f"blocks.{i}.ffn.body.router.weight"])


def test_tiles_may_be_cut_off(tmp_path: Path) -> None:
    tiny.build("llama", 14, **{**WIDE, "intermediate_size": 200}).save_pretrained(tmp_path / "odd")
    write_packed(tmp_path / "odd", tmp_path / "q", "fp8")
    was, now = (load(tmp_path / name, dtype="float32").state_dict() for name in ("odd", "q"))
    for name in ("gate", "down"):
        path = f"blocks.1.ffn.body.{name}.weight"
        assert torch.equal(now[path], rounding.fp8(was[path], (128, 128))[1])


def test_shards_and_formats(wide: Path, tmp_path: Path) -> None:
    write_packed(wide, tmp_path / "q", "int8", max_shard_bytes=60_000)
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 2
    write_packed(wide, tmp_path / "one", "int8")
    one, parts = (load(tmp_path / name, dtype="float32").state_dict() for name in ("one", "q"))
    assert all(torch.equal(one[path], parts[path]) for path in one)
    for name in ("q4_k", "int3", "bf16"):
        with pytest.raises(InputError, match="format: is not written to a folder"):
            folder_format(name)


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path / "g", "gpt2", 15)  # stored transposed
    with pytest.raises(InputError, match="format: has nothing to be rounded"):
        write_packed(tmp_path / "g", tmp_path / "q", "int8")
    made = tiny.build("llama", 16, **WIDE)
    made.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 4] = torch.nan
    made.save_pretrained(tmp_path / "bad")
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: holds NaN or infinite"):
        write_packed(tmp_path / "bad", tmp_path / "q", "nvfp4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "g"]


def test_a_full_disk_leaves_nothing(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "_write_tensor", fail)
    with pytest.raises(InputError, match="No space left"):
        write_packed(wide, tmp_path / "q", "fp8")
    assert not list(tmp_path.iterdir())
