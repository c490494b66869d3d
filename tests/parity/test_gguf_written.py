"""GGUF files that asbuilt writes, read by llama.cpp: of every architecture, from folders, and in every format.

A model's file is written in llama.cpp's conventions by no code of ours (`ggml.written`), read by ours, saved as a
folder, and written from that; what llama.cpp then answers has to be what it answers of the first.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
import torch
from ggml import reference
from ggml.compared import as_there, built, difference, has_gelu
from ggml.models import ENCODER_DECODERS, ENCODERS, MODELS, attention, dimensions, gated, weights, width
from ggml.written import N_VOCAB, Written, write

from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.gguf import read_tensor
from asbuilt.checkpoint.gguf_write import write_gguf
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.checkpoint.wanted import ENCODABLE, Formats
from asbuilt.formats.gguf import read_header

SEED = int(os.environ.get("GGUF_SEED", "1"))
TOLERANCE, GELU_TOLERANCE = 1e-4, 3e-3
DIRECTORY = TemporaryDirectory()
ALL = MODELS | ENCODERS | ENCODER_DECODERS

pytestmark = pytest.mark.skipif(
    reference.installed() is None, reason="llama.cpp's wheel xllamacpp is not installed (pip install -e '.[dev]')"
)


@cache
def given(name: str) -> Path:
    """Returns the file of a model, written once in a process."""
    return write(ALL[name], Path(DIRECTORY.name) / f"{name}.gguf", np.random.default_rng(SEED))


@pytest.mark.parametrize("name", ALL)
def test_what_was_read_is_written_again(name: str, tmp_path: Path) -> None:
    """Keys and tensors, bit by bit; maps of latent attention that an older file joins are written apart."""
    (path,) = convert(given(name), tmp_path / "again.gguf")
    before, after = read_header(given(name)), read_header(path)
    older = {tensor for tensor in before.tensors if tensor.endswith("attn_kv_b.weight")}
    newer = {tensor for tensor in after.tensors if tensor.endswith(("attn_k_b.weight", "attn_v_b.weight")) and older}
    assert before.tensors.keys() - older == after.tensors.keys() - newer
    for tensor in before.tensors.keys() - older:
        assert before.tensors[tensor].type == after.tensors[tensor].type
        assert torch.equal(read_tensor(before, tensor), read_tensor(after, tensor)), tensor
    changed = {key: said for key, said in before.metadata.items() if after.metadata[key] != said}
    if not older and name != "gpt-oss":  # whose feed-forward parts are all experts: their width is said twice
        assert changed == {}
    first, second = open_model(given(name)).spec, open_model(path).spec
    assert replace(second, name=first.name) == first


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_answers_alike(name: str, tmp_path: Path) -> None:
    convert(given(name), tmp_path / "folder")
    (path,) = convert(tmp_path / "folder", tmp_path / "written.gguf")
    model, rng = MODELS[name], np.random.default_rng(SEED)
    prompts = [rng.integers(3, N_VOCAB, max(12, model.least)).tolist()]
    answers = reference.ask(path, prompts, 6, N_VOCAB, model.keys["context_length"])
    theirs = reference.ask(given(name), prompts, 6, N_VOCAB, model.keys["context_length"])
    source = open_model(path)
    allowed = GELU_TOLERANCE if has_gelu(built(source)) else TOLERANCE * max(1.0, source.spec.n_layers / 9)
    for ours, their in zip(answers, theirs, strict=True):
        assert ours.tokens == their.tokens
        assert float(np.abs(ours.logprobs - their.logprobs).max()) <= allowed
    worst, greedy = difference(as_there(built(source)), answers, 2 * allowed)
    assert greedy
    assert worst <= allowed


@pytest.mark.parametrize("name", [*ENCODERS, *ENCODER_DECODERS])
def test_encoders_are_written_too(name: str, tmp_path: Path) -> None:
    convert(given(name), tmp_path / "folder")
    (path,) = convert(tmp_path / "folder", tmp_path / "written.gguf")
    theirs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(given(name)).tensors}
    ours = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)


WIDE = Written(
    architecture="llama",
    keys=dimensions(block_count=2, embedding_length=256, feed_forward_length=512, attention__head_count=4)
    | width(64)
    | {"attention.layer_norm_rms_epsilon": 1e-5, "context_length": 256},
    layers=2,
    outside=weights(token_embd=(N_VOCAB, 256), output_norm=(256,), output=(N_VOCAB, 256)),
    block=weights(attn_norm=(256,), ffn_norm=(256,)) | attention(256, 4, 2, 64) | gated(256, 512),
)


@pytest.mark.parametrize("format", ["f16", "bf16", *ENCODABLE])
def test_llama_cpp_computes_with_our_blocks(format: str, tmp_path: Path) -> None:
    """Its products round activations to 8 bits, which moves log-probabilities of random weights by 0.2 to 0.3.

    Codes or scales in another order would make it nats.
    """
    path = write(WIDE, tmp_path / "wide.gguf", np.random.default_rng(SEED))
    write_gguf(path, tmp_path / "q.gguf", Formats(common=format))
    rng = np.random.default_rng(SEED)
    answers = reference.ask(tmp_path / "q.gguf", [rng.integers(3, N_VOCAB, 12).tolist()], 6, N_VOCAB, 256)
    worst, greedy = difference(load(tmp_path / "q.gguf", dtype="float32"), answers, 0.4)
    assert greedy
    assert worst <= 0.5
