"""Whether a model fits into memory is settled before it is loaded, by one function, in one message."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from asbuilt import memory
from asbuilt.checkpoint import room
from asbuilt.checkpoint.load import Contents, load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.families import llama
from asbuilt.nn import build
from asbuilt.spec import Rotary

SPEC = llama.build(
    n_vocab=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=40,
    max_positions=16,
    rotary=Rotary(d_rotary=8),
    tied=False,
    name="tiny",
)
# By hand: two tables 64 x 32; per layer q and o 32 x 32, k and v 16 x 32, three of 32 x 40, two norms; the last norm.
PARAMETERS = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 40 + 2 * 32) + 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(build(SPEC), tmp_path / "tiny", family="llama", carried={})
    return tmp_path / "tiny"


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_what_loading_needs(folder: Path, dtype: str, width: int) -> None:
    """The model, and its largest tensor (a table of 2,048 numbers) once more in float32."""
    assert Contents(open_model(folder)).needs(dtype) == PARAMETERS * width + 64 * 32 * 4


def test_a_byte_too_few_is_refused_and_the_last_byte_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = PARAMETERS * 4 + 64 * 32 * 4
    monkeypatch.setattr(memory, "free", lambda: needed)
    load(folder)
    monkeypatch.setattr(memory, "free", lambda: needed - 1)
    with pytest.raises(InputError, match=r"needs 80\.51 kB .* of memory to be loaded, 80\.51 kB .* are free"):
        load(folder)
    load(folder, "bfloat16")
    monkeypatch.setattr(memory, "free", lambda: None)  # a system that does not say
    load(folder)


def test_a_file_that_is_mostly_holes_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 8.5 GB, which loading holds twice, on a machine with 6 free: the file takes no room on the disk."""
    wide = 2_125_000_000 // 64
    config = {"model_type": "gpt2", "vocab_size": wide, "n_embd": 64, "n_layer": 1, "n_head": 1, "n_positions": 8}
    stated = {"wte.weight": (wide, 64), "wpe.weight": (8, 64), "ln_f.weight": (64,), "ln_f.bias": (64,)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, shape in {
        "ln_1.weight": (64,),
        "ln_1.bias": (64,),
        "ln_2.weight": (64,),
        "ln_2.bias": (64,),
        "attn.c_attn.weight": (64, 192),
        "attn.c_attn.bias": (192,),
        "attn.c_proj.weight": (64, 64),
        "attn.c_proj.bias": (64,),
        "mlp.c_fc.weight": (64, 256),
        "mlp.c_fc.bias": (256,),
        "mlp.c_proj.weight": (256, 64),
        "mlp.c_proj.bias": (64,),
    }.items():
        stated[f"h.0.{name}"] = shape
    header, end = {}, 0
    for name, shape in stated.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    monkeypatch.setattr(memory, "free", lambda: 6_000_000_000)
    with pytest.raises(InputError, match=r"needs 17\.00 GB .* of memory to be loaded, 6\.00 GB .* are free"):
        load(tmp_path, "float32")


def test_an_allocator_that_is_refused_says_the_same() -> None:
    for raised in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")):
        with pytest.raises(InputError, match=r"needs 17\.00 GB .*of memory"), room.memory_errors(17 * 10**9, "m"):
            raise raised
    with pytest.raises(RuntimeError, match="shape"), room.memory_errors(1, "m"):
        raise RuntimeError("shape mismatch")
