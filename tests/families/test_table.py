"""The tables between spec paths and stored names: reversible layouts, every path once, names as others know them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import gguf
import pytest
import torch
from families_drawn import gpt2_configs, llama_configs
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import gguf_table, read_config, tensor_table
from asbuilt.families.shared.table import (
    AdjacentPairs,
    Chain,
    Concat,
    EachExpert,
    Interleave,
    Layout,
    Same,
    StackExperts,
    TensorTable,
    Transpose,
)
from asbuilt.spec import Model, weights

Shape = tuple[int, ...]
SIZES = st.integers(1, 6)
CONFIGS = llama_configs() | gpt2_configs()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[Shape]]:
    """A layout, and shapes of model tensors that it applies to, matrices or vectors."""
    columns: Shape = draw(st.tuples(SIZES) | st.just(()))
    kind = draw(st.sampled_from(["same", "transpose", "concat", "interleave", "experts", "each", "pairs", "chain"]))
    sizes = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    shapes: list[Shape] = [(size, *columns) for size in sizes]
    if kind == "same":
        return Same(), shapes
    if kind == "transpose":
        return Transpose(), shapes
    if kind == "concat":
        return Concat(sizes), shapes
    if kind == "interleave":
        groups = draw(SIZES)
        return Interleave(groups, sizes), [(groups * size, *columns) for size in sizes]
    if kind == "each":
        experts, inner = draw(SIZES), Chain((Interleave(3, sizes[:2]), Transpose()))
        return EachExpert(inner), [(experts, 3 * size, *columns) for size in sizes[:2]]
    if kind == "experts":
        experts = draw(SIZES)
        return StackExperts(experts), [(experts, draw(SIZES), *columns)]
    if kind == "chain":
        return Chain((Concat(sizes), Transpose())), shapes
    heads, d_rotary = draw(SIZES), 2 * draw(SIZES)
    rows = heads * (d_rotary + draw(st.integers(0, 3)))
    return AdjacentPairs(heads, d_rotary), [(rows, *columns)]


def numbered(shapes: list[Shape]) -> list[torch.Tensor]:
    """Tensors in which no two numbers are equal, so that nothing can change places unseen."""
    ends = torch.tensor([math.prod(shape) for shape in shapes]).cumsum(0).tolist()
    flat = torch.arange(ends[-1])
    return [flat[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


@given(layouts())
def test_loading_what_was_saved_gives_it_back(drawn: tuple[Layout, list[Shape]]) -> None:
    layout, shapes = drawn
    built = numbered(shapes)
    stored = layout.save(built)
    assert [tuple(tensor.shape) for tensor in stored] == layout.stored_shapes(shapes)
    for before, after in zip(built, layout.load(stored), strict=True):
        assert torch.equal(before, after)
    again = layout.save(layout.load(stored))
    assert all(torch.equal(a, b) for a, b in zip(stored, again, strict=True))


@given(SIZES, SIZES, SIZES)
def test_adjacent_pairs_are_the_halves_laced(heads: int, pairs: int, columns: int) -> None:
    (built,) = numbered([(heads * 2 * pairs, columns)])
    (stored,) = AdjacentPairs(heads, 2 * pairs).save([built])
    for head in range(heads):
        for pair in range(pairs):
            first = head * 2 * pairs
            assert torch.equal(stored[first + 2 * pair], built[first + pair])
            assert torch.equal(stored[first + 2 * pair + 1], built[first + pair + pairs])


@given(SIZES, st.lists(SIZES, min_size=1, max_size=4), SIZES)
def test_interleaved_rows_come_group_by_group(groups: int, sizes: list[int], columns: int) -> None:
    built = numbered([(groups * size, columns) for size in sizes])
    (stored,) = Interleave(groups, tuple(sizes)).save(built)
    rows = [
        tensor[group * size + i]
        for group in range(groups)
        for tensor, size in zip(built, sizes, strict=True)
        for i in range(size)
    ]
    assert torch.equal(stored, torch.stack(rows))


@given(SIZES, SIZES, SIZES)
def test_every_expert_is_stored_alone(experts: int, rows: int, columns: int) -> None:
    (built,) = numbered([(experts, rows, columns)])
    stored = StackExperts(experts).save([built])
    assert len(stored) == experts
    assert all(torch.equal(built[e], stored[e]) for e in range(experts))


def spec_of(config: dict[str, Any]) -> Model:
    return read_config(config, "x").spec


@pytest.mark.parametrize("make", [tensor_table, gguf_table])
@given(config=CONFIGS)
def test_every_path_is_stored_once(make: Callable[[str, Model], TensorTable], config: dict[str, Any]) -> None:
    spec = spec_of(config)
    table = make(config["model_type"], spec)
    paths = [path for entry in table.entries for path in entry.paths]
    names = [name for entry in table.entries for name in entry.names]
    assert sorted(paths) == sorted(path for path, _, _ in weights(spec))
    assert len(set(names)) == len(names)
    assert not set(table.duplicates) & set(names)
    assert set(table.duplicates.values()) <= set(paths)
    assert not [name for name in names for pattern in table.ignored if re.fullmatch(pattern, name)]


def stored_shapes(table: TensorTable, spec: Model) -> dict[str, Shape]:
    """Name to shape on disk."""
    built = {path: weight.shape for path, weight, _ in weights(spec)}
    found: dict[str, Shape] = {}
    for entry in table.entries:
        shapes = entry.layout.stored_shapes([built[path] for path in entry.paths])
        found |= dict(zip(entry.names, shapes, strict=True))
    return found


@settings(max_examples=25)
@given(CONFIGS)
def test_names_and_shapes_are_those_of_transformers(config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kinds = {"llama": transformers.LlamaConfig, "gpt2": transformers.GPT2Config}
    if config.get("hidden_size", 0) % config.get("num_attention_heads", 1):
        return  # transformers refuses these even where head_dim is given
    theirs = transformers.AutoConfig.for_model(config["model_type"], **spec_free_copy(config))
    assert isinstance(theirs, kinds[config["model_type"]])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    spec = spec_of(config)
    table = tensor_table(config["model_type"], spec)
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in table.duplicates}
    assert stored_shapes(table, spec) == held


def spec_free_copy(config: dict[str, Any]) -> dict[str, Any]:
    """A copy without model_type, nested objects copied too, because transformers writes into them."""
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in copied.items() if key != "model_type"}


@given(CONFIGS)
def test_gguf_names_are_those_the_converter_makes_of_the_hub_names(config: dict[str, Any]) -> None:
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "gpt2": gguf.MODEL_ARCH.GPT2}[config["model_type"]]
    spec = spec_of(config)
    converter = gguf.get_tensor_name_map(arch, spec.n_layers)
    hub, ours = (make(config["model_type"], spec) for make in (tensor_table, gguf_table))
    named = {entry.paths: entry.names for entry in ours.entries}
    for entry in hub.entries:
        expected = [converter.get_name(name, try_suffixes=(".weight", ".bias")) for name in entry.names]
        assert list(named[entry.paths]) == expected


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("model.layers.3.self_attn.rotary_emb.inv_freq", True),
        ("model.rotary_emb.inv_freq", True),
        ("model.layers.3.self_attn.q_proj.weight", False),
    ],
)
def test_llama_buffers(name: str, ignored: bool) -> None:
    table = tensor_table("llama", spec_of({"model_type": "llama"}))
    assert any(re.fullmatch(pattern, name) for pattern in table.ignored) is ignored


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("transformer.h.11.attn.bias", True),
        ("h.0.attn.masked_bias", True),
        ("h.0.attn.c_attn.bias", False),
        ("h.0.attn.c_proj.bias", False),
    ],
)
def test_gpt2_buffers(name: str, ignored: bool) -> None:
    table = tensor_table("gpt2", spec_of({"model_type": "gpt2"}))
    assert any(re.fullmatch(pattern, name) for pattern in table.ignored) is ignored
    assert table.prefix == "transformer."


def test_a_spec_of_another_family_has_no_names() -> None:
    gpt2, llama = (spec_of({"model_type": kind}) for kind in ("gpt2", "llama"))
    with pytest.raises(InputError, match=r"positions\.weight: llama files have no name"):
        tensor_table("llama", gpt2)
    for make in (tensor_table, gguf_table):
        with pytest.raises(InputError, match=r"blocks\.0\.ffn\.body\.gate\.weight: gpt2 files have no name"):
            make("gpt2", llama)
