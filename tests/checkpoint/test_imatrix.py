"""llama.cpp's importance matrices: read as it writes them, used for the right weights, and written back."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch

from asbuilt.checkpoint.gguf_write import write_gguf
from asbuilt.checkpoint.imatrix import read_imatrix, write_imatrix
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.checkpoint.wanted import Formats
from asbuilt.errors import InputError
from asbuilt.formats import gguf_write
from asbuilt.kernels.packed import expand
from asbuilt.kernels.quantise import quantise

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
PATH, NAME = "blocks.1.ffn.body.down.weight", "blk.1.ffn_down.weight"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    tiny.build("llama", 21, **WIDE, vocab_size=48).save_pretrained(tmp_path / "m")
    return open_model(tmp_path / "m")


def matrix(path: Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["some.txt"])
    writer.add_uint32("imatrix.chunk_count", 2)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sums_are_read_as_means_and_weigh_their_weights(tmp_path: Path, source: Source) -> None:
    sums = np.random.default_rng().random(96) ** 4 * 1000
    counts = np.array([1024.0])
    path = matrix(tmp_path / "i.gguf", {f"{NAME}.in_sum2": sums, f"{NAME}.counts": counts})
    found = read_imatrix(path, source)
    assert found.keys() == {PATH}
    np.testing.assert_allclose(found[PATH].numpy(), sums / 1024, rtol=1e-6)
    summary = write_gguf(source, tmp_path / "q.gguf", Formats(common="q4_0"), importance=found)
    was, now = load(source, dtype="float32").state_dict(), load(tmp_path / "q.gguf").state_dict()
    for name, x in was.items():
        if x.ndim > 1 and "head" not in name:
            wanted = expand(quantise(x, "q4_0", importance=found.get(name)), "q4_0", torch.float32)
            assert torch.equal(now[name], wanted), name
    assert not torch.equal(now[PATH], expand(quantise(was[PATH], "q4_0"), "q4_0", torch.float32))
    row = next(row for row in summary.rows if PATH in row.paths)
    error = ((now[PATH] - was[PATH]).square() * found[PATH]).sum() / (was[PATH].square() * found[PATH]).sum()
    assert row.output_error == pytest.approx(float(error) ** 0.5, rel=1e-4)
    assert all(row.output_error is None for row in summary.rows if PATH not in row.paths)


def test_what_is_written_is_read_again(tmp_path: Path, source: Source) -> None:
    rng = torch.Generator().manual_seed(5)
    made = {f"blocks.{i}.attention.body.{n}.weight": torch.rand(64, generator=rng) for i in (0, 1) for n in "qkvo"}
    write_imatrix(tmp_path / "i.gguf", source, made, "some text", 300)
    found = read_imatrix(tmp_path / "i.gguf", source)
    assert found.keys() == made.keys()
    assert all(torch.allclose(found[path], made[path], rtol=1e-6) for path in made)
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    names = {tensor.name for tensor in reader.tensors}
    assert {"blk.0.attn_q.weight.in_sum2", "blk.0.attn_q.weight.counts"} <= names
    assert reader.fields["general.type"].contents() == "imatrix"
    with pytest.raises(InputError, match="already exists"):
        write_imatrix(tmp_path / "i.gguf", source, made, "some text", 300)


def test_maps_of_one_tensor_share_an_importance(tmp_path: Path) -> None:
    tiny.build("gpt2", 22, n_embd=64, n_head=4, vocab_size=48).save_pretrained(tmp_path / "g")
    source, name = open_model(tmp_path / "g"), "blk.0.attn_qkv.weight"
    sums = np.arange(64.0)
    path = matrix(tmp_path / "i.gguf", {f"{name}.in_sum2": sums, f"{name}.counts": np.ones(1)})
    found = read_imatrix(path, source)
    assert found.keys() == {f"blocks.0.attention.body.{n}.weight" for n in "qkv"}
    summary = write_gguf(source, tmp_path / "q.gguf", Formats(common="q4_1"), importance=found)
    was, now = load(source, dtype="float32").state_dict(), load(tmp_path / "q.gguf").state_dict()
    for where, mean in found.items():
        assert torch.equal(now[where], expand(quantise(was[where], "q4_1", importance=mean), "q4_1", torch.float32))
    assert sum(row.output_error is not None for row in summary.rows) == 1


ONES = np.ones(96)


@pytest.mark.parametrize(
    ("tensors", "kind", "said"),
    [
        ({f"{NAME}.in_sum2": ONES, f"{NAME}.counts": np.ones(1)}, "model", "general.type: is no importance matrix"),
        ({"blk.7.x.weight.in_sum2": ONES, "blk.7.x.weight.counts": np.ones(1)}, "imatrix", r"names no tensor.*blk\.7"),
        ({f"{NAME}.in_sum2": np.ones(95), f"{NAME}.counts": np.ones(1)}, "imatrix", "of another size.*95"),
        ({f"{NAME}.in_sum2": ONES, f"{NAME}.counts": np.ones(5)}, "imatrix", "counts and sums disagree"),
        ({f"{NAME}.in_sum2": -ONES, f"{NAME}.counts": np.ones(1)}, "imatrix", "no sums of squares"),
        ({f"{NAME}.in_sum2": ONES * np.nan, f"{NAME}.counts": np.ones(1)}, "imatrix", "no sums of squares"),
        ({f"{NAME}.in_sum2": ONES}, "imatrix", "no such tensor"),
        ({f"{NAME}.counts": np.ones(1)}, "imatrix", "has no sums"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, source: Source, tensors: dict[str, np.ndarray], kind: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        read_imatrix(matrix(tmp_path / "i.gguf", tensors, kind), source)


def test_a_full_disk_leaves_nothing(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_write, "_write_data", fail)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="No space left"):
        write_imatrix(tmp_path / "i.gguf", source, {PATH: torch.ones(96)}, "some text", 3)
    assert sorted(tmp_path.iterdir()) == before
