"""Models that a command opens: keys that are passed over in any of several, warnings and notes on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import asbuilt.checkpoint.source as module
from asbuilt.checkpoint import hub
from asbuilt.cli.opening import opened, opened_all
from asbuilt.errors import InputError
from asbuilt.shown import defaults_line

Run = Callable[..., Result]
SMALL: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 3,
    "vocab_size": 50,
    "n_positions": 16,
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Writes a config with more keys; returns its path."""

    def write(name: str, **more: object) -> str:
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(SMALL | more))
        return str(path)

    return write


def warning(*keys: str) -> str:
    return f"warning: ignored unread keys: {', '.join(keys)}; their effect on the model is not taken into account\n"


def test_several_models_need_not_all_have_a_key(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each key where it is needed, several in one model too; all are told of once."""
    models = [config("a", x=1, y=2), config("b"), config("c", y=3, z=4)]
    found = opened_all(models, ["z", "y", "x"])
    assert len({source.spec.blocks for source in found}) == 1
    assert capsys.readouterr().err == warning("z", "y", "x")
    with pytest.raises(InputError, match=r"allow-unread: none of the configs has such an unknown key \(got 'w'\)"):
        opened_all(models, ["x", "w", "y", "z"])
    with pytest.raises(InputError, match="z"):
        opened_all(models, ["x", "y"])
    with pytest.raises(InputError, match="y"):
        opened_all(models, [])
    assert opened_all(models[1:2], [])[0].name
    assert capsys.readouterr().err == ""


def test_one_model_has_every_key(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    opened(config("a", x=1, y=2), ["x", "y"])
    assert capsys.readouterr().err == warning("x", "y")
    with pytest.raises(InputError, match="no such key in the config"):
        opened(config("b", x=1), ["x", "y"])
    opened("gpt2", [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (("describe",), False),
        (("plan", "serve", "--gpu", "t4"), False),
        (("plan", "train", "--gpu", "t4"), False),
        (("generate", "--stop", "x", "-"), True),
        (("embed",), True),
        (("convert",), True),
        (("measure",), True),
        (("diff",), True),
    ],
    ids=lambda words: str(words),
)
def test_a_hub_s_weights_are_fetched_where_they_are_needed(
    run: Run, words: tuple[str, ...], weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def fetch(name: str, *, weights: bool) -> Path:
        asked.append((name, weights))
        raise InputError("nothing is fetched here")

    monkeypatch.setattr(hub, "fetch", fetch)
    more = ("x",) if words[0] in ("embed", "convert") else ("of/another",) if words[0] == "diff" else ()
    named = 2 if words[0] == "plan" else 1
    assert run(*words[:named], "of/one", *more, *words[named:], input="x").exit_code == 2
    assert asked == [("of/one", weights)]


def test_notes_of_a_config_are_told(run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does not read and other programs do, by model and key."""
    path = config("noted")
    source = module.open_model(path)
    noted = replace(source, reading=replace(source.reading, notes={"k": "read by others", "l": "not at all"}))
    monkeypatch.setattr(module, "open_model", lambda *_, **__: noted)
    name = source.name
    expected = f"note: {name}: k: read by others\nnote: {name}: l: not at all\n"
    for words in (("describe", path), ("plan", "serve", path, "--gpu", "t4"), ("plan", "train", path, "--gpu", "t4")):
        result = run(*words, "--json")
        assert (result.exit_code, result.stderr) == (0, expected)


def test_sizes_that_no_config_says() -> None:
    said = "Not in config.json, taken from the class's defaults: head_dim 64, tie_word_embeddings false"
    assert defaults_line({"head_dim": 64, "tie_word_embeddings": False}) == said


def test_such_sizes_are_printed_once_for_each_model(run: Run, tmp_path: Path) -> None:
    """A config of a family whose class has defaults that matter: all of gpt2's sizes."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2"}))
    document = json.loads(run("describe", path, "--json").stdout)
    line = defaults_line(document["defaults"])
    assert "n_embd 768" in line
    described = run("describe", path).stdout
    assert described.splitlines()[1] == line
    for words, lines in (
        (("plan", "train", path), [line]),
        (("plan", "serve", path), [f"{document['name']}: {line}"]),
        (("plan", "serve", path, "gpt2"), [f"{document['name']}: {line}"]),
    ):
        result = run(*words, "--gpu", "h100-sxm")
        assert [text for text in result.stdout.splitlines() if "Not in config.json" in text] == lines
        assert result.stdout.splitlines()[0] == lines[0]
    for words in (("plan", "train", path), ("plan", "serve", path)):
        document = json.loads(run(*words, "--gpu", "h100-sxm", "--json").stdout)
        assert document["defaults"]["n_embd"] == 768
    assert "Not in config.json" not in run("plan", "train", "gpt2", "--gpu", "h100-sxm").stdout
