"""`generate --audio` of a text with a sound in it: transformers' tokens, from a file to the text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from byte_tokenizer import write_tokenizer
from click.testing import CliRunner
from transformers import VoxtralConfig, VoxtralForConditionalGeneration, WhisperFeatureExtractor

import asbuilt
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError

RATE, PLACE, NEW, PROMPT = 16000, 5, 8, "as built"
SMALL: dict[str, Any] = {"feature_size": 16, "chunk_length": 2, "hop_length": 200, "n_fft": 300}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random model that hears two seconds, of 80 vectors and 40 tokens."""
    torch.manual_seed(random.randrange(2**31))
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 30, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
    sounds: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    sounds |= {"num_attention_heads": 3, "num_mel_bins": 16, "max_source_positions": 80}
    n_vocab, _ = write_tokenizer(tmp_path)
    config = VoxtralConfig(
        text_config=text | {"vocab_size": n_vocab, "initializer_range": 0.3},
        audio_config=sounds | {"initializer_range": 0.3},
        audio_token_id=PLACE,
    )
    VoxtralForConditionalGeneration(config).save_pretrained(tmp_path)
    WhisperFeatureExtractor(**SMALL).save_pretrained(tmp_path)
    return tmp_path


def test_a_file_gives_transformers_tokens(folder: Path, tmp_path: Path) -> None:
    heard = 0.2 * torch.randn(RATE)
    file = tmp_path / "a.wav"
    soundfile.write(file, heard.numpy(), RATE, subtype="FLOAT")
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT, wrap=True)
    features = WhisperFeatureExtractor(**SMALL)(heard.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    theirs = VoxtralForConditionalGeneration.from_pretrained(folder).eval()
    whole = torch.tensor([[PLACE] * 40 + ids])
    want: Any = theirs.generate(  # type: ignore[operator]
        input_ids=whole,
        input_features=features,
        do_sample=False,
        eos_token_id=None,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    have = asbuilt.generate(str(folder), [PLACE, *ids], audio=str(file), max_new_tokens=NEW)
    ends, stops = want[0, whole.shape[1] :].tolist(), open_model(folder).eos_ids
    stop = next((i for i, token in enumerate(ends) if token in stops), len(ends))
    assert have == ends[: stop + 1]
    result = CliRunner().invoke(
        cli, ["generate", str(folder), PROMPT, "--audio", str(file), "--max-new-tokens", str(NEW), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["text"] == tokenizer.decode(ends[:stop])


def test_a_text_alone_is_the_text_models(folder: Path) -> None:
    assert len(asbuilt.generate(str(folder), [3, 4], max_new_tokens=2)) >= 1
    with pytest.raises(InputError, match="audio"):
        asbuilt.generate(str(folder), [3], audio=torch.zeros(1, 16, 3), max_new_tokens=2)
