"""Speech models that hear the language, and say times: the same tokens as transformers' rules give."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import soundfile
import test_whisper as speech
import torch
from byte_tokenizer import write_tokenizer
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import asbuilt
from asbuilt.api.generate import begin
from asbuilt.api.running import Running
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.generate.draft import Chooser
from asbuilt.generate.sampling import Sampler, Sampling, Times, timed
from asbuilt.generate.text import Completion
from asbuilt.text.spoken import Segments

END, START, EN, FR, TRANSCRIBE, TRANSLATE, NO_TIMES, VOCAB = 256, 257, 258, 259, 260, 261, 262, 320
SPOKEN: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": EN, "<|fr|>": FR},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": NO_TIMES,
    "max_initial_timestamp_index": 20,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random model of two seconds of sound, with bytes for a vocabulary."""
    torch.manual_seed(random.randrange(2**31))
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=speech.SMALL["feature_size"],
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=2,
        encoder_ffn_dim=40,
        decoder_ffn_dim=30,
        max_source_positions=80,
        max_target_positions=60,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        begin_suppress_tokens=None,
        init_std=0.5,
    )
    WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    WhisperFeatureExtractor(**speech.SMALL).save_pretrained(tmp_path)
    assert write_tokenizer(tmp_path) == (257, END)
    soundfile.write(tmp_path / "a.wav", speech.sound().numpy(), speech.RATE, subtype="FLOAT")
    return tmp_path


def features(folder: Path) -> Tensor:
    heard, _ = soundfile.read(folder / "a.wav", dtype="float32")
    own = WhisperFeatureExtractor(**speech.SMALL)
    return own(heard, sampling_rate=speech.RATE, return_tensors="pt").input_features


def written(folder: Path, new: int, **more: Any) -> Completion:  # noqa: ANN401
    options = {"max_new_tokens": new, "audio": str(folder / "a.wav"), "prefill_chunk": None}
    completion, _ = begin(open_model(folder, weights=True), "", Running(), options, **more)
    for _ in completion:
        pass
    return completion


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"task": "translate"},
        {"forced_decoder_ids": [[1, None], [2, TRANSLATE]]},
        {"forced_decoder_ids": [[1, None], [2, TRANSLATE]], "task": "transcribe"},
    ],
)
def test_the_language_that_is_heard(settings: dict[str, Any], folder: Path) -> None:
    """Its token, and all that follow, are transformers'."""
    # nothing ends, and no token says a time, after which transformers would hear the rest of the sound again
    speech.set_generation(folder, **SPOKEN, suppress_tokens=[END, *range(NO_TIMES, VOCAB)], **settings)
    theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    language = int(theirs.detect_language(features(folder))[0])
    want: Any = theirs.generate(features(folder), do_sample=False, max_new_tokens=12)
    completion = written(folder, 12)
    assert language in (EN, FR)
    assert completion.prompt[:2] == [START, language]
    assert completion.prompt[-1] == NO_TIMES
    assert completion.tokens == want[0].tolist()[-12:]
    task = TRANSLATE if settings.get("task", "translate") == "translate" else TRANSCRIBE
    assert completion.prompt[2:-1] == ([task] if settings else [])


def test_a_language_that_is_set_is_not_heard(folder: Path) -> None:
    speech.set_generation(folder, **SPOKEN, language="fr")
    assert open_model(folder).languages == ()
    assert written(folder, 2).prompt == [START, FR, TRANSCRIBE, NO_TIMES]


@pytest.mark.parametrize("by_settings", [False, True])
@torch.no_grad()
def test_times_are_transformers(by_settings: bool, folder: Path) -> None:
    more = {"return_timestamps": True} if by_settings else {}
    speech.set_generation(folder, **SPOKEN, language="en", suppress_tokens=[65, 66], **more)
    theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    ids, mels = [START, EN, TRANSCRIBE], features(folder)
    config = GenerationConfig.from_pretrained(folder)
    rules: Any = WhisperTimeStampLogitsProcessor(config, begin_index=len(ids))
    count = 0
    while count < 30 and ids[-1] != END:
        scores = theirs(mels, decoder_input_ids=torch.tensor([ids])).logits[:, -1]
        scores[:, [65, 66]] = -torch.inf
        ids.append(int(rules(torch.tensor([ids]), scores).argmax()))
        count += 1
    completion = written(folder, 30, timestamps=None if by_settings else True)
    assert completion.prompt == [START, EN, TRANSCRIBE]
    assert completion.tokens == ids[3:]
    assert any(token > NO_TIMES for token in completion.tokens)
    assert completion.segments is not None
    assert completion.text.count("\n") == len(completion.segments.found)
    plain = written(folder, 30, timestamps=False)
    assert (plain.prompt[-1], plain.segments) == (NO_TIMES, None)


@given(
    text=st.lists(st.integers(0, 39), max_size=6),
    latest=st.none() | st.integers(0, 12),
    seed=st.integers(0, 2**31),
    sharp=st.sampled_from((0.1, 1.0, 5.0)),
)
def test_the_rules_are_transformers(text: list[int], latest: int | None, seed: int, sharp: float) -> None:
    """Of any text: which of 40 tokens are left, of which 15 are times, by the processor of the same purpose."""
    logits = sharp * torch.randn(1, 40, generator=torch.Generator().manual_seed(seed))
    config = GenerationConfig(eos_token_id=20, no_timestamps_token_id=24, max_initial_timestamp_index=latest)
    begun = [21, 22]
    processor: Any = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    want = processor(torch.tensor([begun + text]), logits)
    times = Times(begin=25, end=20, latest=latest)
    have = timed(logits, times, [text])
    assert torch.equal(have.isneginf(), want.isneginf())
    left = ~want.isneginf()
    assert torch.equal(have[left], want[left])


def test_rows_and_drafts_keep_their_own_texts() -> None:
    """A sampler's rows, and what verifies drafts, drop what their own texts rule out."""
    times = Times(begin=5, end=3)
    rows = Sampler([Sampling(times=times), Sampling()], [[1], [1]], 9)
    logits = torch.tensor([[0.0, 9, 0, 0, 0, 1, 2, 3, 2]] * 2)
    assert rows(logits).tolist() == [7, 1]
    assert rows(logits).tolist() == [1, 1]
    rows.keep([1, 0])
    late = torch.tensor([[0.0, 0, 0, 0, 0, 9, 8, 7, 6]] * 2)
    assert rows(late).tolist() == [5, 8]
    assert rows(torch.tensor([[0.0, 9, 9, 1, 0, 0, 0, 0, 0]] * 2)).tolist() == [1, 3]
    chooser = Chooser(Sampling(times=times), begun=2)
    assert int(chooser.probabilities(logits[0], [1, 1]).argmax()) == 7
    assert int(chooser.probabilities(logits[0], [1, 1, 7]).argmax()) == 1


def test_segments() -> None:
    """One after the other, with a time between, or two; the last may be open."""
    segments = Segments(Times(begin=100, end=99).seconds, lambda ids: " ".join(map(str, ids)))
    lines = [segments.push(token) for token in (100, 1, 2, 110, 115, 3, 150, 150, 4)]
    assert "".join(lines) == "[0.00 - 0.20] 1 2\n[0.30 - 1.00] 3\n"
    assert segments.finish() == "[1.00 - ] 4\n"
    assert segments.found == [(0.0, 0.2, "1 2"), (0.3, 1.0, "3"), (1.0, None, "4")]
    assert segments.finish() == ""


def test_on_the_command_line(folder: Path) -> None:
    speech.set_generation(folder, **SPOKEN)
    given = ["generate", str(folder), "--audio", str(folder / "a.wav"), "--timestamps", "--max-new-tokens", "9"]
    found = json.loads(CliRunner().invoke(cli, [*given, "--json"]).stdout)
    lines = [f"[{one['start']:.2f} - " for one in found["segments"]]
    printed = CliRunner().invoke(cli, given).stdout
    assert lines
    assert [line in printed for line in lines] == [True] * len(lines)
    assert found["text"] == asbuilt.generate(
        str(folder), "", audio=str(folder / "a.wav"), timestamps=True, max_new_tokens=9
    )


def test_what_has_no_times_is_refused(folder: Path) -> None:
    file = str(folder / "a.wav")
    speech.set_generation(folder, **SPOKEN, language="en")
    with pytest.raises(InputError, match="transcription"):
        begin(
            open_model(folder, weights=True),
            [START],
            Running(),
            {"audio": file, "prefill_chunk": None},
            timestamps=True,
        )
    speech.set_generation(folder, no_timestamps_token_id=None)
    with pytest.raises(InputError, match="no_timestamps_token_id"):
        asbuilt.generate(str(folder), "", audio=file, timestamps=True)
    speech.set_generation(folder, lang_to_id={"<|en|>": -1}, language=None)
    with pytest.raises(InputError, match="lang_to_id"):
        asbuilt.generate(str(folder), "", audio=file)
