"""Damaged GGUF and safetensors files: each is read or refused with one message, within a budget, and nothing else.

`python tests/fuzz/files.py --kind gguf --count 50000 --seed 1` writes small valid models and, before it does, changes
one to four things: counts, types, dimensions, offsets, names, values, headers, an index, single bytes, the length. What
is read is described, matched with the model's own tensors, and every tensor is read. Prints what happened, and exits
with 1 at the first case that escaped, took more than a second of CPU time or 100 MB of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asbuilt import cost
from asbuilt.checkpoint.load import Contents
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError

SLOWEST, LARGEST = 1.0, 100 << 20  # seconds of one case, bytes of all
N_VOCAB, D_MODEL, D_FF, N_LAYERS = 8, 32, 32, 2
CONFIG = {
    "model_type": "llama",
    "vocab_size": N_VOCAB,
    "hidden_size": D_MODEL,
    "intermediate_size": D_FF,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
# Names of llama in a block and their (rows, columns), in GGUF and in a folder.
BLOCK: dict[tuple[str, str], tuple[int, ...]] = {
    ("attn_norm", "input_layernorm"): (32,),
    ("ffn_norm", "post_attention_layernorm"): (32,),
    ("attn_q", "self_attn.q_proj"): (32, 32),
    ("attn_k", "self_attn.k_proj"): (16, 32),
    ("attn_v", "self_attn.v_proj"): (16, 32),
    ("attn_output", "self_attn.o_proj"): (32, 32),
    ("ffn_gate", "mlp.gate_proj"): (32, 32),
    ("ffn_up", "mlp.up_proj"): (32, 32),
    ("ffn_down", "mlp.down_proj"): (32, 32),
}
SMALL = bytes(byte & 63 for byte in range(256))  # no number made of such bytes is infinite or none at all
COUNTS = (0, 1, 2, 3, 31, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (
    "",
    "x",
    "split.no",
    "split.count",
    "split.tensors.count",
    "general.alignment",
    "general.architecture",
    "llama.block_count",
    "token_embd.weight",
    "rope_freqs.weight",
    "model.embed_tokens.weight",
    "a" * 5000,
    "é\ud800",
    "blk.0.attn_q.bias",
    "\x1b[2J",
    "__metadata__",
    "../../x",
)
# A block of each GGUF type is one element in so many bytes; of quantised ones 32 or 256 elements.
GGUF_TYPES = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    8: (32, 34),
    12: (256, 144),
    26: (1, 4),
    28: (1, 8),
    30: (1, 2),
    39: (32, 17),
}


@dataclass
class Item:
    """A key of a GGUF header: its type's number and its value in bytes."""

    name: bytes
    kind: int
    value: bytes


@dataclass
class Tensor:
    """A tensor of a GGUF header."""

    name: bytes
    ne: list[int]
    kind: int
    offset: int


@dataclass
class GGUF:
    """A GGUF file before it is written; `lies` overrides what its bytes would say."""

    items: list[Item]
    tensors: list[Tensor]
    data: bytes
    lies: dict[str, int] = field(default_factory=dict)

    def content(self) -> bytes:
        """The bytes of the file."""
        version, alignment = self.lies.get("version", 3), 32
        counts = self.lies.get("tensors", len(self.tensors)), self.lies.get("items", len(self.items))
        out = bytearray(b"GGUF" + struct.pack("<IQQ", version & (2**32 - 1), *counts))
        for item in self.items:
            out += struct.pack("<Q", self.lies.get("name", len(item.name))) + item.name
            out += struct.pack("<I", item.kind & (2**32 - 1)) + item.value
        for tensor in self.tensors:
            out += struct.pack("<Q", len(tensor.name)) + tensor.name
            rank = self.lies.get("rank", len(tensor.ne)) & (2**32 - 1)
            out += struct.pack(f"<I{len(tensor.ne)}Q", rank, *(n & (2**64 - 1) for n in tensor.ne))
            out += struct.pack("<IQ", tensor.kind & (2**32 - 1), tensor.offset & (2**64 - 1))
        return bytes(out + bytes(-len(out) % alignment) + self.data)


def gguf_model(draw: random.Random) -> GGUF:
    """Returns a small valid llama, each matrix in a type of its own."""
    said = {
        "block_count": 2,
        "context_length": 16,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "vocab_size": 8,
    }
    items = [Item(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")]
    items += [Item(f"llama.{key}".encode(), 4, struct.pack("<I", value)) for key, value in said.items()]
    items.append(Item(b"llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)))
    tokens = b"".join(struct.pack("<Q", 1) + bytes([97 + i]) for i in range(8))
    items.append(Item(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 8) + tokens))
    items.append(Item(b"tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 8) + bytes(32)))
    shapes = {"token_embd": (8, 32), "output_norm": (32,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for (name, _), shape in BLOCK.items()}
    tensors, data = [], bytearray()
    for name, shape in shapes.items():
        kind = 0 if len(shape) == 1 else draw.choice((0, 1, 2, 8, 30, 39))
        block, nbytes = GGUF_TYPES[kind]
        size = shape[0] * (shape[-1] if len(shape) == 2 else 1) // block * nbytes
        tensors.append(Tensor(f"{name}.weight".encode(), list(shape[::-1]), kind, len(data)))
        data += draw.randbytes(size).translate(SMALL) + bytes(-size % 32)
    return GGUF(items, tensors, bytes(data))


def other_count(model: GGUF, draw: random.Random) -> None:
    model.lies[draw.choice(("tensors", "items", "name", "rank", "version"))] = draw.choice(COUNTS)


def other_item(model: GGUF, draw: random.Random) -> None:
    if not model.items:
        return
    item = draw.choice(model.items)
    match draw.randrange(5):
        case 0:
            item.kind = draw.choice((*range(14), 2**31))
        case 1:
            item.value = (
                draw.choice(
                    (
                        struct.pack("<IQ", draw.randrange(14), draw.choice(COUNTS)),
                        struct.pack("<Q", draw.choice(COUNTS)),
                        b"",
                        bytes(8),
                        b"\xff" * 8,
                    )
                )
                + item.value
            )
        case 2:
            item.name = draw.choice(NAMES).encode("utf-8", "surrogatepass")
        case 3:
            item.value = item.value[: draw.randrange(len(item.value) + 1)]
        case _:
            model.items.remove(item)


def more_items(model: GGUF, draw: random.Random) -> None:
    deep = b"".join(struct.pack("<IQ", 9, 1) for _ in range(draw.randrange(9))) + struct.pack("<IQ", 0, 1) + b"\x01"
    wide = struct.pack("<IQ", 9, 200) + (struct.pack("<IQ", 0, 1) + b"\x01") * 200
    split = [
        Item(b"split.no", 2, struct.pack("<H", draw.randrange(3))),
        Item(b"split.count", 2, struct.pack("<H", draw.randrange(4))),
        Item(b"split.tensors.count", 5, struct.pack("<i", draw.choice((-1, 0, 20, 2**31 - 1)))),
    ]
    alignment = Item(b"general.alignment", 4, struct.pack("<I", draw.choice((0, 8, 24, 32, 64, 2**20, 2**31))))
    nested = Item(b"general.x", 9, draw.choice((deep, wide)))
    model.items += draw.choice((split, split[: draw.randrange(1, 3)], [alignment], [nested], [deepcopy(alignment)] * 2))


def other_tensor(model: GGUF, draw: random.Random) -> None:
    if not model.tensors:
        return
    tensor = draw.choice(model.tensors)
    match draw.randrange(7):
        case 0:
            tensor.kind = draw.choice((*range(41), 2**31))
        case 1:
            tensor.ne[draw.randrange(len(tensor.ne) or 1) :] = [draw.choice(COUNTS)]
        case 2:
            tensor.ne = [draw.choice((1, 2, 32, 256)) for _ in range(draw.randrange(6))]
        case 3:
            tensor.offset = draw.choice(
                (*COUNTS, tensor.offset + 32, max(0, tensor.offset - 32), draw.choice(model.tensors).offset)
            )
        case 4:
            tensor.name = draw.choice(NAMES).encode("utf-8", "surrogatepass")
        case 5:
            model.tensors.remove(tensor)
        case _:
            model.tensors.insert(draw.randrange(len(model.tensors)), deepcopy(tensor))


def other_data(model: GGUF, draw: random.Random) -> None:
    data = bytearray(model.data)
    for _ in range(draw.randrange(1, 40)):
        data[draw.randrange(len(data))] = draw.choice((0, 0x7C, 0xFC, 0x7F, 0xFF, draw.randrange(256)))
    model.data = bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data))))])


@dataclass
class Folder:
    """A folder of safetensors before it is written: each file's header and data, an index where there are several."""

    files: dict[str, tuple[dict[str, Any], bytes]]
    index: dict[str, Any] | None
    lies: dict[str, int] = field(default_factory=dict)


DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "F8_E4M3": 1}
STRANGE: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**70,
    1.5,
    1e400,
    True,
    "",
    "F32",
    [],
    [1],
    [0, 4],
    {},
    {"a": 1},
    [[1]],
    "\ud800",
)


def folder_model(draw: random.Random) -> Folder:
    """Returns a small valid llama in one file or two."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8, 32), "model.norm.weight": (32,)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(2) for (_, name), shape in BLOCK.items()}
    names = ["model.safetensors"] if draw.random() < 0.5 else ["a.safetensors", "b.safetensors"]
    files: dict[str, tuple[dict[str, Any], bytes]] = {}
    weight_map: dict[str, str] = {}
    for at, file in enumerate(names):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in list(shapes)[at :: len(names)]:
            dtype = draw.choice(list(DTYPES))
            first = end
            end += shapes[name][0] * (shapes[name][-1] if len(shapes[name]) == 2 else 1) * DTYPES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [first, end]}
            weight_map[name] = file
        files[file] = header, draw.randbytes(64).translate(SMALL) * -(-end // 64)
        files[file] = header, files[file][1][:end]
    return Folder(files, None if len(names) == 1 else {"metadata": {}, "weight_map": weight_map})


def other_entry(model: Folder, draw: random.Random) -> None:
    header, _ = model.files[draw.choice(list(model.files))]
    name = draw.choice(list(header) or ["x"])
    match draw.randrange(6):
        case 0:
            header[draw.choice(NAMES)] = header.pop(name, None)
        case 1:
            header[name] = deepcopy(draw.choice(STRANGE))
        case 2 | 3 if isinstance(header.get(name), dict):
            header[name][draw.choice(("dtype", "shape", "data_offsets", "more"))] = deepcopy(draw.choice(STRANGE))
        case 4 if isinstance(header.get(name), dict):
            held = header[name].get(draw.choice(("shape", "data_offsets")))
            if isinstance(held, list) and held:
                held[draw.randrange(len(held))] = draw.choice((*COUNTS, -1, 0.5))
        case _:
            header.pop(name, None)


def other_index(model: Folder, draw: random.Random) -> None:
    names = [*model.files, "c.safetensors", "../a.safetensors", "config.json", "/dev/zero"]
    if model.index is None:
        model.index = {"weight_map": dict.fromkeys(("model.norm.weight", "x"), draw.choice(names))}
        return
    weight_map = model.index.get("weight_map")
    if isinstance(weight_map, dict) and draw.random() < 0.7:
        weight_map[draw.choice([*weight_map, *NAMES])] = draw.choice((*names, *deepcopy(STRANGE)))
    else:
        model.index["weight_map"] = deepcopy(draw.choice(STRANGE))


def other_file(model: Folder, draw: random.Random) -> None:
    name = draw.choice(list(model.files))
    header, data = model.files[name]
    match draw.randrange(4):
        case 0:
            model.files[name] = header, data[: draw.randrange(len(data) + 1)]
        case 1:
            model.files[name] = header, data + bytes(draw.randrange(1, 99))
        case 2:
            model.lies[name] = draw.choice(COUNTS)
        case _:
            model.files[draw.choice(("model.safetensors", "b.safetensors"))] = deepcopy(model.files[name])


def write_gguf(model: GGUF, place: Path, draw: random.Random) -> Path:
    path = place / draw.choice(("a.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf"))
    path.write_bytes(flipped(model.content(), draw))
    return path


def write_folder(model: Folder, place: Path, draw: random.Random) -> Path:
    (place / "config.json").write_text(json.dumps(CONFIG))
    for name, (header, data) in model.files.items():
        text = json.dumps(header).encode()
        length = model.lies.get(name, len(text)) & (2**64 - 1)
        (place / name).write_bytes(flipped(length.to_bytes(8, "little") + text + data, draw))
    if model.index is not None:
        (place / "model.safetensors.index.json").write_bytes(flipped(json.dumps(model.index).encode(), draw))
    return place


def flipped(content: bytes, draw: random.Random) -> bytes:
    """Returns the bytes, now and then with some of the header changed, or cut short."""
    if draw.random() < 0.85 or not content:
        return content
    changed = bytearray(content)
    for _ in range(draw.randrange(1, 6)):
        changed[draw.randrange(min(len(changed), 2000))] = draw.randrange(256)
    return bytes(changed if draw.random() < 0.7 else changed[: draw.randrange(len(changed))])


Kind = tuple[Callable[[random.Random], Any], tuple[Callable[[Any, random.Random], None], ...], Callable[..., Path]]
KINDS: dict[str, Kind] = {
    "gguf": (gguf_model, (other_count, other_item, more_items, other_tensor, other_tensor, other_data), write_gguf),
    "safetensors": (folder_model, (other_entry, other_entry, other_index, other_file), write_folder),
}


def read(path: Path) -> bool:
    """Returns whether the file or folder was read, as `describe` and `load` would; False where it was refused."""
    try:
        source = open_model(path)
        cost.total_parameters(source.spec)
        contents = Contents(source)
        for entry in contents.entries:
            contents.read(entry)
    except InputError:
        return False
    return True


def fuzz(kind: str, count: int, seed: int) -> Counter[str]:
    """Runs `count` cases; raises AssertionError naming the case that broke the rule."""
    make, mutations, write = KINDS[kind]
    outcomes, place = Counter[str](), Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        warm = random.Random(0)
        assert read(write(make(warm), place, _Calm())), "the model that is damaged is not whole"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            draw = random.Random(f"{seed}.{number}")
            model = make(draw)
            for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
                draw.choice(mutations)(model, draw)
            shutil.rmtree(place)
            place.mkdir()
            path = write(model, place, draw)
            case = f"case {number} of seed {seed}, {kind}"
            start = time.process_time()
            try:
                ok = read(path)
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error} escaped from {case}") from error
            spent = time.process_time() - start
            assert spent < SLOWEST, f"{spent:.1f} s for {case}"
            taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            assert taken < LARGEST, f"{taken >> 20} MiB by {case}"
            outcomes["read" if ok else "refused"] += 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return outcomes


class _Calm(random.Random):
    """Draws that leave what is written as it is."""

    def random(self) -> float:
        return 0.0

    def choice(self, seq: Any) -> Any:  # noqa: ANN401  as `random` has it
        return seq[0]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kind", choices=KINDS, default="gguf")
    arguments.add_argument("--count", type=int, default=50_000)
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = arguments.parse_args()
    try:
        print(f"{given.kind}, seed {given.seed}: {dict(fuzz(given.kind, given.count, given.seed))}")
    except AssertionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
