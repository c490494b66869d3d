"""A small GGUF file with random weights, its keys and tensors as llama.cpp's converter names and lays them out.

Nothing here knows asbuilt: names are checked against the gguf library's list for the architecture, shapes are said by
the model at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Shape = tuple[int, ...]
N_VOCAB = 64
NEWER = ("attn_qkv", "ffn_gate_up_exps")


@dataclass(frozen=True, kw_only=True)
class Written:
    """A model as a file holds it: keys without the architecture's name, shapes of tensors inside and outside blocks.

    Shapes are (rows, columns), as numpy has them. A vector whose name ends in `norm.weight` is drawn around 1. `layers`
    says how many there are, `blocks` what each holds, where they differ. `values` are tensors that are given.
    Prompts are at least `least` tokens long.
    """

    architecture: str
    layers: int = 3
    keys: Mapping[str, Any]
    outside: Mapping[str, Shape]
    block: Mapping[str, Shape] = field(default_factory=dict)
    blocks: tuple[Mapping[str, Shape], ...] = ()
    least: int = 1
    values: Mapping[str, np.ndarray] = field(default_factory=dict)

    def shapes(self) -> dict[str, Shape]:
        """Every drawn tensor's name and shape."""
        inside = self.blocks or (self.block,) * self.layers
        return dict(self.outside) | {
            f"blk.{i}.{name}": shape for i, block in enumerate(inside) for name, shape in block.items()
        }

    def newer(self) -> set[str]:
        """Names that llama.cpp reads and the gguf library does not list for this architecture yet."""
        return {f"blk.{i}.{stem}" for stem in NEWER for i in range(self.layers)}


def draw(name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Returns numbers of the size that training leaves; every vector is drawn too."""
    x = rng.standard_normal(shape)
    if name.endswith(("norm.weight", "norm_2.weight")):
        return (1 + 0.3 * x).astype(np.float32)
    if len(shape) == 1 or name.endswith(".bias"):
        return (0.3 * x).astype(np.float32)
    if "embd" in name:
        return (0.3 * x).astype(np.float32)
    return (1.5 * x / shape[-1] ** 0.5).astype(np.float32)


def write(
    model: Written, path: Path, rng: np.random.Generator, changed: Mapping[str, np.ndarray] | None = None
) -> Path:
    """Returns the path of the file with these weights; `changed` overrule what is drawn, drawing going on the same."""
    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value in model.keys.items():
        _add(writer, f"{model.architecture}.{key}", value)
    _add_vocabulary(writer)
    if "token_types.weight" in model.outside:
        writer.add_token_type_count(model.outside["token_types.weight"][0])
    known = _known_names(model)
    for name, shape in model.shapes().items():
        assert name.rpartition(".")[0] in known | model.newer(), f"{name} is no tensor of {model.architecture}"
        drawn = draw(name, shape, rng)
        writer.add_tensor(name, (changed or {}).get(name, drawn))
    for name, value in model.values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _known_names(model: Written) -> set[str]:
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == model.architecture)
    stems = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]]
    return {stem.format(bid=i) for stem in stems for i in range(max(model.layers, len(model.blocks)))}


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(key)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Adds the smallest vocabulary that llama.cpp takes: letters, and what SentencePiece always has."""
    special = ["<unk>", "<s>", "</s>"]
    letters = [chr(0x100 + i) for i in range(N_VOCAB - len(special))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(special + letters)
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([2, 3, 3] + [1] * len(letters))
