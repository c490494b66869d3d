"""Every architecture that is read from GGUF, against llama.cpp: next-token log-probabilities and greedy tokens.

A small file with random weights is written in llama.cpp's conventions (`ggml.models`, `ggml.written`), and both read
it. Draws are the same on every run, unless GGUF_SEED says another: a router whose choice hangs on the last bit would
choose otherwise here than there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import numpy as np
import pytest
import torch
import transformers
from ggml import compared, reference
from ggml.compared import as_there, built, difference, has_gelu
from ggml.models import ENCODER_DECODERS, ENCODERS, MODELS
from ggml.written import N_VOCAB, write

from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.gguf import read_tensor
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.errors import InputError
from asbuilt.families import Reading, gguf_table, read_gguf
from asbuilt.families import gguf as families_gguf
from asbuilt.families.gguf import Architecture
from asbuilt.families.gguf.layouts import PlusOne
from asbuilt.formats.gguf import GGUFFile
from asbuilt.plan.quantised import published
from asbuilt.spec import weights

SEED = int(os.environ.get("GGUF_SEED", "1"))
# float32 sums in another order: 6e-5 is the worst of ten draws of every model. Gelu in half precision: a number on the
# edge of two entries of the table falls to either side, 5e-4 of it apart; 1e-3 is the worst, 5e-3 with our own gelu.
TOLERANCE, GELU_TOLERANCE, PLAIN_GELU = 1e-4, 3e-3, 1e-2
LENGTHS, NEW = (1, 9, 24), 6
DIRECTORY = TemporaryDirectory()

pytestmark = pytest.mark.skipif(
    reference.installed() is None, reason="llama.cpp's wheel xllamacpp is not installed (pip install -e '.[dev]')"
)


@dataclass(frozen=True)
class Case:
    """A file, and what llama.cpp answers of it."""

    path: Path
    answers: list[reference.Answer]


@cache
def case(name: str) -> Case:
    """Returns the file of a model and llama.cpp's answers; once in a process."""
    rng, model = np.random.default_rng(SEED), MODELS[name]
    path = write(model, Path(DIRECTORY.name) / f"{name}.gguf", rng)
    prompts = [rng.integers(3, N_VOCAB, max(length, model.least)).tolist() for length in LENGTHS]
    return Case(path, reference.ask(path, prompts, NEW, N_VOCAB, model.keys["context_length"]))


def tolerance(source: Source) -> float:
    """What a difference may be: more where the activation is looked up in half precision, and in a deep model."""
    return GELU_TOLERANCE if has_gelu(built(source)) else TOLERANCE * max(1.0, source.spec.n_layers / 9)


@pytest.mark.parametrize("name", MODELS)
def test_as_llama_cpp(name: str) -> None:
    found = case(name)
    source = open_model(found.path)
    model, allowed = built(source), tolerance(source)
    plain = PLAIN_GELU if has_gelu(model) else allowed
    without, _ = difference(model, found.answers, allowed)
    worst, greedy = difference(as_there(model), found.answers, 2 * allowed)
    n = sum(len(answer.tokens) for answer in found.answers)
    compared.RESULTS.append(compared.Result(name, n, worst, without, greedy))
    assert worst <= allowed, f"{name}: log-probabilities differ by {worst:.1e}; GGUF_SEED={SEED} draws it again"
    assert greedy, f"{name}: another token is more probable here"
    assert without <= plain


def test_chunks_and_temperatures_of_llama4_lie_beyond_8192_tokens(tmp_path: Path) -> None:
    """Both sizes are llama.cpp's own and in no header; angles of that many tokens are known to 5e-4 in float32."""
    written, rng = MODELS["llama4"], np.random.default_rng(SEED)
    longer = replace(written, keys={**written.keys, "context_length": 8448})
    path = write(longer, tmp_path / "llama4.gguf", rng)
    answers = reference.ask(path, [rng.integers(3, N_VOCAB, 8200).tolist()], 4, N_VOCAB, 8448)
    source = open_model(path)
    worst, greedy = difference(built(source), answers, 3e-3)
    compared.RESULTS.append(compared.Result("llama4, 8,200 tokens", 4, worst, worst, greedy))
    assert worst <= 3e-3
    assert greedy
    without, _ = difference(built(compared.without_temperature(source)), answers, 0.0)
    assert without > 0.03


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", ENCODERS)
def test_states_of_encoders_as_llama_cpp(name: str, pooling: str, tmp_path: Path) -> None:
    rng, written = np.random.default_rng(SEED), ENCODERS[name]
    path = write(written, tmp_path / f"{name}.gguf", rng)
    prompts = [rng.integers(3, N_VOCAB, length).tolist() for length in LENGTHS]
    theirs = reference.vectors(path, prompts, pooling, written.keys["context_length"])
    model = as_there(load(open_model(path), dtype="float32"))
    pooled: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": lambda states: states.mean(0),
        "cls": lambda states: states[0],
        "last": lambda states: states[-1],
    }
    with torch.inference_mode():
        ours = [pooled[pooling](model(torch.tensor([prompt]))[0]).numpy() for prompt in prompts]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    compared.RESULTS.append(compared.Result(f"{name}, {pooling}", len(prompts), worst, worst, True))
    assert worst <= GELU_TOLERANCE


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    """The server that xllamacpp has does not run these; transformers reads their files by the gguf library's names."""
    rng, written = np.random.default_rng(SEED), ENCODER_DECODERS[name]
    path, gated = write(written, tmp_path / "t5.gguf", rng), name.endswith("gated")
    said: dict[str, Any] = {
        "vocab_size": N_VOCAB,
        "d_model": written.keys["embedding_length"],
        "d_kv": written.keys["attention.key_length"],
        "d_ff": written.keys["feed_forward_length"],
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": written.keys["attention.head_count"],
        "relative_attention_num_buckets": 8,
        "layer_norm_epsilon": 1e-5,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not gated,
    }
    config = transformers.T5Config(**said)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path, gguf_file=path.name, config=config
    ).eval()
    model = load(open_model(path), dtype="float32")
    source, target = (torch.tensor([rng.integers(3, N_VOCAB, length).tolist()]) for length in (24, 9))
    with torch.inference_mode():
        expected = theirs(input_ids=source, decoder_input_ids=target).logits
        worst = float(((model(target, source_BS=source) - expected) / expected.abs().max()).abs().max())
    compared.RESULTS.append(compared.Result(f"{name} (transformers)", target.numel(), worst, worst, True))
    assert worst <= harness.TOLERANCE  # of the largest logit


# Numbers that say how, not how many: each is read otherwise on our side, which must be noticed.
CHANGED: dict[str, Callable[[Any], Any]] = {
    "freq_base": lambda x: 2 * x,
    "layer_norm_rms_epsilon": lambda x: 1e3 * x,
    "layer_norm_epsilon": lambda x: 1e3 * x,
    "sliding_window": lambda x: x + 1,
    "softcapping": lambda x: 1.1 * x,
    "_scale": lambda x: 1.1 * x,
    "attention.scale": lambda x: 1.1 * x,
    "scaling.factor": lambda x: 1.5 * x,
    "original_context_length": lambda x: 128 if x < 64 else 4,
    "yarn_log_multiplier": lambda x: 1.5 * x,
    "expert_used_count": lambda x: x + 1,
    "expert_group_used_count": lambda x: x + 1,
    "expert_weights_norm": lambda x: not x,
    "use_parallel_residual": lambda x: not x,
    "rope.dimension_count": lambda x: x - 2,
}
UNHEEDED = {("phi3, window", "attention.sliding_window")}  # by llama.cpp
NUMBERS = [
    (name, key)
    for name, model in MODELS.items()
    for key in model.keys
    if any(key.endswith(ending) for ending in CHANGED)
    # a size of tensors in these
    if (name, key) not in UNHEEDED
    if not (key == "rope.dimension_count" and (model.architecture == "deepseek2" or name.startswith("phi3, ")))
]


def read_or_refused(file: GGUFFile) -> Reading | InputError:
    try:
        return read_gguf(file, "x")
    except InputError as error:
        return error


@pytest.mark.parametrize(("name", "key"), NUMBERS)
def test_every_number_of_the_header_is_heeded(name: str, key: str) -> None:
    found, source = case(name), open_model(case(name).path)
    assert source.gguf is not None
    whole = f"{MODELS[name].architecture}.{key}"
    change = next(change for ending, change in CHANGED.items() if key.endswith(ending))
    metadata = source.gguf.metadata | {whole: change(source.gguf.metadata[whole])}
    reading = read_or_refused(replace(source.gguf, metadata=metadata))
    if isinstance(reading, InputError):  # the family has it one way only
        assert whole in str(reading)
        return
    worst, _ = difference(as_there(built(replace(source, reading=reading))), found.answers, 0.0)
    assert worst > 3 * tolerance(source), f"{key} of {name}: {worst:.1e}"


def turned_otherwise(architecture: Architecture) -> Architecture:
    return replace(architecture, adjacent=not architecture.adjacent)


def gains_otherwise(architecture: Architecture) -> Architecture:
    return replace(architecture, plus_one=not architecture.plus_one)


def joined_otherwise(architecture: Architecture) -> Architecture:
    swapped = tuple(replace(join, parts=join.parts[::-1]) for join in architecture.joined)
    return replace(architecture, joined=swapped)


ADJACENT = ("llama", "llama, experts", "granite", "deepseek", "smollm3", "olmo")
MUTATIONS = [
    *((name, turned_otherwise) for name in (*ADJACENT, "qwen3", "gpt-oss", "gemma3", "glm4moe", "starcoder2")),
    *((name, gains_otherwise) for name in ("gemma", "gemma2", "gemma3", "llama", "olmo2")),
    *((name, joined_otherwise) for name in ("phi3", "gptneox", "bloom", "mpt", "gpt2")),
]


@pytest.mark.parametrize(("name", "change"), MUTATIONS)
def test_a_layout_taken_for_another_is_noticed(
    name: str, change: Callable[[Architecture], Architecture], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, right = case(name), open_model(case(name).path)
    changed = tuple(change(one) if one.family == right.family else one for one in families_gguf.ARCHITECTURES)
    monkeypatch.setattr(families_gguf, "ARCHITECTURES", changed)
    worst, _ = difference(as_there(built(open_model(found.path))), found.answers, 0.0)
    assert worst > 30 * tolerance(right), f"{worst:.1e}"


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_takes_the_bytes_that_the_file_has(name: str) -> None:
    source = open_model(case(name).path)
    precision = published(source.reading, source.gguf)
    assert source.gguf is not None
    assert precision is not None
    path, weight, owner = next(weights(source.spec))
    assert precision.held(path, weight, owner) == source.gguf.tensors["token_embd.weight"].nbytes


@pytest.mark.parametrize("name", MODELS)
def test_converted_to_a_folder_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    source, tokens = open_model(case(name).path), torch.randint(3, N_VOCAB, (2, 20))
    convert(source, tmp_path / "folder")
    folder = open_model(tmp_path / "folder")
    assert folder.family == source.family
    assert replace(folder.spec, name="") == replace(source.spec, name="")
    with torch.inference_mode():
        ours, again = (load(one, dtype="float32")(tokens) for one in (source, folder))
    assert torch.equal(ours, again)


@pytest.mark.parametrize("name", MODELS)
def test_layouts_know_their_inverse(name: str) -> None:
    source = open_model(case(name).path)
    file = source.gguf
    assert isinstance(file, GGUFFile)
    table = gguf_table(source.family, source.spec, file.tensors)
    for entry in table.entries:
        stored = [read_tensor(file, one) for one in entry.names]
        again = entry.layout.save(entry.layout.load(stored))
        rounding = 1e-6 if entry.layout == PlusOne() else 0.0  # 1 is taken away and added again
        for one, other in zip(stored, again, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=rounding)
