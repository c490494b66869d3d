"""`generate --audio` and `--image` with gemma3n: transformers' spectrogram, and its tokens."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from byte_tokenizer import write_tokenizer
from click.testing import CliRunner
from mobilenet import SMALL
from PIL import Image
from torch import Tensor
from transformers import (
    Gemma3nAudioConfig,
    Gemma3nConfig,
    Gemma3nForConditionalGeneration,
    Gemma3nVisionConfig,
)
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor

from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.media.framed import FramedLogMel
from asbuilt.media.sound import PREPROCESSOR, PROCESSOR, spectrogram_of
from asbuilt.nn.audio import Sounds

RATE, NEW, PROMPT = 16000, 6, "as built"
OWN = 6  # tokens of images, and as many of sounds, after the text's
BANDS: dict[str, Any] = {"feature_size": 9}
OTHER: dict[str, Any] = {
    "feature_size": 20,
    "frame_length_ms": 25.0,
    "hop_length_ms": 12.5,
    "min_frequency": 50.0,
    "max_frequency": 7000.0,
    "preemphasis": 0.9,
    "fft_overdrive": False,
    "input_scale_factor": 1.5,
    "mel_floor": 1e-3,
    "per_bin_mean": [0.1 * i for i in range(20)],
    "per_bin_stddev": [1 + 0.1 * i for i in range(20)],
}


def sound(seconds: float = 1.0) -> Tensor:
    """A few voices that rise and fall, and some noise."""
    rng = random.Random()
    t = torch.arange(int(seconds * RATE)) / RATE
    voices = [torch.sin(2 * math.pi * rng.uniform(80, 3000) * t + rng.uniform(0, 3) * t**2) for _ in range(4)]
    return 0.2 * torch.stack(voices).sum(0) + 0.01 * torch.randn(len(t))


def write_settings(folder: Path, settings: dict[str, Any]) -> Gemma3nAudioFeatureExtractor:
    """Writes what transformers writes, and what it needs to read the same again."""
    theirs = Gemma3nAudioFeatureExtractor(**settings)
    theirs.save_pretrained(folder)
    file = folder / PREPROCESSOR
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {key: x for key, x in settings.items() if key.endswith("_ms")}))
    return theirs


@pytest.mark.parametrize("settings", [{}, OTHER, OTHER | {"preemphasis_htk_flavor": False}, {"preemphasis": 0.0}])
@pytest.mark.parametrize("seconds", [0.04, 0.731, 31.0])
def test_the_spectrogram_is_transformers(settings: dict[str, Any], seconds: float, tmp_path: Path) -> None:
    heard = sound(seconds)
    theirs, mels = write_settings(tmp_path, settings), spectrogram_of(tmp_path)
    assert isinstance(mels, FramedLogMel)
    found = theirs([heard.numpy()], sampling_rate=RATE, return_tensors="pt")
    assert found["input_features_mask"].all()
    want, have = found["input_features"][0], mels.of(heard)
    assert have.shape == (1, *want.T.shape)
    torch.testing.assert_close(have[0].T, want, rtol=1e-5, atol=1e-5)


def test_a_short_sound_is_refused(tmp_path: Path) -> None:
    write_settings(tmp_path, {})
    with pytest.raises(InputError, match="audio: shorter than a window"):
        spectrogram_of(tmp_path).of(torch.zeros(384))
    assert spectrogram_of(tmp_path).of(torch.zeros(513)).shape == (1, 128, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random model that sees and hears, with tokens of both after those of its text."""
    torch.manual_seed(random.randrange(2**31))
    n_text, _ = write_tokenizer(tmp_path)
    text: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 30, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "laurel_rank": 4}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 4}
    text |= {"vocab_size": n_text + 2 * OWN, "vocab_size_per_layer_input": n_text, "num_kv_shared_layers": 0}
    text |= {"altup_num_inputs": 2, "initializer_range": 0.3}
    sounds: dict[str, Any] = {"hidden_size": 16, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 2}
    sounds |= {"sscp_conv_channel_size": [6, 4], "input_feat_size": 9, "vocab_size": OWN, "initializer_range": 0.3}
    images = Gemma3nVisionConfig(architecture=SMALL, hidden_size=8, vocab_size=OWN, vocab_offset=n_text)
    config = Gemma3nConfig(
        text_config=text,
        vision_config=images,
        audio_config=Gemma3nAudioConfig(**sounds, vocab_offset=n_text + OWN),
        audio_soft_tokens_per_image=30,
        vision_soft_tokens_per_image=4,
        boi_token_id=3,
        eoi_token_id=n_text,
        image_token_id=n_text + 1,
        boa_token_id=4,
        eoa_token_id=n_text + OWN,
        audio_token_id=n_text + OWN + 1,
    )
    Gemma3nForConditionalGeneration(config).save_pretrained(tmp_path)
    audio = write_settings(tmp_path, BANDS)
    pixels = {"image_processor_type": "SiglipImageProcessorFast", "size": {"height": 32, "width": 32}}
    pixels |= {"do_normalize": False, "resample": 2}
    (tmp_path / PROCESSOR).write_text(json.dumps({"feature_extractor": json.loads(audio.to_json_string())}))
    (tmp_path / PREPROCESSOR).write_text(json.dumps(pixels))
    return tmp_path


def by_them(folder: Path, ids: list[int], **senses: Tensor) -> list[int]:
    """What transformers adds to a prompt with all placeholders."""
    theirs = Gemma3nForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    made: Any = theirs.generate(  # type: ignore[operator]
        input_ids=torch.tensor([ids]),
        **senses,
        do_sample=False,
        eos_token_id=None,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    return made[0, len(ids) :].tolist()


def heard_by_them(sound: Tensor) -> dict[str, Tensor]:
    """The spectrogram and its mask."""
    return dict(Gemma3nAudioFeatureExtractor(**BANDS)([sound.numpy()], sampling_rate=RATE, return_tensors="pt"))


@pytest.mark.parametrize("sense", ["audio", "image"])
def test_a_file_gives_transformers_tokens(sense: str, folder: Path, tmp_path: Path) -> None:
    source = open_model(folder)
    said, tokenizer = json.loads((folder / "config.json").read_text()), source.tokenizer()
    assert tokenizer is not None
    if sense == "audio":
        heard, file = sound(random.uniform(0.5, 1.5)), tmp_path / "a.wav"
        soundfile.write(file, heard.numpy(), RATE, subtype="FLOAT")
        senses, around, n = heard_by_them(heard), ("boa_token_id", "audio_token_id", "eoa_token_id"), 30
    else:
        pixels, file = np.random.default_rng().integers(0, 256, (32, 32, 3), dtype=np.uint8), tmp_path / "a.png"
        Image.fromarray(pixels).save(file)
        senses = {"pixel_values": torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255}
        around, n = ("boi_token_id", "image_token_id", "eoi_token_id"), 4
    begin, place, end = (said[name] for name in around)
    ids, text = tokenizer.encode(PROMPT, wrap=True), tokenizer.encode(PROMPT)
    bare = next(i for i in range(len(ids)) if ids[i : i + len(text)] == text)  # of what stands before the text
    ends = by_them(folder, [*ids[:bare], begin, *[place] * n, end, *ids[bare:]], **senses)
    stop = next((i for i, token in enumerate(ends) if token in source.eos_ids), len(ends))
    result = CliRunner().invoke(
        cli, ["generate", str(folder), PROMPT, f"--{sense}", str(file), "--max-new-tokens", str(NEW), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["text"] == tokenizer.decode(ends[:stop])


def test_sounds_of_several_lengths_take_as_many_tokens(folder: Path) -> None:
    """Two in one text and one in another: each text continues as it does alone, and as transformers has the single."""
    model, mels = load(open_model(folder)), spectrogram_of(folder)
    assert model.spec.heard is not None
    place, n = model.spec.heard.placeholder, model.spec.heard.n_tokens
    heard = [sound(seconds) for seconds in (0.4, 0.9, 0.6)]
    seen = [mels.of(one)[0] for one in heard]
    assert [model.spec.heard.tokens_of(one.shape[1]) for one in seen] == [n] * 3
    prompts = [[3, *[place] * n, 9, *[place] * n], [8, *[place] * n, 10]]
    steps = list(generate(model, prompts, max_new_tokens=NEW, audio=Sounds(tuple(seen))))
    have = [[step[row] for step in steps] for row in (0, 1)]
    for row, own in ((0, seen[:2]), (1, seen[2:])):
        alone = [step[0] for step in generate(model, [prompts[row]], max_new_tokens=NEW, audio=Sounds(tuple(own)))]
        assert alone == have[row]
    assert by_them(folder, prompts[1], **heard_by_them(heard[2])) == have[1]
