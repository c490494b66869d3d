"""`asbuilt embed`: likeness of known vectors, in the table and in the document, and what is handed on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import Result

import asbuilt.generate.embed

Run = Callable[..., Result]
WORDS = ("a" * 45, "dog", "-")
MODEL = ("embed", "bert-base-uncased", *WORDS)
# Of length one: products are cosines.
VECTORS = [[0.6, 0.8], [1.0, 0.0], [-0.8, 0.6]]
LIKENESS = [[1.0, 0.6, 0.0], [0.6, 1.0, -0.8], [0.0, -0.8, 1.0]]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """No model is run: what it is asked with, and vectors that are known."""
    found: list[dict[str, Any]] = []

    def embed(source: Any, sentences: tuple[str, ...], **more: Any) -> torch.Tensor:  # noqa: ANN401
        found.append({"sentences": sentences, "name": source.name, **more})
        return torch.tensor(VECTORS, dtype=torch.float64)

    monkeypatch.setattr(asbuilt.generate.embed, "embed", embed)
    return found


@pytest.mark.parametrize("vectors", [False, True])
def test_the_document(run: Run, vectors: bool) -> None:
    said = json.loads(run(*MODEL, "--json", *(["--vectors"] if vectors else [])).stdout)
    likeness = said.pop("similarities")
    assert [[round(x, 9) for x in row] for row in likeness] == LIKENESS
    assert said == {
        "model": "bert-base-uncased",
        "dimensions": 2,
        "pooling": "mean",
        "normalised": True,
        "prompt": "",
        "sentences": list(WORDS),
        **({"vectors": VECTORS} if vectors else {}),
    }


def test_the_table(run: Run) -> None:
    """Sentences by number, to 40 characters."""
    result = run(*MODEL)
    assert result.exit_code == 0, result.output
    _, title, header, *lines = result.stdout.splitlines()
    assert (title, header.split()) == ("Similarity", ["1", "2", "3", "sentence"])
    assert [line.split() for line in lines] == [
        ["1", "1.000", "0.600", "0.000", "a" * 40],
        ["2", "0.600", "1.000", "-0.800", "dog"],
        ["3", "0.000", "-0.800", "1.000", "-"],
    ]


def test_a_prompt_is_handed_on(run: Run, asked: list[dict[str, Any]]) -> None:
    for prompt in ("query: ", ""):
        assert json.loads(run(*MODEL, "--json", "--prompt", prompt).stdout)["prompt"] == prompt
    assert [one["prompt"] for one in asked] == ["query: ", ""]
    assert [one["prompt_name"] for one in asked] == [None, None]
    assert asked[0]["sentences"] == WORDS
    assert run(*MODEL).exit_code == 0
    assert (asked[-1]["prompt"], asked[-1]["prompt_name"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompt", "a", "--prompt-name", "b"), "--prompt or --prompt-name, not both"),
        (("--vectors",), "--vectors needs --json"),
    ],
)
def test_words_that_do_not_go_together(run: Run, words: tuple[str, ...], said: str) -> None:
    refused = run(*MODEL, *words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert said in refused.stderr
