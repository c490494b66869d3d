"""Text from strangers on a terminal: written out, never obeyed, no line of it taken for ours, in every command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
from click.testing import Result
from terminal import STYLE, OnTerminal, command_on_terminal, obeyed

from asbuilt import spec as asbuilt_spec
from asbuilt.families import llama
from asbuilt.spec import Rotary

Run = Callable[..., Result]
# A title, a cleared screen, a forged line, markup and pictures of rich, turned text, a C1 sequence.
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\nError: forged [red]b[/red] [link=http://x]c[/link] :smile:\u202ed\x9b2J\r\t"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\nError: forged [red]b[/red] [link=http://x]c[/link] :smile:\u202ed\x9b2J\r\t"
WORDS = re.compile(r"forged \[red\]b\[/red\] \[link=http://x\]c\[/link\] :smile:")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    return command_on_terminal(monkeypatch)


def spec_file(folder: Path, name: str) -> Path:
    made = llama.build(
        n_vocab=256,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_ff=40,
        max_positions=64,
        rotary=Rotary(d_rotary=8),
        tied=False,
        name=name,
    )
    path = folder / "spec.json"
    path.write_text(asbuilt_spec.dumps(made))
    return path


def harmless(code: int, text: str) -> None:
    """Nothing in it is obeyed, and no line of it begins as one of ours that is not."""
    assert not obeyed(text), ascii(text)
    assert "\nError: forged" not in text
    assert "Traceback" not in text


def plain(text: str) -> str:
    """The text as one reads it: lines that a table broke are put together."""
    return re.sub(r"\s+", " ", STYLE.sub("", text))


@pytest.mark.parametrize(
    "words",
    [
        ("describe",),
        ("plan", "serve", "--gpu", "h100-sxm"),
        ("plan", "serve", "--gpu", "h100-sxm", "--gpu", "h200"),
        ("plan", "serve", "--gpu", "h100-sxm", "--explain"),
        ("plan", "serve", "--gpu", "h100-sxm", "--markdown"),
        ("plan", "train", "--gpu", "h100-sxm"),
        ("plan", "train", "--gpu", "h100-sxm", "--markdown"),
    ],
    ids=" ".join,
)
def test_the_name_of_a_spec(run: Run, terminal: OnTerminal, tmp_path: Path, words: tuple[str, ...]) -> None:
    """In a pipe too: what is a table there is read line by line."""
    code, drawn = terminal(*words, spec_file(tmp_path, HOSTILE), columns=300)
    piped = run(*words, tmp_path / "spec.json")
    assert code == piped.exit_code == 0
    for text in (drawn, piped.stdout):
        harmless(code, text)
        assert SHOWN in STYLE.sub("", text)


@pytest.mark.parametrize(
    "words",
    [("describe",), ("plan", "serve", "--gpu", "h100-sxm"), ("plan", "train", "--gpu", "h100-sxm")],
    ids=" ".join,
)
def test_the_name_of_a_spec_in_json(run: Run, terminal: OnTerminal, tmp_path: Path, words: tuple[str, ...]) -> None:
    for text in (
        terminal(*words, spec_file(tmp_path, HOSTILE), "--json")[1],
        run(*words, tmp_path / "spec.json", "--json").stdout,
    ):
        assert not obeyed(text)
        assert HOSTILE in json.loads(text).values()


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "PATH"),
        ("generate", "PATH", "x"),
        ("plan", "serve", "PATH", "--gpu", "t4"),
        ("diff", "PATH", "PATH"),
        ("plan", "train", "PATH", "--gpu", "t4"),
        ("convert", "PATH", "out"),
        ("embed", "PATH", "x"),
        ("measure", "PATH"),
    ],
    ids=lambda words: words[0],
)
def test_the_name_of_a_file(
    terminal: OnTerminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)  # messages cut what is longer than a screen's line
    path = Path(HOSTILE.replace("/", "|"))
    code, text = terminal(*(path if word == "PATH" else word for word in words))
    harmless(code, text)
    assert code == 2
    assert r"\x1b]0;owned" in plain(text)


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        ["describe", "gpt2", HOSTILE],
        ["describe", "gpt2", "--" + HOSTILE],
        ["describe", "gpt2", "--seq", HOSTILE],
        ["describe", "gpt2", "--dtype", HOSTILE],
        ["plan", HOSTILE],
        ["plan", "serve", "gpt2", "--gpu", HOSTILE],
        ["plan", "serve", "gpt2", "--gpu", "t4", "--context", HOSTILE],
        ["plan", "serve", "gpt2", "--gpu", "t4", "--memory", HOSTILE],
        ["plan", "serve", "gpt2", "--gpu", "t4", "--plot", HOSTILE],
        ["plan", "train", "gpt2", "--gpu", "t4", "--network", HOSTILE],
        ["generate", "gpt2", "x", "--temperature", HOSTILE],
        ["convert", "gpt2", "x", "--max-shard-size", HOSTILE],
        ["measure", "gpt2", "--dtype", HOSTILE],
        ["diff", "gpt2", "gpt2", "--tolerance", HOSTILE],
        ["describe", "gpt2", "--allow-unread", HOSTILE],
    ],
    ids=lambda words: " ".join(words[:-1]),
)
def test_words_that_were_typed(terminal: OnTerminal, words: list[str]) -> None:
    code, text = terminal(*words)
    harmless(code, text)
    assert code == 2
    assert r"\x1b]0;owned" in plain(text)


def test_a_word_of_a_megabyte(run: Run) -> None:
    result = run("describe", "gpt2", "--" + "x" * 10**6)
    assert (result.exit_code, len(result.stderr) < 2000) == (2, True)


class TestCheckpoint:
    """A folder and what is in it."""

    def edit(self, folder: Path, name: str, **changes: object) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_a_folder_that_is_called_so(self, terminal: OnTerminal, checkpoint: Path, tmp_path: Path) -> None:
        folder = checkpoint.rename(tmp_path / HOSTILE.replace("/", "|"))
        out = tmp_path / ("out" + folder.name)
        for words in (
            ["describe", folder],
            ["convert", folder, out],
            ["diff", folder, out],
            ["convert", folder, out],
            ["diff", folder, folder, "--text", HOSTILE],
            ["generate", folder, "x", "--max-new-tokens", 1],
        ):
            code, text = terminal(*words)
            harmless(code, text)
        assert out.is_dir()

    @pytest.mark.parametrize(
        "changes",
        [
            {HOSTILE: 1},
            {"model_type": HOSTILE},
            {"hidden_act": HOSTILE},
            {"rope_scaling": {HOSTILE: 1}},
            {"torch_dtype": HOSTILE},
            {"rope_scaling": {"rope_type": HOSTILE}},
            {"vocab_size": HOSTILE},
            {"quantization_config": {"quant_method": HOSTILE}},
        ],
        ids=str,
    )
    def test_keys_and_values_of_a_config(self, terminal: OnTerminal, checkpoint: Path, changes: dict[str, Any]) -> None:
        self.edit(checkpoint, "config.json", **changes)
        for words in (
            ["describe", checkpoint],
            ["generate", checkpoint, "x"],
            ["plan", "serve", checkpoint, "--gpu", "t4"],
        ):
            code, text = terminal(*words)
            harmless(code, text)
            assert code in (0, 2)

    def test_names_of_tensors(self, terminal: OnTerminal, checkpoint: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(checkpoint / "model.safetensors")
        save_file(tensors | {HOSTILE: tensors["model.norm.weight"].clone()}, checkpoint / "model.safetensors")
        for words in (
            ["describe", checkpoint],
            ["generate", checkpoint, "x"],
            ["convert", checkpoint, tmp_path / "out"],
        ):
            code, text = terminal(*words)
            harmless(code, text)
            assert code == 2
            assert r"\x1b]0;owned" in plain(text)

    def test_names_in_an_index(self, terminal: OnTerminal, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").unlink()
        for weight_map in ({HOSTILE: "a.safetensors"}, {"a": HOSTILE.replace("/", "|") + ".safetensors"}):
            (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
            code, text = terminal("generate", checkpoint, "x")
            harmless(code, text)
            assert code == 2

    def test_messages_of_a_template(self, terminal: OnTerminal, checkpoint: Path) -> None:
        for template in (
            "{{ raise_exception(" + json.dumps(HOSTILE) + ") }}",
            "{{ " + HOSTILE,
            "{{ x | " + HOSTILE + " }}",
        ):
            self.edit(checkpoint, "tokenizer_config.json", chat_template=template)
            code, text = terminal("generate", checkpoint, "x", "--chat")
            harmless(code, text)
            assert code == 2

    def test_errors_of_a_tokenizer(self, terminal: OnTerminal, checkpoint: Path) -> None:
        for changes in (
            {"model": {"type": HOSTILE}},
            {"decoder": {"type": HOSTILE}},
            {HOSTILE: 1},
            {"version": HOSTILE},
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(" + HOSTILE},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
        ):
            self.edit(checkpoint, "tokenizer.json", **changes)
            code, text = terminal("generate", checkpoint, "x")
            harmless(code, text)
            assert code in (0, 2)

    @pytest.mark.parametrize("words", [[], ["--json"]], ids=str)
    def test_tokens_that_are_generated(
        self, terminal: OnTerminal, run: Run, checkpoint: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Shown on a terminal with its newlines and tabs; raw in a pipe."""
        import asbuilt.generate.text as text_module

        class Said:
            prompt, tokens, text, finish_reason, note = [1], [2], HOSTILE, "eos", HOSTILE
            draft = segments = None

            def __iter__(self) -> Any:  # noqa: ANN401
                return iter([HOSTILE[:9], HOSTILE[9:]])

        monkeypatch.setattr(text_module, "complete", lambda *_, **__: Said())
        _, text = terminal("generate", checkpoint, "x", *words, columns=300)
        assert not [c for c in obeyed(text) if c != "\t"]
        piped = run("generate", checkpoint, "x", *words)
        assert r"warning: a\x1b]0;owned\x07\x1b[2J\nError" in piped.stderr
        if words:
            assert json.loads(text[text.index("{") :])["text"] == json.loads(piped.stdout)["text"] == HOSTILE
            assert not obeyed(piped.stdout)
        else:
            assert SHOWN.replace(r"\n", "\n").replace(r"\t", "\t") in text
            assert piped.stdout == HOSTILE + "\n"


class TestGguf:
    def file(self, folder: Path, **fields: str) -> Path:
        writer = gguf.GGUFWriter(folder / "m.gguf", fields.get("architecture", "llama"))
        writer.add_string("general.name", fields.get("name", HOSTILE))
        writer.add_string(fields.get("key", "general.basename"), HOSTILE)
        writer.add_tensor(fields.get("tensor", "token_embd.weight"), numpy.ones((4, 32), dtype=numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "m.gguf"

    @pytest.mark.parametrize(
        "fields", [{}, {"key": HOSTILE}, {"tensor": HOSTILE[:40]}, {"architecture": HOSTILE}], ids=str
    )
    def test_metadata(self, terminal: OnTerminal, tmp_path: Path, fields: dict[str, str]) -> None:
        path = self.file(tmp_path, **fields)
        for words in (["describe", path], ["generate", path, "x"], ["plan", "serve", path, "--gpu", "t4"]):
            code, text = terminal(*words)
            harmless(code, text)
            assert code == 2


class TestMachines:
    def test_a_machine_file(self, terminal: OnTerminal, run: Run, tmp_path: Path) -> None:
        path = tmp_path / "m.toml"
        quoted = json.dumps(HOSTILE).replace("\x9b", "\\u009b").replace("\u202e", "\\u202e")
        path.write_text(
            f"name = {quoted}\nsource = {quoted}\nvendor = {quoted}\nnote = {quoted}\n"
            'memory = "80GB"\nbandwidth = "2TB/s"\n[rates]\nbf16 = "300T"\n'
        )
        for command in (["plan", "serve", "gpt2"], ["plan", "train", "gpt2"]):
            for more in ([], ["--explain"], ["--markdown"], ["--json"]):
                code, text = terminal(*command, "--gpu", path, *more, columns=300)
                harmless(code, text)
                assert code == 0, text

    def test_keys_of_a_machine_file(self, terminal: OnTerminal, tmp_path: Path) -> None:
        path = tmp_path / "m.toml"
        quoted = json.dumps(HOSTILE).replace("\x9b", "\\u009b").replace("\u202e", "\\u202e")
        for text in (f"{quoted} = 1", f"memory = {quoted}", HOSTILE, f"[rates]\n{quoted} = 1"):
            path.write_text(text)
            code, text = terminal("plan", "serve", "gpt2", "--gpu", path)
            harmless(code, text)
            assert code == 2
