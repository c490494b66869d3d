"""`generate --audio` of a text with a sound as long as it is: transformers' spectrogram, and its tokens."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from byte_tokenizer import write_tokenizer
from click.testing import CliRunner
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

import asbuilt
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.media.framed import FramedLogMel
from asbuilt.media.sound import PREPROCESSOR, PROCESSOR, spectrogram_of
from asbuilt.nn.audio import Sounds

RATE, NEW, PROMPT = 16000, 8, "as built"
PLACE, BEGIN, END = 5, 6, 7
BANDS = {"feature_size": 8, "max_frequency": 7000.0}
OTHER: dict[str, Any] = {
    "feature_size": 20,
    "frame_length_ms": 25.0,
    "hop_length_ms": 12.5,
    "min_frequency": 50.0,
    "preemphasis": 0.9,
    "fft_overdrive": True,
    "input_scale_factor": 1.5,
    "per_bin_mean": [0.1 * i for i in range(20)],
    "per_bin_stddev": [1 + 0.1 * i for i in range(20)],
}


def sound(seconds: float = 1.0) -> Tensor:
    """A few voices that rise and fall, and some noise."""
    rng = random.Random()
    t = torch.arange(int(seconds * RATE)) / RATE
    voices = [torch.sin(2 * math.pi * rng.uniform(80, 3000) * t + rng.uniform(0, 3) * t**2) for _ in range(4)]
    return 0.2 * torch.stack(voices).sum(0) + 0.01 * torch.randn(len(t))


def write_settings(folder: Path, settings: dict[str, Any]) -> Gemma4AudioFeatureExtractor:
    """Writes what transformers writes, and what it needs to read the same again."""
    theirs = Gemma4AudioFeatureExtractor(**settings)
    theirs.save_pretrained(folder)
    file = folder / PREPROCESSOR
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {key: x for key, x in settings.items() if key.endswith("_ms")}))
    return theirs


@pytest.mark.parametrize("settings", [{}, OTHER, OTHER | {"preemphasis_htk_flavor": False}])
@pytest.mark.parametrize("seconds", [0.02, 0.73, 31.0])
def test_the_spectrogram_is_transformers(settings: dict[str, Any], seconds: float, tmp_path: Path) -> None:
    heard = sound(seconds)
    theirs, mels = write_settings(tmp_path, settings), spectrogram_of(tmp_path)
    assert isinstance(mels, FramedLogMel)
    found = theirs([heard.numpy()], sampling_rate=RATE, return_tensors="pt")
    valid = found["input_features_mask"][0]
    want = found["input_features"][0][valid]
    have = mels.of(heard)
    assert have.shape == (1, *want.T.shape)
    torch.testing.assert_close(have[0].T, want, rtol=1e-5, atol=1e-5)
    assert not found["input_features"][0][~valid].any()
    torch.testing.assert_close(mels.filters(), torch.from_numpy(theirs.mel_filters), rtol=1e-9, atol=1e-12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random model that sees and hears, whose placeholders are of its vocabulary."""
    torch.manual_seed(random.randrange(2**31))
    n_vocab, _ = write_tokenizer(tmp_path)
    text: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 30, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "global_head_dim": 16}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 4}
    text |= {"vocab_size": n_vocab, "vocab_size_per_layer_input": n_vocab, "initializer_range": 0.3}
    images: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "head_dim": 8}
    images |= {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 60}
    sounds: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sounds |= {"subsampling_conv_channels": [8, 4], "use_clipped_linears": False, "output_proj_dims": 12}
    config = Gemma4Config(
        text_config=text,
        vision_config=images,
        audio_config=sounds | {"initializer_range": 0.3},
        image_token_id=4,
        audio_token_id=PLACE,
        boa_token_id=BEGIN,
        eoa_token_index=END,
    )
    Gemma4ForConditionalGeneration(config).save_pretrained(tmp_path)
    write_settings(tmp_path, BANDS)
    return tmp_path


def by_them(folder: Path, ids: list[int], heard: Tensor) -> tuple[list[int], list[int]]:
    """The prompt, with as many placeholders as the sound needs in the place of one, and what transformers adds."""
    settings = Gemma4AudioFeatureExtractor(**BANDS)
    found = settings([heard.numpy()], sampling_rate=RATE, return_tensors="pt")
    need = int(found["input_features_mask"][0][::2][::2].sum())
    whole = [one for token in ids for one in ([PLACE] * need if token == PLACE else [token])]
    theirs = Gemma4ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    made: Any = theirs.generate(  # type: ignore[operator]
        input_ids=torch.tensor([whole]),
        input_features=found["input_features"],
        input_features_mask=found["input_features_mask"],
        do_sample=False,
        eos_token_id=None,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    return whole, made[0, len(whole) :].tolist()


def test_a_file_gives_transformers_tokens(folder: Path, tmp_path: Path) -> None:
    heard = sound(random.uniform(0.5, 1.5))
    file = tmp_path / "a.wav"
    soundfile.write(file, heard.numpy(), RATE, subtype="FLOAT")
    source = open_model(folder)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT, wrap=True)
    text = tokenizer.encode(PROMPT)
    bare = next(i for i in range(len(ids)) if ids[i : i + len(text)] == text)  # of what stands before the text
    _, ends = by_them(folder, [*ids[:bare], BEGIN, PLACE, END, *ids[bare:]], heard)
    stop = next((i for i, token in enumerate(ends) if token in source.eos_ids), len(ends))
    result = CliRunner().invoke(
        cli, ["generate", str(folder), PROMPT, "--audio", str(file), "--max-new-tokens", str(NEW), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["text"] == tokenizer.decode(ends[:stop])
    _, ends = by_them(folder, [PLACE, *ids], heard)
    stop = next((i for i, token in enumerate(ends) if token in source.eos_ids), len(ends))
    assert asbuilt.generate(str(folder), [PLACE, *ids], audio=str(file), max_new_tokens=NEW) == ends[: stop + 1]


def test_sounds_of_several_lengths_are_each_texts_own(folder: Path) -> None:
    """Two sounds in one text and one in another: each continues as it does alone, and as transformers has it."""
    model, mels = load(open_model(folder)), spectrogram_of(folder)
    heard = [sound(seconds) for seconds in (0.4, 0.9, 0.4)]
    seen = [mels.of(one)[0] for one in heard]
    assert model.spec.heard is not None
    counts = [model.spec.heard.tokens_of(one.shape[1]) for one in seen]
    prompts = [[3, *[PLACE] * counts[0], 9, *[PLACE] * counts[1]], [8, *[PLACE] * counts[2], 10]]
    steps = list(generate(model, prompts, max_new_tokens=NEW, audio=Sounds(tuple(seen))))
    have = [[step[row] for step in steps] for row in (0, 1)]
    for row, own in ((0, seen[:2]), (1, seen[2:])):
        alone = [step[0] for step in generate(model, [prompts[row]], max_new_tokens=NEW, audio=Sounds(tuple(own)))]
        assert alone == have[row]
    assert by_them(folder, [8, PLACE, 10], heard[2]) == (prompts[1], have[1])


def test_what_cannot_be_heard_is_refused(folder: Path) -> None:
    model = load(open_model(folder))
    with pytest.raises(InputError, match="wrong size"):
        model(torch.tensor([[PLACE]]), audio=torch.zeros(1, 9, 4))
    with pytest.raises(InputError, match="wrong number of sound placeholders"):
        model(torch.tensor([[PLACE]]), audio=Sounds((torch.zeros(8, 4), torch.zeros(8, 9))))
    with pytest.raises(InputError, match="audio: shorter than a window"):
        spectrogram_of(folder).of(torch.zeros(100))
    with pytest.raises(InputError, match="audio: empty"):
        model(torch.tensor([[3]]), audio=Sounds(()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feature_size", 0),
        ("hop_length", 100),
        ("frame_length", 400),
        ("frame_length_ms", 1e-5),
        ("max_frequency", 1e-3),
        ("min_frequency", 9000.0),
        ("dither", 0.1),
        ("mel_floor", 0),
        ("per_bin_mean", [1.0]),
        ("per_bin_stddev", [0.0] * 8),
        ("feature_extractor_type", "ClapFeatureExtractor"),
        ("do_something", True),
    ],
)
def test_settings_that_say_otherwise_are_refused(key: str, value: object, tmp_path: Path) -> None:
    write_settings(tmp_path, BANDS | {"min_frequency": 10.0})
    file = tmp_path / PREPROCESSOR
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {key: value}))
    with pytest.raises(InputError, match="max_frequency" if key == "min_frequency" else key):
        spectrogram_of(tmp_path)


def test_settings_among_those_of_other_inputs(tmp_path: Path) -> None:
    write_settings(tmp_path, BANDS)
    alone = spectrogram_of(tmp_path)
    said = json.loads((tmp_path / PREPROCESSOR).read_text())
    (tmp_path / PREPROCESSOR).unlink()
    (tmp_path / PROCESSOR).write_text(json.dumps({"audio_seq_length": 750, "feature_extractor": said}))
    assert spectrogram_of(tmp_path) == alone
    del said["feature_extractor_type"]
    (tmp_path / PREPROCESSOR).write_text(json.dumps(said))
    (tmp_path / PROCESSOR).unlink()
    with pytest.raises(InputError, match="feature_extractor_type: missing"):
        spectrogram_of(tmp_path)
