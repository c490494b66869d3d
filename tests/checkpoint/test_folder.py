"""Checkpoint folders made by transformers: loaded, saved and converted tensor for tensor, and loaded back by it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load, stored_bytes, stored_parameters
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.dtypes import STORED_BITS
from asbuilt.errors import InputError
from asbuilt.formats.safetensors import read_folder, read_header
from asbuilt.nn import build
from asbuilt.nn.model import Model


def save_again(folder: Path, out: Path, **more: object) -> Model:
    source = open_model(folder)
    model = load(source)
    save(model, out, family=source.family, carried=source.reading.carried, tokenizer_from=source, **more)  # type: ignore[arg-type]
    return model


@settings(max_examples=15, deadline=None)
@given(tiny.families, tiny.seeds, st.booleans(), tiny.dtypes, st.booleans(), st.sampled_from([1, 3000, 5e9]))
def test_save_of_load_and_convert_give_the_checkpoint_back(
    family: str, seed: int, tied: bool, dtype: torch.dtype, shards: bool, most: float
) -> None:
    with TemporaryDirectory() as place:
        folder, saved, converted = (Path(place, name) for name in ("made", "saved", "converted"))
        made = tiny.write(folder, family, seed, tied=tied, dtype=dtype, shards=shards)
        before = tiny.stored(folder)
        model = save_again(folder, saved, max_shard_bytes=most)
        convert(folder, converted, max_shard_bytes=most)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model(torch.randint(tiny.N_VOCAB, (2, 5))).isfinite().all()
        n = sum(tensor.numel() for tensor in before.values())
        assert stored_parameters(folder) == n == sum(p.numel() for p in model.parameters())
        assert stored_bytes(folder) == n * dtype.itemsize
        for out in (saved, converted):
            tiny.assert_same(tiny.stored(out), before)
            assert sorted(file.name for file in Path(place).iterdir()) == ["converted", "made", "saved"]
            tiny.assert_same(tiny.load_strictly(out).state_dict(), made.state_dict())


@given(tiny.seeds, st.integers(1, 20_000))
@settings(max_examples=10, deadline=None)
def test_shards_are_no_larger_than_asked(seed: int, most: int) -> None:
    with TemporaryDirectory() as place:
        folder, out = Path(place, "made"), Path(place, "out")
        tiny.write(folder, "llama", seed)
        convert(folder, out, max_shard_bytes=most)
        for shard in out.glob("*.safetensors"):
            tensors = read_header(shard).values()
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= most
        assert len(read_folder(out)) == len(read_folder(folder))


def test_gpt2_as_published_has_no_prefix_and_stores_the_masks(tmp_path: Path) -> None:
    made = tiny.write(tmp_path, "gpt2", 0, tied=True)
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tiny.stored(tmp_path).items()}
    mask = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    tiny.rewrite(tmp_path, plain | mask)
    model = load(tmp_path)
    assert torch.equal(model.get_parameter("embedding.weight"), made.state_dict()["transformer.wte.weight"])
    assert stored_parameters(tmp_path) == sum(p.numel() for p in model.parameters()) + 2 * 16 * 16


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_head_stored_again_is_accepted_and_not_written(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "made"
    tiny.write(folder, family, 1, tied=True)
    before = tiny.stored(folder)
    table = next(tensor for name, tensor in before.items() if "embed_tokens" in name or "wte" in name)
    tiny.rewrite(folder, before | {"lm_head.weight": table.clone()})
    save_again(folder, tmp_path / "saved")
    tiny.assert_same(tiny.stored(tmp_path / "saved"), before)


def test_dtype_is_asked_for_then_said_then_stored(tmp_path: Path) -> None:
    tiny.write(tmp_path, "llama", 2, dtype=torch.bfloat16)
    assert load(tmp_path, dtype="float32").get_parameter("embedding.weight").dtype == torch.float32
    tiny.edit_json(tmp_path / "config.json", dtype="float16")
    assert load(tmp_path).get_parameter("embedding.weight").dtype == torch.float16
    tiny.edit_json(tmp_path / "config.json", dtype=None)
    assert load(tmp_path).get_parameter("embedding.weight").dtype == torch.bfloat16
    mixed = {name: tensor.float() if tensor.dim() == 1 else tensor for name, tensor in tiny.stored(tmp_path).items()}
    tiny.rewrite(tmp_path, mixed)
    assert load(tmp_path).get_parameter("embedding.weight").dtype == torch.float32


def test_convert_keeps_the_dtype_of_every_tensor_or_changes_all(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    tiny.write(folder, "llama", 3, dtype=torch.bfloat16)
    mixed = {name: tensor.float() if tensor.dim() == 1 else tensor for name, tensor in tiny.stored(folder).items()}
    tiny.rewrite(folder, mixed)
    convert(folder, tmp_path / "kept")
    tiny.assert_same(tiny.stored(tmp_path / "kept"), mixed)
    convert(folder, tmp_path / "half", dtype="float16")
    tiny.assert_same(tiny.stored(tmp_path / "half"), {name: tensor.half() for name, tensor in mixed.items()})


def test_float8_is_read_by_value(tmp_path: Path) -> None:
    tiny.write(tmp_path, "llama", 4)
    tiny.edit_json(tmp_path / "config.json", dtype=None)
    small = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tiny.stored(tmp_path).items()}
    tiny.rewrite(tmp_path, small)
    weight = load(tmp_path).get_parameter("embedding.weight")
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.float(), small["model.embed_tokens.weight"].float())


def test_what_lies_beside_the_weights_is_carried_along(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    tiny.write(folder, "gpt2", 5)
    beside = {"generation_config.json": '{"top_k":  7}\n', "merges.txt": "a b\n", "chat_template.jinja": "{{ x }}"}
    for name, text in (beside | {"modeling_own.py": "raise SystemExit"}).items():
        (folder / name).write_text(text)
    save_again(folder, tmp_path / "saved")
    convert(folder, tmp_path / "converted")
    for out in ("saved", "converted"):
        copied = {file.name: file.read_text() for file in (tmp_path / out).iterdir() if file.suffix != ".safetensors"}
        assert copied.pop("config.json")
        assert copied == beside


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    tiny.write(tmp_path, "llama", 6, shards=True)
    code = (
        "import sys; from asbuilt.checkpoint.load import stored_parameters; print(stored_parameters(sys.argv[1]));"
        "assert not {'torch', 'safetensors', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) == sum(tensor.numel() for tensor in tiny.stored(tmp_path).values())


def test_values_beyond_the_range_of_a_dtype_are_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path / "made", "llama", 7)
    tensors = tiny.stored(tmp_path / "made")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = -7e4
    tiny.rewrite(tmp_path / "made", tensors)
    with pytest.raises(InputError, match=r"outside the range.*70000"):
        load(tmp_path / "made", dtype=torch.float16)
    with pytest.raises(InputError, match=r"down_proj.*outside the range"):
        convert(tmp_path / "made", tmp_path / "out", dtype=torch.float16)
    assert [file.name for file in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_is_spelled_as_anyone_spells_it(tmp_path: Path, dtype: torch.dtype | str) -> None:
    tiny.write(tmp_path, "llama", 8)
    model = load(tmp_path, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in build(model.spec, dtype=dtype, device="meta").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "float8_e4m3fn", "bf61"])
def test_a_dtype_that_no_model_computes_in_is_refused(tmp_path: Path, dtype: object) -> None:
    tiny.write(tmp_path, "llama", 8)
    with pytest.raises(InputError, match=r"dtype.*must be fp64, fp32, bf16 or fp16"):
        load(tmp_path, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    tiny.write(tmp_path, "llama", 9)
    with pytest.raises(InputError, match="device"):
        load(tmp_path, device=device)


def test_a_type_is_as_wide_as_its_name_says() -> None:
    named = {name: int(re.findall(r"\d+", name)[0]) for name in STORED_BITS if name != "BOOL"}
    assert {"BOOL": 8, **named} == STORED_BITS
