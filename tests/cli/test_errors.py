"""A person's mistake is one message on stderr and exit code 2, never a traceback; and what it takes to say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

import asbuilt
from asbuilt.checkpoint import load as loading
from asbuilt.cli.main import COMMANDS, EXTRA, cli

Run = Callable[..., Result]
HEAVY = ("torch", "numpy", "rich", "transformers", "safetensors", "tokenizers", "gguf", "asbuilt.nn")
# what a command needs beside its options
WORDS = {
    "describe": ("gpt2",),
    "models": (),
    "machines": (),
    "plan": ("train", "gpt2", "--gpu", "h100-sxm"),
    "generate": ("gpt2", "x"),
    "chat": ("gpt2",),
    "convert": ("gpt2", "out"),
    "quantize": ("gpt2", "out.gguf", "--format", "q8_0"),
    "tokenizer": ("cut", "x"),
    "measure": ("gpt2",),
    "diff": ("gpt2", "gpt2"),
    "embed": ("gpt2", "x"),
    "train": ("characters",),
    "web": ("gpt2", "--no-open"),
}


def refused(result: Result, *said: str) -> None:
    """Asserts that there was one message, with everything in it that is `said`."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len([line for line in lines if line.startswith("Error: ")]) == 1, result.stderr
    assert lines[-1].startswith("Error: ")
    for text in said:
        assert text in lines[-1]


def edited(folder: Path, **changes: object) -> Path:
    """Rewrites the folder's config.json; None takes a key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


class TestModel:
    def test_unknown_name(self, run: Run) -> None:
        refused(run("describe", "lama-3-8b"), "lama-3-8b", "llama-3-8b")

    def test_near_nothing(self, run: Run) -> None:
        refused(run("describe", "☃" * 50), "catalogue")
        refused(run("describe", "☃" * 5000), "MODEL")

    @pytest.mark.parametrize("name", ["", "\0", "/", "."])
    def test_no_name_at_all(self, run: Run, name: str) -> None:
        refused(run("describe", name))

    def test_description_without_weights(self, run: Run) -> None:
        refused(run("generate", "gpt2", "x"), "gpt2", "no weights")

    def test_other_file(self, run: Run, checkpoint: Path) -> None:
        refused(run("describe", checkpoint / "model.safetensors"), "give the folder")

    def test_pickle(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
        refused(run("describe", tmp_path / "pytorch_model.bin"), "pickle")


class TestConfig:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"rope_theta_scale": 2}, ["rope_theta_scale"]),
            ({"hidden_size": -32}, ["hidden_size", "-32"]),
            ({"num_hidden_layers": None}, ["num_hidden_layers", "missing"]),
            ({"hidden_size": 33}, ["33"]),
            ({"num_attention_heads": 3, "num_key_value_heads": 2}, ["3"]),
            ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
            ({"vocab_size": True}, ["vocab_size", "True"]),
            ({"hidden_act": "tanh"}, ["hidden_act", "tanh", "silu"]),
            ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
            ({"model_type": "lama"}, ["model_type", "llama"]),
        ],
        ids=str,
    )
    def test_wrong(self, run: Run, checkpoint: Path, change: dict[str, Any], said: list[str]) -> None:
        assert run("describe", checkpoint, "--json").exit_code == 0
        if "hidden_size" in change and isinstance(change["hidden_size"], int):
            change = change | {"head_dim": None}
        refused(run("describe", edited(checkpoint, **change)), *said)

    @pytest.mark.parametrize("text", ["", "{", "[]", "{'a': 1}", '{"a": Nan}', "[" * 10**5, "\ufeff{}"])
    def test_not_json(self, run: Run, checkpoint: Path, text: str) -> None:
        (checkpoint / "config.json").write_text(text)
        refused(run("describe", checkpoint), "config.json")


class TestTensors:
    """All three commands that meet stored tensors hold them against the description."""

    @pytest.fixture(params=["describe", "generate", "convert"])
    def meet(self, request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> Callable[[Path], Result]:
        words = {"describe": [], "generate": ["x"], "convert": [tmp_path / "out"]}[request.param]
        return lambda model: run(request.param, model, *words)

    def test_missing(self, meet: Callable[[Path], Result], checkpoint: Path) -> None:
        self._rewrite(checkpoint, lambda tensors: tensors.pop("model.norm.weight"))
        refused(meet(checkpoint), "1 missing", "model.norm.weight")

    def test_extra(self, meet: Callable[[Path], Result], checkpoint: Path) -> None:
        self._rewrite(checkpoint, lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone()))
        refused(meet(checkpoint), "1 unexpected", "extra")

    def test_misshapen(self, meet: Callable[[Path], Result], checkpoint: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        self._rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
        refused(meet(checkpoint), name)

    def test_truncated(self, meet: Callable[[Path], Result], checkpoint: Path) -> None:
        whole = (checkpoint / "model.safetensors").read_bytes()
        (checkpoint / "model.safetensors").write_bytes(whole[:-1])
        refused(meet(checkpoint), str(len(whole) - 1))

    @staticmethod
    def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    @pytest.mark.parametrize("words", [("generate", "x"), ("convert", "out")], ids=str)
    def test_only_pickles(self, run: Run, checkpoint: Path, words: tuple[str, str]) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
        refused(run(words[0], checkpoint, words[1]), "pickle", "pytorch_model.bin")

    def test_gguf(self, meet: Callable[[Path], Result], tmp_path: Path) -> None:
        path, nbytes = self._gguf(tmp_path)
        whole = path.read_bytes()
        for cut in (len(whole) - 1, len(whole) - nbytes, 40, 3, 0):
            path.write_bytes(whole[:cut])
            refused(meet(path), "m.gguf")

    def test_gguf_that_declares_more_than_it_holds(self, meet: Callable[[Path], Result], tmp_path: Path) -> None:
        path, _ = self._gguf(tmp_path)
        whole = path.read_bytes()
        path.write_bytes(whole[:8] + (2**40).to_bytes(8, "little") + whole[16:])  # the tensor count
        refused(meet(path), "tensor count", str(2**40))

    @staticmethod
    def _gguf(folder: Path) -> tuple[Path, int]:
        import gguf
        import numpy

        tensor = numpy.random.default_rng().standard_normal((4, 32), dtype=numpy.float32)
        writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
        writer.add_tensor("token_embd.weight", tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "m.gguf", tensor.nbytes


class TestGenerate:
    @pytest.fixture(autouse=True)
    def unloaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All of this must be refused before weights are read."""

        def load(*_: object) -> None:
            raise AssertionError("weights were read first")

        monkeypatch.setattr(loading, "load", load)

    def test_prompt_longer_than_the_context(self, run: Run, checkpoint: Path) -> None:
        context = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
        refused(run("generate", checkpoint, "x" * (context + 1)), "prompt", str(context + 1), str(context))

    def test_empty_prompt(self, run: Run, checkpoint: Path) -> None:
        refused(run("generate", checkpoint, ""), "prompt")

    @pytest.mark.parametrize(
        "words",
        [
            ("--temperature", -1),
            ("--temperature", "nan"),
            ("--top-k", 0),
            ("--top-p", 1.5),
            ("--min-p", -0.1),
            ("--seed", -1),
            ("--repetition-penalty", 0),
            ("--stop", ""),
            ("--dtype", "q4_0"),
            ("--dtype", "float"),
            ("--max-new-tokens", "many"),
            ("--system", "x"),
            ("--top-k", 2**40),
        ],
        ids=str,
    )
    def test_options(self, run: Run, checkpoint: Path, words: tuple[str, object]) -> None:
        refused(run("generate", checkpoint, "x", *words))

    def test_no_tokenizer(self, run: Run, checkpoint: Path) -> None:
        (checkpoint / "tokenizer.json").unlink()
        refused(run("generate", checkpoint, "x"), "tokenizer")

    def test_no_chat_template(self, run: Run, checkpoint: Path) -> None:
        (checkpoint / "tokenizer_config.json").write_text("{}")
        refused(run("generate", checkpoint, "x", "--chat"), "chat template")


@pytest.mark.parametrize(
    "words",
    [
        ("describe",),
        ("describe", "gpt2", "more"),
        ("describe", "gpt2", "--seq", 0),
        ("describe", "gpt2", "--seq", "x"),
        ("describe", "gpt2", "--batch", -1),
        ("describe", "gpt2", "--dtype", "fp31"),
        ("describe", "gpt2", "--none"),
        ("describe", "gpt2", "--kv-dtype", "q4_k"),
        ("undescribe",),
        ("convert", "gpt2"),
        ("generate",),
    ],
    ids=str,
)
def test_wrong_words(run: Run, words: tuple[object, ...]) -> None:
    refused(run(*words))


def command(name: str, monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    """Has a command raise `fault` whatever it is given."""

    def raise_fault(*_: object, **__: object) -> None:
        raise fault

    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    monkeypatch.setattr(found, "callback", raise_fault)


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_extra_names_the_install(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for missing in EXTRA:
        command(name, monkeypatch, ModuleNotFoundError(f"No module named '{missing}.x'", name=f"{missing}.x"))
        refused(run(name, *WORDS[name]), missing, "asbuilt[torch]")


def test_another_missing_module_is_a_fault_of_ours(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command("describe", monkeypatch, ModuleNotFoundError("No module named 'asbuilt.nothing'", name="asbuilt.nothing"))
    assert isinstance(run("describe", "gpt2").exception, ModuleNotFoundError)


@pytest.mark.parametrize("name", COMMANDS)
def test_interruption_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    command(name, monkeypatch, KeyboardInterrupt())
    result = run(name, *WORDS[name])
    assert (result.exit_code, result.output) == (130, "")


def test_without_torch_installed(tmp_path: Path, checkpoint: Path) -> None:
    """In a process where torch cannot be imported, describing works and generating says what to install."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}

    def asbuilt(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "asbuilt", *words], env=env, capture_output=True, text=True)

    assert asbuilt("describe", str(checkpoint)).returncode == 0
    ran = asbuilt("generate", str(checkpoint), "x")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "pip install 'asbuilt[torch]'" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def imported(*words: str) -> set[str]:
    """The modules that a command has imported when it is done; its output goes to a pipe."""
    script = "import sys; from asbuilt.cli.main import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    return set(ran.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("generate", "--help"),
        ("chat", "--help"),
        ("models",),
        ("describe", "llama-3-8b"),
        ("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm"),
        ("machines",),
        *((name, "--help") for name in COMMANDS),
    ],
    ids=str,
)
def test_light_commands_import_nothing_heavy(words: tuple[str, ...]) -> None:
    assert not imported(*words) & set(HEAVY)


def test_describing_a_checkpoint_imports_no_torch(checkpoint: Path) -> None:
    assert not imported("describe", str(checkpoint)) & set(HEAVY)


def test_a_reader_that_leaves_is_no_fault() -> None:
    """As in `asbuilt models | head -1`, where the pipe is closed before all is written."""
    words = [sys.executable, "-m", "asbuilt", "models", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert ran.stderr is not None
        ran.stdout.close()
        assert ran.stderr.read() == ""


def test_importing_asbuilt_imports_nothing_heavy_and_every_name_is_there() -> None:
    script = (
        "import sys, asbuilt; assert 'torch' not in sys.modules; print(asbuilt.spec, asbuilt.cost, asbuilt.open_model)"
    )
    script += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert sorted(asbuilt.PUBLIC) == asbuilt.__all__
    for name in asbuilt.__all__:
        assert getattr(asbuilt, name) is not None
        assert name in dir(asbuilt)
    with pytest.raises(AttributeError, match="nothing"):
        _ = asbuilt.nothing


@pytest.mark.parametrize(
    ("fault", "needed"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to "
                "allocate 17000000000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            ": 17.00 GB (15.83 GiB) more was needed",
        ),
        (MemoryError("Unable to allocate 15.8 GiB for an array with shape (9,)"), ": 15.8 GiB more was needed"),
        (MemoryError(), ""),
    ],
    ids=["torch", "numpy", "python"],
)
def test_too_little_memory_is_a_message(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: Exception, needed: str
) -> None:
    monkeypatch.setattr("asbuilt.memory.free", lambda: 6 * 10**9)
    command("describe", monkeypatch, fault)
    refused(
        run("describe", "gpt2"),
        f"not enough memory{needed}, 6.00 GB (5.59 GiB) are free; use a smaller model",
    )


def test_another_runtime_error_is_a_fault_of_ours(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command("describe", monkeypatch, RuntimeError("shapes do not match"))
    assert isinstance(run("describe", "gpt2").exception, RuntimeError)


def test_what_torch_and_numpy_really_say() -> None:
    """Their messages, not ours of what they might be."""
    import numpy
    import torch

    from asbuilt.cli.main import ASKED

    for allocate in (lambda: torch.empty(1 << 55, dtype=torch.int8), lambda: numpy.empty(1 << 55, dtype=numpy.int8)):
        with pytest.raises((RuntimeError, MemoryError)) as error:
            allocate()
        assert ASKED.search(str(error.value)), error.value
