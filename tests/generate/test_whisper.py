"""Speech: a second of synthesised sound gives transformers' spectrogram, and its tokens, from a file to the text."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import asbuilt
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.generate.sampling import Sampling
from asbuilt.media.sound import PREPROCESSOR, LogMel, read_sound

RATE = 16000
SMALL: dict[str, Any] = {"feature_size": 16, "chunk_length": 2, "hop_length": 200, "n_fft": 300}


def sound(seconds: float = 1.0) -> Tensor:
    """A few voices that rise and fall, and some noise."""
    rng = random.Random()
    t = torch.arange(int(seconds * RATE)) / RATE
    voices = [torch.sin(2 * math.pi * rng.uniform(80, 3000) * t + rng.uniform(0, 3) * t**2) for _ in range(4)]
    return 0.2 * torch.stack(voices).sum(0) + 0.01 * torch.randn(len(t))


@pytest.mark.parametrize("settings", [{}, {"feature_size": 128}, SMALL])
@pytest.mark.parametrize("seconds", [0.3, 1.0, 31.0])
def test_the_spectrogram_is_transformers(settings: dict[str, Any], seconds: float, tmp_path: Path) -> None:
    theirs, heard = WhisperFeatureExtractor(**settings), sound(seconds)
    theirs.save_pretrained(tmp_path)
    mels = LogMel.read(tmp_path)
    want = theirs(heard.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    torch.testing.assert_close(mels.of(heard), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mels.filters(), torch.from_numpy(theirs.mel_filters).T.float(), rtol=1e-5, atol=1e-7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random model that hears two seconds."""
    torch.manual_seed(random.randrange(2**31))
    config = WhisperConfig(
        vocab_size=50,
        num_mel_bins=SMALL["feature_size"],
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=2,
        encoder_ffn_dim=40,
        decoder_ffn_dim=30,
        max_source_positions=80,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
        init_std=0.5,
    )
    WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    WhisperFeatureExtractor(**SMALL).save_pretrained(tmp_path)
    return tmp_path


def test_a_second_of_sound_gives_transformers_tokens(folder: Path, tmp_path: Path) -> None:
    theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    heard = torch.stack([sound(), sound()])
    features = WhisperFeatureExtractor(**SMALL)(heard.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    start, new = torch.tensor([[3, 7], [3, 9]]), 12
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new, "pad_token_id": 0}
    want: Any = theirs.generate(features, decoder_input_ids=start, **settings)  # type: ignore[arg-type]
    mels = torch.cat([LogMel.read(folder).of(one) for one in heard])
    have = list(generate(load(folder), start.tolist(), max_new_tokens=new, audio=mels))
    assert torch.tensor(have).T.tolist() == want[:, -new:].tolist()
    # one row, from a file: the same as the first of both
    file = tmp_path / "a.wav"
    soundfile.write(file, torch.stack([heard[0], heard[0]], 1).numpy(), RATE, subtype="FLOAT")
    alone = asbuilt.generate(str(folder), [3, 7], audio=str(file), max_new_tokens=new)
    ends = want[0, -new:].tolist()
    assert alone == (ends[: ends.index(2) + 1] if 2 in ends else ends)


def test_what_cannot_be_heard_is_refused(folder: Path, tmp_path: Path) -> None:
    good, slow, text = tmp_path / "good.wav", tmp_path / "slow.wav", tmp_path / "text.wav"
    soundfile.write(good, sound().numpy(), RATE)
    soundfile.write(slow, sound().numpy(), 8000)
    text.write_text("no sound")
    mels = LogMel.read(folder)
    for file, said in ((slow, "16000 samples a second"), (text, "cannot be read"), (tmp_path / "none.wav", "none.wav")):
        with pytest.raises(InputError, match=said):
            read_sound(file, rate=mels.rate, seconds=mels.seconds)
    with pytest.raises(InputError, match="audio: missing"):
        asbuilt.generate(str(folder), [3], max_new_tokens=2)
    with pytest.raises(InputError, match="wrong size"):
        asbuilt.generate(str(folder), [3], audio=torch.zeros(1, 16, 3), max_new_tokens=2)
    result = CliRunner().invoke(cli, ["generate", str(folder), "--audio", str(good)])
    assert result.exit_code == 2
    assert "tokenizer" in result.output


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feature_size", 0),
        ("hop_length", 0),
        ("n_fft", "400"),
        ("chunk_length", 10**9),
        ("dither", 0.1),
        ("padding_side", "left"),
        ("n_samples", 7),
        ("feature_extractor_type", "ClapFeatureExtractor"),
        ("do_something", True),
    ],
)
def test_a_preprocessor_that_says_otherwise_is_refused(key: str, value: object, tmp_path: Path) -> None:
    WhisperFeatureExtractor(**SMALL).save_pretrained(tmp_path)
    file = tmp_path / PREPROCESSOR
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {key: value}))
    with pytest.raises(InputError, match=key):
        LogMel.read(tmp_path)


TOKENS: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 40, "<|fr|>": 41},
    "task_to_id": {"transcribe": 42, "translate": 43},
    "no_timestamps_token_id": 44,
}


def set_generation(folder: Path, **settings: object) -> None:
    """Writes these settings beside what the folder's generation settings say; None leaves one out."""
    file = folder / "generation_config.json"
    said = (
        json.loads(file.read_text()) | {"_from_model_config": None} | settings
    )  # else transformers reads others alone
    file.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        (TOKENS | {"language": "fr", "task": "translate"}, (3, 41, 43, 44)),
        (TOKENS | {"language": "english"}, (3, 40, 42, 44)),
        (TOKENS | {"language": "<|fr|>", "task": "transcribe"}, (3, 41, 42, 44)),
        (TOKENS | {"language": "French", "forced_decoder_ids": [[1, 40], [2, 43]]}, (3, 41, 42, 44)),
        (TOKENS | {"forced_decoder_ids": [[1, 40], [2, 43]]}, (3, 40, 43, 44)),
        ({"forced_decoder_ids": [[1, 40], [2, 43]]}, (3, 40, 43)),
        ({"no_timestamps_token_id": 44}, (3, 44)),
        ({"no_timestamps_token_id": 44, "forced_decoder_ids": [[1, 44]]}, (3, 44)),
    ],
)
def test_settings_of_a_folder_give_transformers_tokens(
    settings: dict[str, Any], start: tuple[int, ...], folder: Path, tmp_path: Path
) -> None:
    """Language, task, forced and suppressed tokens, of the first token as well."""
    new, heard = 12, sound()
    # nothing ends, and no token says a time, after which transformers would hear the rest of the sound again
    never = {2, *range(44, 50)}
    set_generation(folder, suppress_tokens=[*never])
    plain = _theirs(folder, heard, new, list(start))
    assert len(plain) == new
    set_generation(folder, **settings)
    wanted = _theirs(folder, heard, new)
    assert wanted == plain  # they begin as we say
    suppressed = sorted(never | {plain[3], plain[5]})
    first = [plain[0], 7]
    set_generation(folder, suppress_tokens=suppressed, begin_suppress_tokens=first)
    source = open_model(folder)
    assert source.decoder_start == start
    assert source.suppressed == (tuple(suppressed), tuple(first))
    wanted = _theirs(folder, heard, new)
    file = tmp_path / "a.wav"
    soundfile.write(file, heard.numpy(), RATE, subtype="FLOAT")
    have = asbuilt.generate(str(folder), [*start], audio=str(file), max_new_tokens=new)
    assert have == wanted != plain
    assert have[0] not in first
    assert not {*have} & {*suppressed}
    alone = asbuilt.generate(
        str(folder), [*start], audio=str(file), max_new_tokens=new, sampling=Sampling(suppress=(2, plain[0]))
    )
    assert plain[0] not in alone  # a request's own


def _theirs(folder: Path, heard: Tensor, new: int, start: list[int] | None = None) -> list[int]:
    """Transformers' new tokens, after a start of its own or this one."""
    theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    features = WhisperFeatureExtractor(**SMALL)(heard.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    given = {} if start is None else {"decoder_input_ids": torch.tensor([start])}
    want: Any = theirs.generate(features, do_sample=False, max_new_tokens=new, **given)  # type: ignore[arg-type]
    found = want[0].tolist()
    if start is not None:
        found = found[len(start) :] if found[: len(start)] == start else found
    return found


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (TOKENS | {"language": "klingon"}, "language"),
        (TOKENS | {"language": "en", "task": "sing"}, "task"),
        (TOKENS | {"language": "en", "lang_to_id": {"<|en|>": "40"}}, "lang_to_id"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], key: str, folder: Path) -> None:
    set_generation(folder, **settings)
    with pytest.raises(InputError, match=key):
        _ = open_model(folder).decoder_start


@pytest.mark.parametrize("value", ["2", [2.0], [True]])
@pytest.mark.parametrize("key", ["suppress_tokens", "begin_suppress_tokens"])
def test_suppressed_tokens_are_token_ids(key: str, value: object, folder: Path) -> None:
    set_generation(folder, **{key: value})
    with pytest.raises(InputError, match=key):
        _ = open_model(folder).suppressed
    set_generation(folder, **{key: [-1, 4, 50, 10**9]})
    assert (4,) in open_model(folder).suppressed


def test_a_language_that_nobody_names_is_the_models_to_say(folder: Path) -> None:
    """Its token comes first then, so no token for no times is put before it."""
    set_generation(folder, **TOKENS, forced_decoder_ids=[[1, None], [2, 42]])
    assert open_model(folder).decoder_start == (3,)
    set_generation(folder, forced_decoder_ids=None, language="en", return_timestamps=True)
    assert open_model(folder).decoder_start == (3, 40, 42)
