"""Blocks from the file into the model as they are: GGUF, MXFP4 and our own form; the model computes what it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from block_scales import set_scales
from hypothesis import given
from hypothesis import strategies as st
from test_gguf import finite_blocks
from test_mxfp4 import drawn, folders  # noqa: F401  a fixture

import asbuilt
from asbuilt import cost
from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load, stored_bytes, stored_parameters
from asbuilt.checkpoint.packed import PACKABLE, Mxfp4Blocks, blocks_layout
from asbuilt.checkpoint.save import save
from asbuilt.dtypes import BLOCKS
from asbuilt.errors import InputError
from asbuilt.families.gguf.layouts import Each, PerHead, PlusOne
from asbuilt.families.shared.table import (
    AdjacentPairs,
    Chain,
    Concat,
    EachExpert,
    Flattened,
    Interleave,
    Layout,
    Leading,
    Mxfp4,
    Same,
    StackExperts,
    Transpose,
)
from asbuilt.kernels.packed import EXPANDED, expand
from asbuilt.measure import run
from asbuilt.nn import stored_tensors
from asbuilt.spec import weights

D, FF, H, K, V = 256, 256, 8, 2, 64
KINDS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_1", "Q2_K", "Q3_K")
LOOKED_UP = ("IQ4_NL", "NVFP4", "IQ4_XS", "IQ2_XXS", "IQ1_M", "TQ1_0", "IQ3_S")


def test_what_can_be_read_packed_can_be_computed() -> None:
    assert set(PACKABLE) == set(EXPANDED)


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Same(), [(6,)]),
        (Concat((4, 2, 1)), [(7,)]),
        (Interleave(2, (2, 1)), [(6,)]),
        (StackExperts(3), [(4,), (4,), (4,)]),
        (AdjacentPairs(n_heads=2, d_rotary=4), [(12,)]),
        (PerHead(3), [(3, 2)]),
        (Leading(2), [(1, 1, 5)]),
        (EachExpert(Interleave(2, (1, 1))), [(3, 4)]),
        (Chain((EachExpert(Concat((1, 2))), Same())), [(2, 3)]),
        (Each((PerHead(2), Same())), [(2, 3), (4,)]),
    ],
)
@given(st.sampled_from(sorted(EXPANDED)), st.integers(0, 2**32 - 1))
def test_rows_of_blocks_move_as_rows_of_numbers(layout: Layout, shapes: list[Any], format: str, seed: int) -> None:
    rng, size = np.random.default_rng(seed), BLOCKS[format][1]
    raw = [torch.from_numpy(rng.integers(0, 256, (*rows, 2 * size), dtype=np.uint8)) for rows in shapes]
    moved = blocks_layout(layout)
    assert moved is not None
    want = layout.load([expand(one, format, torch.float32) for one in raw])
    for have, wanted in zip(moved.load(raw), want, strict=True):
        assert torch.equal(expand(have, format, torch.float32).nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize(
    "layout", [Transpose(), Flattened((2, 2)), PlusOne(), Chain((Transpose(), Same())), EachExpert(Transpose())]
)
def test_what_moves_single_numbers_leaves_no_blocks(layout: Layout) -> None:
    assert blocks_layout(layout) is None


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_mxfp4_is_laid_out_as_gguf_has_it(experts: int, rows: int, per_row: int, seed: int) -> None:
    packed, scales = drawn(experts, rows, per_row, seed=seed)
    (blocks,), (want,) = Mxfp4Blocks().load([packed, scales]), Mxfp4().load([packed, scales])
    assert torch.equal(expand(blocks, "mxfp4", torch.bfloat16), want)


def written(path: Path, kinds: list[str], rng: np.random.Generator) -> Path:
    """A llama of two layers with tied embeddings, each matrix in the next of these formats."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(32)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(H)
    writer.add_head_count_kv(K)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(V)
    width = D // H
    shapes = {
        "attn_q": (D, D),
        "attn_k": (K * width, D),
        "attn_v": (K * width, D),
        "attn_output": (D, D),
        "ffn_gate": (FF, D),
        "ffn_up": (FF, D),
        "ffn_down": (D, FF),
    }
    named = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    for i, (name, (rows, columns)) in enumerate(({"token_embd.weight": (V, D)} | named).items()):
        kind = kinds[i % len(kinds)]
        size, nbytes = BLOCKS[kind.lower()]
        raw = scaled(finite_blocks(rng, kind, rows * columns // size), kind).reshape(rows, columns // size * nbytes)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in ("output_norm", *(f"blk.{i}.{n}_norm" for i in range(2) for n in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", rng.normal(1, 0.1, D).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scaled(raw: np.ndarray, kind: str) -> np.ndarray:
    """The blocks with scales of the size of a trained weight's."""
    return set_scales(torch.from_numpy(raw), kind.lower(), torch.full((len(raw),), 0.002)).numpy()


@pytest.mark.parametrize("kinds", [["Q4_1"], list(KINDS), list(LOOKED_UP)])
@torch.no_grad()
def test_a_gguf_file_stays_packed(kinds: list[str], tmp_path: Path) -> None:
    """Logits to the last bit, memory to the last byte: that of the file; and again from our own form."""
    file = written(tmp_path / "m.gguf", kinds, np.random.default_rng())
    mine, theirs = load(file, packed=True), load(file)
    ids = torch.randint(V, (2, 9))
    assert torch.equal(mine(ids), theirs(ids))
    assert (mine.dtype, {p.dtype for p in mine.parameters()}) == (torch.float32, {torch.uint8, torch.float32})
    held = run.weight_bytes(mine)
    assert held == stored_bytes(file) == cost.weight_bytes(mine.spec, "fp32")
    assert run.parameters(mine) == cost.total_parameters(theirs.spec)
    asbuilt.save(mine, tmp_path / "own")
    assert stored_parameters(tmp_path / "own") == stored_parameters(file) == cost.total_parameters(mine.spec)
    again = load(tmp_path / "own")
    assert again.spec == mine.spec
    assert torch.equal(again(ids), theirs(ids))
    convert(tmp_path / "own", tmp_path / "copy")
    copied = stored_tensors(load(tmp_path / "copy", packed=True))
    assert all(torch.equal(tensor, copied[path]) for path, tensor in stored_tensors(mine).items())
    with pytest.raises(InputError, match="our own form"):
        save(mine, tmp_path / "hf", family="llama")
    assert not (tmp_path / "hf").exists()


@torch.no_grad()
def test_packed_experts_stay_packed(folders: tuple[Path, Path]) -> None:  # noqa: F811
    mine, theirs = load(folders[0], packed=True), load(folders[0])
    formats = {path.rpartition(".")[2]: w.format for path, w, _ in weights(mine.spec) if w.format is not None}
    assert formats == {"gate": "mxfp4", "up": "mxfp4", "down": "mxfp4"}
    ids = torch.randint(11, (2, 7))
    assert torch.equal(mine(ids), theirs(ids))
    assert run.weight_bytes(mine) == stored_bytes(folders[0]) == cost.weight_bytes(mine.spec, "bf16")


def test_where_nothing_is_packed_it_is_said(folders: tuple[Path, Path]) -> None:  # noqa: F811
    with pytest.raises(InputError, match="no blocks") as refused:
        load(folders[1], packed=True)
    assert refused.value.field == "packed"


def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", ["Q8_0"], np.random.default_rng())
    tensor = asbuilt.open_model(file).gguf.tensors["blk.1.ffn_up.weight"]  # type: ignore[union-attr]  # pyright: ignore
    data = bytearray(file.read_bytes())
    data[tensor.offset + 5 * 34 : tensor.offset + 5 * 34 + 2] = b"\x00\x7c"
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"blk.1.ffn_up.weight: block 5 "):
        load(file, packed=True)


def test_a_folder_of_ours_with_other_bytes_is_refused(tmp_path: Path) -> None:
    model = load(written(tmp_path / "m.gguf", ["Q4_0"], np.random.default_rng()), packed=True)
    asbuilt.save(model, tmp_path / "own")
    said = json.loads((tmp_path / "own" / "asbuilt.json").read_text())
    text = json.dumps(said).replace('"q4_0"', '"q8_0"')
    (tmp_path / "own" / "asbuilt.json").write_text(text)
    with pytest.raises(InputError, match="of another shape"):
        load(tmp_path / "own")
