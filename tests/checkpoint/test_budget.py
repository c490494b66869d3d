"""Files that ask for much more than they are: each is refused within a second of CPU time and 100 MB."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SECONDS, MEGABYTES = 3.0, 100  # a second where nothing else runs
# Describes each model whose path comes on stdin, and matches its tensors, in a child of its own; says how that ended,
# and the time that it took, without more than so much memory.
RUN = (
    f"MEGABYTES = {MEGABYTES}"
    + """
import json, os, resource, sys
from asbuilt import cost, families
from asbuilt.checkpoint.load import Contents
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.families import llama
for line in sys.stdin:
    if not (child := os.fork()):
        # Not the peak of what is resident: pages of a mapped file are taken from nobody.
        held = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (held + MEGABYTES * 10**6, resource.RLIM_INFINITY))
        before = resource.getrusage(resource.RUSAGE_SELF)
        try:
            Contents(open_model(line.strip()))
            said = "read"
        except InputError as error:
            said = str(error)[:2000]
        except MemoryError:
            said = f"more than {MEGABYTES} MB"
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps([said, seconds]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
Spent = Callable[[Path, str], None]


@pytest.fixture(scope="module")
def spent() -> Iterator[Spent]:
    """Gives what opens a path in that process, and holds what is said and spent against what is right."""
    with subprocess.Popen([sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        asking, answers = run.stdin, run.stdout

        def spend(path: Path, said: str) -> None:
            print(path, file=asking, flush=True)
            message, seconds = json.loads(answers.readline())
            assert re.search(said, message), message
            assert seconds < SECONDS

        yield spend
        run.stdin.close()


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def gguf(keys: list[bytes], tensors: list[tuple[bytes, tuple[int, ...], int, int]], nbytes: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    infos = ((text(name), struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, at)) for name, ne, kind, at in tensors)
    head += b"".join(name + place for name, place in infos)
    return head + bytes(-len(head) % 32) + bytes(nbytes)


ARCHITECTURE = key(b"general.architecture", 8, text(b"llama"))


def array(kind: int, n: int, elements: bytes) -> bytes:
    return gguf([ARCHITECTURE, key(b"tokenizer.ggml.x", 9, struct.pack("<IQ", kind, n) + elements)], [], 0)


SMALL = 1 << 23  # elements
GGUFS: dict[str, tuple[Callable[[], bytes], str]] = {
    "8 million small numbers": (lambda: array(0, SMALL, bytes(SMALL)), "too much memory"),
    "8 million numbers": (lambda: array(6, SMALL, bytes(4 * SMALL)), "too much memory"),
    "6 million truth values": (lambda: array(7, SMALL, bytes(SMALL)), "too much memory"),
    "4 million texts": (lambda: array(8, SMALL // 2, text(b"a") * (SMALL // 2)), "too much memory"),
    "a million texts in turn": (
        lambda: array(8, 1 << 20, text("é€ab".encode()) * (1 << 20)),
        "too much memory|missing",
    ),
    "texts that grow": (lambda: array(8, 40, text("🎉".encode() + b"a" * ((1 << 20) - 8)) * 40), "too much memory"),
    "a million arrays": (lambda: array(9, 1 << 20, struct.pack("<IQ", 0, 0) * (1 << 20)), "too much memory"),
    "as many arrays as there may be": (
        lambda: array(9, 205_000, struct.pack("<IQ", 0, 0) * 205_000),
        r"missing|embedding_length",
    ),
    "131,072 tensors": (
        lambda: gguf([ARCHITECTURE], [(b"t%d" % i, (8,), 0, 32 * i) for i in range(1 << 17)], 32 << 17),
        "tensor count is too large",
    ),
    "16,384 tensors": (
        lambda: gguf([ARCHITECTURE, *SIZES], [(b"t%d" % i, (8,), 0, 32 * i) for i in range(1 << 14)], 32 << 14),
        r"16384 unexpected",
    ),
    "131,072 keys": (
        lambda: gguf([key(b"k%d" % i, 0, b"\1") for i in range(1 << 17)], [], 0),
        "metadata count is too large",
    ),
    "4,000 unknown keys": (
        lambda: gguf([ARCHITECTURE, *SIZES, *(key(b"k%d" % i, 0, b"\1") for i in range(4000))], [], 0),
        "unknown key",
    ),
    "10,000 blocks of one tensor": (
        lambda: gguf(
            [ARCHITECTURE, *SIZES[1:], key(b"llama.block_count", 4, struct.pack("<I", 10_000))],
            [(b"token_embd.weight", (32, 8), 0, 0)],
            1024,
        ),
        "more blocks than tensors",
    ),
    "tensors in one place": (
        lambda: gguf([ARCHITECTURE, *SIZES], [(b"t%d" % i, (1 << 20,), 8, 0) for i in range(9000)], 1_114_112),
        "shares bytes",
    ),
}
SIZES = (
    [key(b"llama.block_count", 4, struct.pack("<I", 1))]
    + [
        key(f"llama.{name}".encode(), 4, struct.pack("<I", n))
        for name, n in (
            ("context_length", 16),
            ("embedding_length", 32),
            ("feed_forward_length", 32),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("vocab_size", 8),
        )
    ]
    + [key(b"llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))]
)

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize("name", GGUFS)
def test_gguf(tmp_path: Path, spent: Spent, name: str) -> None:
    make, said = GGUFS[name]
    (tmp_path / "a.gguf").write_bytes(make())
    spent(tmp_path / "a.gguf", said)


def header(entries: dict[str, object] | str, size: int = 0) -> bytes:
    encoded = (entries if isinstance(entries, str) else json.dumps(entries, separators=(",", ":"))).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(size)


EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
SHARD = "model-00001-of-00002.safetensors"
FOLDERS: dict[str, tuple[Callable[[], dict[str, bytes]], str]] = {
    "a header of 32 MiB": (lambda: {"model.safetensors": header("{" + " " * (32 << 20) + "}")}, "header length"),
    "a header of 8 MiB": (lambda: {"model.safetensors": header("{" + " " * ((8 << 20) - 2) + "}")}, "missing"),
    "a header of 70,000 tensors": (
        lambda: {"model.safetensors": header({f"{i}": EMPTY for i in range(70_000)})},
        "missing|too many values",
    ),
    "a header of lists": (
        lambda: {"model.safetensors": header('{"a":[' + "[]," * 2_000_000 + "[]]}")},
        "too many values",
    ),
    "a header of empty objects": (
        lambda: {"model.safetensors": header('{"a":[' + "{}," * 260_000 + "{}]}")},
        "not a tensor|too many values",
    ),
    "an index of a million names": (
        lambda: {
            "model.safetensors.index.json": json.dumps({"weight_map": {f"{i}": SHARD for i in range(10**6)}}).encode(),
            SHARD: header({}),
        },
        "too large|too many values",
    ),
    "an index of 200,000 shards": (
        lambda: {
            "model.safetensors.index.json": json.dumps(
                {"weight_map": {f"{i}": f"{i}.safetensors" for i in range(200_000)}}
            ).encode(),
            "0.safetensors": header({"0": EMPTY}),
        },
        r"1.safetensors: cannot be read",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_safetensors(tmp_path: Path, spent: Spent, name: str) -> None:
    make, said = FOLDERS[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for file, content in make().items():
        (tmp_path / file).write_bytes(content)
    spent(tmp_path, said)


def test_a_file_of_34_gigabytes_that_is_nearly_empty(tmp_path: Path, spent: Spent) -> None:
    """Its tensor is as large as it says, and no more of it is read than the header."""
    rows = 2**34 // 64
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": rows}))
    said = header({"model.embed_tokens.weight": {"dtype": "BF16", "shape": [rows, 32], "data_offsets": [0, 2**34]}})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(said)
        file.truncate(len(said) + 2**34)
    spent(tmp_path, "11 missing: model.norm.weight")
