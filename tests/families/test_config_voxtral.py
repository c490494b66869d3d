"""Configs of voxtral: what the text leaves to this family's defaults, the encoder's two spellings, what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.spec import AudioLanguageModel

FRONTIER = Path(__file__).parents[3] / "shared" / "frontier"
TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "vocab_size": 11, "head_dim": 8}
SOUNDS: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
SOUNDS |= {"num_mel_bins": 4, "max_source_positions": 6}
CONFIG: dict[str, Any] = {"model_type": "voxtral", "audio_token_id": 3, "text_config": TEXT, "audio_config": SOUNDS}


def read(config: dict[str, Any]) -> AudioLanguageModel:
    spec = read_config(config, "model").spec
    assert isinstance(spec, AudioLanguageModel)
    return spec


def test_defaults_are_the_mini_models() -> None:
    """The projector is as published: 5120 = 4 x 1280 to the text's width, without biases."""
    spec = read({"model_type": "voxtral", "audio_token_id": 24})
    assert (spec.n_vocab, spec.d_model, spec.n_layers, spec.max_positions) == (131072, 3072, 30, 131072)
    assert (spec.hearing.projector.widths, spec.hearing.projector.stack) == ((5120, 3072, 3072), 4)
    assert spec.hearing.n_tokens == 375


def test_whispers_spelling_of_the_encoder() -> None:
    other = {"hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads"}
    other |= {"num_hidden_layers": "encoder_layers", "intermediate_size": "encoder_ffn_dim"}
    renamed = {other.get(key, key): value for key, value in SOUNDS.items()}
    reading = read_config(CONFIG | {"audio_config": renamed}, "model")
    assert reading.spec == read(CONFIG)
    written = write_config("voxtral", reading.spec, reading.carried, None)
    assert read_config(written, "model").spec == reading.spec


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("audio_config", SOUNDS | {"intermediate_size": 40}, "intermediate_size"),
        ("audio_config", SOUNDS | {"intermediate_size": 64}, "intermediate_size"),
        ("audio_config", SOUNDS | {"head_dim": 4}, "head_dim"),
        ("audio_config", SOUNDS | {"num_key_value_heads": 1}, "num_key_value_heads"),
        ("audio_config", SOUNDS | {"scale_embedding": True}, "scale_embedding"),
        ("audio_config", SOUNDS | {"model_type": "whisper"}, "model_type"),
        ("audio_config", SOUNDS | {"colour": 1}, "colour"),
        ("text_config", TEXT | {"model_type": "mistral"}, "model_type"),
        ("text_config", TEXT | {"sliding_window": 4}, "sliding_window"),
        ("text_config", TEXT | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("text_config", 3, "text_config"),
        ("audio_token_id", 11, "audio_token_id"),
        ("audio_token_id", None, "audio_token_id"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("colour", 1, "colour"),
    ],
)
def test_refused_by_name(key: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read({**CONFIG, key: value})


def test_published_totals() -> None:
    if not FRONTIER.exists():
        pytest.skip(f"no published models at {FRONTIER}")
    rows = [row for row in csv.reader((FRONTIER / "totals.csv").open()) if row[1] == "voxtral"]
    assert rows
    for folder, _, total, active, _ in rows:
        spec = read(json.loads((FRONTIER / folder / "config.json").read_text()))
        assert (cost.total_parameters(spec), cost.active_parameters(spec)) == (int(total), int(active)), folder
