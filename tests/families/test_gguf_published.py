"""Headers as llama.cpp's converter writes them of published models, against the catalogue's specs of the same."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.families import gguf_family, gguf_header, gguf_table, read_gguf
from asbuilt.formats.gguf import GGUFFile, GGUFTensor
from asbuilt.spec import stored_weights

UNTIED = ("output.weight",)
QKV_BIASES = tuple(f"blk.0.attn_{part}.bias" for part in "qkv")

NEXT = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_norm", "shared_head_head")


def float32(value: float) -> float:
    """The nearest number that a file can hold."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def keys(
    layers: int,
    context: int,
    d: int,
    ff: int,
    heads: tuple[int, int],
    vocab: int,
    **more: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """The usual keys; `more` has single underscores for dots where two stand."""
    usual = {
        "block_count": layers,
        "context_length": context,
        "embedding_length": d,
        "feed_forward_length": ff,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "vocab_size": vocab,
    }
    return usual | {key.replace("__", "."): float32(x) if isinstance(x, float) else x for key, x in more.items()}


RMS = "attention__layer_norm_rms_epsilon"
NORM = "attention__layer_norm_epsilon"


def rms(eps: float, base: float | None = None, width: int | None = None, turned: int | None = None) -> dict[str, Any]:
    """Epsilon of RMSNorm, base and widths of heads, where they are written."""
    said: dict[str, Any] = {RMS: eps}
    said |= {"rope__freq_base": base} if base else {}
    said |= {"attention__key_length": width, "attention__value_length": width} if width else {}
    return said | ({"rope__dimension_count": turned} if turned else {})


YARN = {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 4096}
# catalogue name -> architecture, keys, the tensors that tell something
PUBLISHED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen2-0.5b": (
        "qwen2",
        keys(24, 32768, 896, 4864, (14, 2), 151936, **rms(1e-6, 1e6)),
        QKV_BIASES,
    ),
    "qwen3-0.6b": ("qwen3", keys(28, 40960, 1024, 3072, (16, 8), 151936, **rms(1e-6, 1e6, 128)), ()),
    "qwen3-30b-a3b": (
        "qwen3moe",
        keys(
            48,
            40960,
            2048,
            6144,
            (32, 4),
            151936,
            **rms(1e-6, 1e6, 128),
            expert_count=128,
            expert_used_count=8,
            expert_feed_forward_length=768,
        ),
        UNTIED,
    ),
    "mixtral-8x7b": (
        "llama",
        keys(
            32,
            32768,
            4096,
            14336,
            (32, 8),
            32000,
            **rms(1e-5, 1e6, turned=128),
            expert_count=8,
            expert_used_count=2,
        ),
        UNTIED,
    ),
    "olmoe-1b-7b": (
        "olmoe",
        keys(16, 4096, 2048, 1024, (16, 16), 50304, **rms(1e-5, 1e4), expert_count=64, expert_used_count=8),
        UNTIED,
    ),
    "olmo-2-7b": ("olmo2", keys(32, 4096, 4096, 11008, (32, 32), 100352, **rms(1e-6, 5e5)), UNTIED),
    "gemma-2b": ("gemma", keys(18, 8192, 2048, 16384, (8, 1), 256000, **rms(1e-6, width=256)), ()),
    "gemma-2-2b": (
        "gemma2",
        keys(
            26,
            8192,
            2304,
            9216,
            (8, 4),
            256000,
            **rms(1e-6, width=256),
            attention__sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        (),
    ),
    "gemma-2-27b": (
        "gemma2",
        keys(
            46,
            8192,
            4608,
            36864,
            (32, 16),
            256000,
            **rms(1e-6, width=128),
            attention__sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        (),
    ),
    "gemma-3-1b": (
        "gemma3",
        keys(26, 32768, 1152, 6912, (4, 1), 262144, **rms(1e-6, 1e6, 256), attention__sliding_window=512),
        (),
    ),
    "gemma-3-4b": (
        "gemma3",
        keys(
            34,
            131072,
            2560,
            10240,
            (8, 4),
            262208,
            **rms(1e-6, 1e6, 256),
            attention__sliding_window=1024,
            rope__scaling__type="linear",
            rope__scaling__factor=8.0,
        ),
        (),
    ),
    "phi-3-mini": (
        "phi3",
        keys(
            32,
            4096,
            3072,
            8192,
            (32, 32),
            32064,
            **rms(1e-5, 1e4, turned=96),
            attention__sliding_window=2047,
            rope__scaling__original_context_length=4096,
        ),
        UNTIED,
    ),
    "phi-2": (
        "phi2",
        keys(32, 2048, 2560, 10240, (32, 32), 51200, **{NORM: 1e-5}, rope__dimension_count=32),
        UNTIED,
    ),
    "command-r-35b": (
        "command-r",
        keys(40, 8192, 8192, 22528, (64, 64), 256000, **{NORM: 1e-5}, rope__freq_base=8e6, logit_scale=0.0625)
        | {"rope.scaling.type": "none"},
        (),
    ),
    "gpt-neox-20b": (
        "gptneox",
        keys(44, 2048, 6144, 24576, (64, 64), 50432, **{NORM: 1e-5}, rope__dimension_count=24)
        | {"use_parallel_residual": True},
        (*UNTIED, "blk.0.attn_qkv.bias"),
    ),
    "falcon-7b": (
        "falcon",
        keys(32, 2048, 4544, 18176, (71, 1), 65024, **{NORM: 1e-5}) | {"tensor_data_layout": "jploski"},
        (),
    ),
    "bloom-560m": ("bloom", keys(24, 2048, 1024, 4096, (16, 16), 250880, **{NORM: 1e-5}), ("blk.0.attn_qkv.bias",)),
    "mpt-7b": (
        "mpt",
        keys(32, 2048, 4096, 16384, (32, 32), 50432, **{NORM: 1e-5}, attention__max_alibi_bias=8.0),
        (),
    ),
    "gpt-oss-20b": (
        "gpt-oss",
        keys(
            24,
            131072,
            2880,
            2880,
            (64, 8),
            201088,
            **rms(1e-5, 150000.0, 64),
            **YARN,
            rope__scaling__factor=32.0,
            attention__sliding_window=128,
            expert_count=32,
            expert_used_count=4,
            expert_feed_forward_length=2880,
        ),
        (*UNTIED, *QKV_BIASES),
    ),
    "deepseek-v2": (
        "deepseek2",
        keys(
            60,
            163840,
            5120,
            12288,
            (128, 1),
            102400,
            **rms(1e-6, 1e4, turned=64),
            **YARN,
            rope__scaling__factor=40.0,
            rope__scaling__yarn_log_multiplier=0.1,
            attention__q_lora_rank=1536,
            attention__kv_lora_rank=512,
            attention__key_length=576,
            attention__value_length=512,
            attention__key_length_mla=192,
            attention__value_length_mla=128,
            leading_dense_block_count=1,
            expert_feed_forward_length=1536,
            expert_count=160,
            expert_used_count=6,
            expert_shared_count=2,
            expert_weights_scale=16.0,
            expert_group_count=8,
            expert_group_used_count=3,
        ),
        UNTIED,
    ),
    "deepseek-v3": (
        "deepseek2",
        keys(
            61,
            163840,
            7168,
            18432,
            (128, 1),
            129280,
            **rms(1e-6, 1e4, turned=64),
            **YARN,
            rope__scaling__factor=40.0,
            rope__scaling__yarn_log_multiplier=0.1,
            attention__q_lora_rank=1536,
            attention__kv_lora_rank=512,
            attention__key_length=576,
            attention__value_length=512,
            attention__key_length_mla=192,
            attention__value_length_mla=128,
            leading_dense_block_count=3,
            expert_feed_forward_length=2048,
            expert_count=256,
            expert_used_count=8,
            expert_shared_count=1,
            expert_weights_scale=2.5,
            expert_weights_norm=True,
            expert_gating_func=2,
            expert_group_count=8,
            expert_group_used_count=4,
        ),
        UNTIED,
    ),
    "glm-4.5-air": (
        "glm4moe",
        keys(
            47,
            131072,
            4096,
            10944,
            (96, 8),
            151552,
            **rms(1e-5, 1e6, 128, 64),
            leading_dense_block_count=1,
            expert_feed_forward_length=1408,
            expert_count=128,
            expert_used_count=8,
            expert_shared_count=1,
            expert_weights_scale=1.0,
            expert_weights_norm=True,
            expert_gating_func=2,
            expert_group_count=1,
            expert_group_used_count=1,
            nextn_predict_layers=1,
        ),
        (*UNTIED, *QKV_BIASES, *(f"blk.46.nextn.{stem}.weight" for stem in NEXT)),
    ),
    "llama-4-scout-text": (
        "llama4",
        keys(
            48,
            10485760,
            5120,
            16384,
            (40, 8),
            202048,
            **rms(1e-5, 5e5, 128, 128),
            expert_feed_forward_length=8192,
            expert_count=16,
            expert_used_count=1,
            interleave_moe_layer_step=1,
        ),
        UNTIED,
    ),
    "deepseek-moe-16b": (
        "deepseek",
        keys(
            28,
            4096,
            2048,
            10944,
            (16, 16),
            102400,
            **rms(1e-6, 1e4, turned=128),
            leading_dense_block_count=1,
            expert_feed_forward_length=1408,
            expert_count=64,
            expert_used_count=6,
            expert_shared_count=2,
            expert_weights_scale=1.0,
        ),
        UNTIED,
    ),
}


def header(name: str, **changes: Any) -> GGUFFile:  # noqa: ANN401
    architecture, said, named = PUBLISHED[name]
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": x for key, x in said.items()}}
    metadata |= {f"{architecture}.{key}": value for key, value in changes.items()}
    tensors = {one: GGUFTensor(name=one, shape=(1,), type="F32", offset=0, nbytes=4) for one in named}
    return GGUFFile(path=Path("x.gguf"), metadata=metadata, tensors=tensors)


def with_divisors(file: GGUFFile, path: Path) -> GGUFFile:
    """The header of Llama 4 Scout with its tensor of divisors: 16 for the pairs of wavelengths beyond 8192, 1 below."""
    wavelengths = [2 * math.pi * 5e5 ** (2 * i / 128) for i in range(64)]
    path.write_bytes(struct.pack("<64f", *(16.0 if length > 8192 else 1.0 for length in wavelengths)))
    freqs = GGUFTensor(name="rope_freqs.weight", shape=(64,), type="F32", offset=0, nbytes=256)
    return replace(file, path=path, tensors=file.tensors | {freqs.name: freqs})


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_header_says_what_the_catalogue_says(name: str, tmp_path: Path) -> None:
    file, known = header(name), find(name)
    if name.startswith("llama-4"):
        file = with_divisors(file, tmp_path / "freqs")
    reading, spec = read_gguf(file, name), known.spec()
    # files of DeepSeek-V3 are written without its prediction layer
    assert reading.spec == (spec.without_extras if name == "deepseek-v3" else spec)
    assert reading.family == known.family
    assert not reading.defaults  # everything is said by the file, or by its architecture


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_key_that_nobody_reads_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"unknown key '[a-z0-9-]+\.odd'"):
        read_gguf(header(name, odd=1), name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_weight_has_a_name_of_its_own(name: str) -> None:
    reading = read_gguf(header(name), name)
    shapes = {path: weight.shape for path, weight, _ in stored_weights(reading.spec)}
    stored: dict[str, tuple[int, ...]] = {}
    for entry in gguf_table(reading.family, reading.spec).entries:
        stored |= dict(zip(entry.names, entry.layout.stored_shapes([shapes[p] for p in entry.paths]), strict=True))
    assert sum(map(math.prod, stored.values())) == sum(map(math.prod, shapes.values()))


# What the converter writes though it is what a missing key means, and what we write that it leaves to that.
UNWRITTEN = {"attention.key_length", "attention.value_length", "rope.scaling.type", "tensor_data_layout"}
MORE = {"rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "expert_gating_func", "expert_weights_scale"}
MORE |= {"expert_weights_norm", "expert_shared_count"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_header_is_written_as_the_converter_writes_it(name: str) -> None:
    architecture, said, _ = PUBLISHED[name]
    known = find(name)
    spec = known.spec().without_extras if name == "deepseek-v3" else known.spec()
    shapes = {path: weight.shape for path, weight, _ in stored_weights(spec)}
    stored = {
        entry.names[0]: entry.layout.stored_shapes([shapes[path] for path in entry.paths])[0]
        for entry in gguf_table(known.family, spec).entries
    }
    written = gguf_header(known.family, spec, {}, stored)
    assert written.architecture.name == architecture
    found = {key.removeprefix(f"{architecture}."): value for key, value in written.metadata.items()}
    assert {key: found[key] for key in said.keys() - UNWRITTEN} == {
        key: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        for key, value in said.items()
        if key not in UNWRITTEN
    }
    assert found.keys() - said.keys() <= MORE
    assert list(written.values) == (["rope_freqs.weight"] if name.startswith("llama-4") else [])
    assert not written.notes


@pytest.mark.parametrize(("name", "field"), [("pythia-70m", "activation"), ("starcoder2-3b", "window")])
def test_what_no_key_says_is_noted(name: str, field: str) -> None:
    known = find(name)
    spec = known.spec()
    shapes = {path: weight.shape for path, weight, _ in stored_weights(spec)}
    stored = {
        entry.names[0]: entry.layout.stored_shapes([shapes[path] for path in entry.paths])[0]
        for entry in gguf_table(known.family, spec).entries
    }
    notes = gguf_header(known.family, spec, {}, stored).notes
    assert [path.rpartition(".")[2] for path in notes] == [field]


def test_heads_of_encoders_are_in_no_file() -> None:
    known = find("bert-base-uncased")
    with pytest.raises(InputError, match="bert files have no name for this weight"):
        gguf_table("bert", known.spec())
    with pytest.raises(InputError, match="family: GGUF files of this family are not read or written"):
        gguf_family("mamba", find("mamba-130m").spec())


def test_a_family_without_files_is_written_as_one_that_says_the_same() -> None:
    spec = find("llama-3-8b").spec()
    assert gguf_family("mistral", spec) == gguf_family("", spec) == "llama"
    # the window is said by phi3 alone of the architectures that have the rest
    assert gguf_family("mistral", find("mistral-7b-v0.1").spec()) == "phi3"
    assert gguf_family("gemma", find("gemma-2b").spec()) == "gemma"
