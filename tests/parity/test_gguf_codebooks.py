"""Files whose weights llama.cpp's own quantiser made in the formats that asbuilt expands, read by both programs."""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from pathlib import Path

import gguf
import numpy as np
import pytest
from ggml import reference
from ggml.compared import difference
from ggml.models import attention, dimensions, gated, weights, width
from ggml.written import N_VOCAB, Written, write

from asbuilt.checkpoint.load import load, stored_bytes, stored_parameters
from asbuilt.dtypes import BLOCKS, GGUF_LOOKED_UP

SEED = int(os.environ.get("GGUF_SEED", "1"))
WIDE = Written(
    architecture="llama",
    keys=dimensions(block_count=2, embedding_length=256, feed_forward_length=512, attention__head_count=4)
    | width(64)
    | {"attention.layer_norm_rms_epsilon": 1e-5, "context_length": 256},
    layers=2,
    outside=weights(token_embd=(N_VOCAB, 256), output_norm=(256,), output=(N_VOCAB, 256)),
    block=weights(attn_norm=(256,), ffn_norm=(256,)) | attention(256, 4, 2, 64) | gated(256, 512),
)

pytestmark = pytest.mark.skipif(
    reference.installed() is None, reason="llama.cpp's wheel xllamacpp is not installed (pip install -e '.[dev]')"
)


def quantised(x: np.ndarray, kind: str) -> np.ndarray:
    """Returns the blocks of llama.cpp's quantiser; the narrowest formats ask for weights of the columns."""
    lib = ctypes.CDLL(import_module("xllamacpp.xllamacpp").__file__)
    number, (size, nbytes) = int(gguf.GGMLQuantizationType[kind]), BLOCKS[kind.lower()]
    lib.ggml_quantize_init(number)
    encode = lib.ggml_quantize_chunk
    encode.restype = ctypes.c_size_t
    encode.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    made = np.empty((len(x), x.shape[1] // size * nbytes), dtype=np.uint8)
    even = np.ones(x.shape[1], dtype=np.float32)
    assert encode(number, x.ctypes.data, made.ctypes.data, 0, len(x), x.shape[1], even.ctypes.data) == made.size
    return made


def packed(path: Path, kind: str, out: Path) -> Path:
    """Returns the file with all matrices but the token table in blocks."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if len(tensor.shape) < 2 or tensor.name == "token_embd.weight":
            writer.add_tensor(tensor.name, data)
        else:
            writer.add_tensor(tensor.name, quantised(data, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("kind", GGUF_LOOKED_UP)
def test_llama_cpp_answers_alike(kind: str, tmp_path: Path) -> None:
    """Its products round activations to 8 bits, which moves log-probabilities of random weights by up to 0.3."""
    path = packed(write(WIDE, tmp_path / "plain.gguf", np.random.default_rng(SEED)), kind, tmp_path / "q.gguf")
    prompts = [np.random.default_rng(SEED).integers(3, N_VOCAB, 12).tolist()]
    answers = reference.ask(path, prompts, 6, N_VOCAB, 256)
    worst, greedy = difference(load(path), answers, 0.4)
    assert greedy
    assert worst <= 0.5
    size, nbytes = BLOCKS[kind.lower()]
    plain = N_VOCAB * 256 + 5 * 256  # the token table and the norms
    assert stored_bytes(path) == 4 * plain + (stored_parameters(path) - plain) // size * nbytes
