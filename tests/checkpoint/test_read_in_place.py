"""Blocks are read into the parameters themselves: nothing is copied twice, nothing shared, joined maps stay joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_stays_packed import written

from asbuilt.checkpoint.gguf import _scales_are_finite, read_tensor
from asbuilt.checkpoint.load import ALIGNED, load
from asbuilt.checkpoint.source import open_model
from asbuilt.dtypes import BLOCKS
from asbuilt.kernels.packed import EXPANDED, finite
from asbuilt.kernels.speed import one_thread


@given(st.sampled_from(sorted(EXPANDED)), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_scales_are_finite_where_the_kernels_say_so(format: str, blocks: int, seed: int) -> None:
    """Of any bytes: one block in 16 has a scale that is not."""
    raw = np.random.default_rng(seed).integers(0, 256, blocks * BLOCKS[format][1], dtype=np.uint8)
    assert _scales_are_finite(raw, format) == finite(torch.from_numpy(raw), format)


@pytest.mark.parametrize("packed", [True, False])
def test_parameters_are_nobody_elses(packed: bool, tmp_path: Path) -> None:
    """The file may change, and a second model too, without one that is loaded."""
    file = written(tmp_path / "m.gguf", ["Q4_1", "Q8_0"], np.random.default_rng())
    model, again = load(file, packed=packed), load(file, packed=packed)
    before = {path: tensor.clone() for path, tensor in model.named_parameters()}
    for tensor in again.parameters():
        tensor.data.zero_()
    file.write_bytes(bytes(file.stat().st_size))
    assert all(torch.equal(tensor, before[path]) for path, tensor in model.named_parameters())
    starts = [tensor.data_ptr() for tensor in model.parameters()]
    assert len(set(starts)) == len(starts)
    blocks = [tensor for tensor in model.parameters() if tensor.dtype == torch.uint8]
    assert bool(blocks) == packed
    for tensor in blocks:
        assert tensor.data_ptr() % ALIGNED == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_joined_maps_stay_joined(tmp_path: Path) -> None:
    """One product computes q, k and v of expanded weights, which are views of one matrix."""
    model = load(written(tmp_path / "m.gguf", ["Q4_1"], np.random.default_rng()))
    groups = [group for module in model.modules() for group in getattr(module, "_together", [])]
    assert groups
    for group in groups:
        assert [one.weight.data_ptr() for one in group.maps] == group.places
        assert torch.equal(torch.cat([one.weight for one in group.maps]), group.weight)


def test_loading_gives_the_threads_back() -> None:
    def fail() -> None:
        with one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            fail()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    source = open_model(written(tmp_path / "m.gguf", ["Q5_0"], np.random.default_rng()), weights=True)
    assert source.gguf is not None
    whole = read_tensor(source.gguf, "token_embd.weight")
    assert torch.equal(read_tensor(source.gguf, "token_embd.weight", slice(5, 17)), whole[5:17])
