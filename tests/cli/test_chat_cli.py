"""`asbuilt chat`: lines in and answers out, its commands, what it refuses, and Ctrl-C at a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.families import llama
from asbuilt.generate.sampling import Sampling
from asbuilt.generate.text import complete
from asbuilt.nn import build
from asbuilt.spec import Rotary

Run = Callable[..., Result]
CONTEXT = 64  # of the fixture `checkpoint`


def answer(folder: Path, messages: list[tuple[str, str]], tokens: int, **options: Any) -> str:  # noqa: ANN401
    """What a run of the whole chat answers."""
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer is not None
    said = [{"role": role, "content": text} for role, text in messages]
    return "".join(complete(load(folder), tokenizer, said, max_new_tokens=tokens, **options))


def test_each_line_is_a_message_and_only_answers_are_printed(run: Run, checkpoint: Path) -> None:
    made = run("chat", checkpoint, "-n", 3, "--system", "S", input="ab\n\ncd\n")
    first = answer(checkpoint, [("system", "S"), ("user", "ab")], 3)
    second = answer(checkpoint, [("system", "S"), ("user", "ab"), ("assistant", first), ("user", "cd")], 3)
    assert (made.exit_code, made.stdout, made.stderr) == (0, f"{first}\n{second}\n", "")


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_says_what_was_kept_and_echoes_the_options(run: Run, checkpoint: Path) -> None:
    words = ("-n", 2, "-c", 60, "--temp", 0.5, "--top-k", 9, "--repeat-penalty", 1.5, "-s", 4, "-t", 1, "--json")
    said = document(run("chat", checkpoint, *words, input="ab\ncd\n"))
    settings = {
        "temperature": 0.5, "top_k": 9, "top_p": None, "min_p": None, "repetition_penalty": 1.5, "seed": 4,
        "threads": 1, "device": "cpu", "max_new_tokens": 2,
        "kv_dtype": None, "context": 60,
    }  # fmt: skip
    assert said["settings"] == settings
    first, second = said["answers"]
    assert first["prompt_tokens_read"] == len("[user]ab[assistant]")
    assert first["prompt_tokens_kept"] == 0 < first["prompt_tokens_read"] <= second["prompt_tokens_kept"]
    assert [message["role"] for message in said["messages"]] == ["user", "assistant"] * 2
    assert said["context_used"] + said["context_left"] == 60
    sampling = Sampling(temperature=0.5, top_k=9, repetition_penalty=1.5, seed=4)
    assert first["text"] == answer(checkpoint, [("user", "ab")], 2, sampling=sampling)


def test_commands(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """A saved chat goes on as if it had not been left; a reset one begins anew."""
    file = tmp_path / "said.json"
    script = f"/system Hm\nab\n/save {file}\n/reset\nab\n/load {file}\ncd\n/system\n/bye\nnot read\n"
    made = run("chat", checkpoint, "-n", 2, input=script)
    first = answer(checkpoint, [("system", "Hm"), ("user", "ab")], 2)
    begun = [("system", "Hm"), ("user", "ab"), ("assistant", first)]
    second = answer(checkpoint, [*begun, ("user", "cd")], 2)
    assert made.exit_code == 0, made.output
    assert made.stdout == f"{first}\n{first}\n{second}\nHm\n"
    kept = json.loads(file.read_text())
    assert kept["messages"] == [{"role": role, "content": text} for role, text in begun]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".said")] == []
    listed = run("chat", checkpoint, input="/help\n").stdout
    assert all(word in listed for word in ("/system [TEXT]", "/image FILE", "/save FILE", "/exit"))


def test_two_slashes_begin_a_message_with_one(run: Run, checkpoint: Path) -> None:
    made = run("chat", checkpoint, "-n", 2, input="//x\n")
    assert made.stdout == answer(checkpoint, [("user", "/x")], 2) + "\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/sav x", "/sav: unknown command; did you mean '/save'?"),
        ("/save", "/save: must be /save FILE, got ''"),
        ("/reset now", "/reset: must be /reset, got 'now'"),
        ("/load nowhere.json", "nowhere.json: cannot be read: No such file"),
        ("/load {model}/config.json", "not a saved chat"),
        ("/save {model}/config.json", "exists and is no saved chat; choose another name"),
        ("/save {model}/no/such/folder", "cannot be written: No such file"),
        ("/image a.png", "the model reads no images"),
        ("/audio a.wav", "the model reads no sound"),
        ("x" * CONTEXT, "the context is full"),
    ],
)
def test_a_line_that_cannot_be_done(run: Run, checkpoint: Path, line: str, said: str) -> None:
    before = (checkpoint / "config.json").read_bytes()
    made = run("chat", checkpoint, input=line.format(model=checkpoint) + "\nab\n")
    assert (made.exit_code, made.stdout) == (2, "")
    assert said in made.stderr
    assert (checkpoint / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "messages",
    [[{"role": "x", "content": ""}], [{"role": "user"}], [{"role": "user", "content": "", "images": [1]}], [1], {},
     [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]],
    ids=str,
)  # fmt: skip
def test_a_file_that_was_not_saved_so(run: Run, checkpoint: Path, tmp_path: Path, messages: object) -> None:
    file = tmp_path / "said.json"
    file.write_text(json.dumps({"asbuilt": "chat", "messages": messages}))
    made = run("chat", checkpoint, input=f"/load {file}\n")
    assert (made.exit_code, "said.json" in made.stderr) == (2, True)


def test_a_full_context_is_said_with_what_to_do(run: Run, checkpoint: Path) -> None:
    made = run("chat", checkpoint, "-c", 30, input="abc\n")
    told = "warning: the context is full: /reset forgets what was said, or begin with a larger -c, up to 64; /save"
    assert (made.exit_code, made.stderr.startswith(told)) == (0, True)


def test_what_cannot_chat(run: Run, checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    made = run("chat", checkpoint, input="ab\n")
    assert (made.exit_code, made.stdout) == (2, "")
    assert "no chat template" in made.stderr
    assert "`asbuilt generate MODEL PROMPT`" in made.stderr
    assert run("chat", "gpt2", input="ab\n").exit_code == 2


def test_stdin_that_is_no_text(run: Run, checkpoint: Path) -> None:
    made = run("chat", checkpoint, "-n", 1, input=b"ab\n\xff\n")
    assert (made.exit_code, "line 2 of stdin: not UTF-8" in made.stderr) == (2, True)


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "tpu"), "--device: not on this machine (got 'tpu'; must be cpu"),
        (("-t", 0), "--threads: must be from 1 to"),
        (("-t", 100000), "--threads: must be from 1 to"),
        (("--dtype", "int3"), "--dtype: "),
        (("-c", CONTEXT + 1), f"context: must be from {{least}} to {CONTEXT}"),
    ],
)
def test_places_that_are_not_here(
    run: Run, checkpoint: Path, command: str, words: tuple[object, ...], said: str
) -> None:
    made = run(command, checkpoint, *words, input="ab")
    assert (made.exit_code, made.stdout) == (2, "")
    assert said.format(least=2 if command == "chat" else 1) in made.stderr


# A terminal, with what a person sees and types; nothing is timed.


@pytest.fixture
def endless(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that says "!" for ever: all its logits are equal, and "!" is the first token."""
    folder = tmp_path / "endless"
    made = build(
        llama.build(
            n_vocab=open_model(checkpoint).spec.n_vocab,
            d_model=32,
            n_layers=1,
            n_heads=4,
            n_kv_heads=2,
            d_ff=40,
            max_positions=1 << 20,
            rotary=Rotary(d_rotary=8),
            tied=False,
            name="endless",
        )
    )
    with torch.no_grad():
        made.get_parameter("head.weight").zero_()
    save(made, folder, family="llama", carried={})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).rename(folder / name)
    return folder


PATIENCE, AGAIN = 300.0, 20.0  # seconds after which a program that shows nothing hangs; and a person tries again


class Person:
    """`asbuilt` on a terminal of its own."""

    def __init__(self, *words: object) -> None:
        self.master, slave = pty.openpty()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asbuilt", *map(str, words)],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> str:
        """Reads until the text is there; returns what came before it, and what has come since stays unread."""
        while text not in self.seen:
            self.seen += self._more()
        before, _, self.seen = self.seen.partition(text)
        return before

    def rest(self, again: str = "") -> str:
        """Reads until the program ends; types `again` whenever nothing has come for a while."""
        with contextlib.suppress(EOFError):
            while True:
                while again and not select.select([self.master], [], [], AGAIN)[0]:
                    self.types(again)
                self.seen += self._more()
        return self.seen

    def _more(self) -> str:
        if not select.select([self.master], [], [], PATIENCE)[0]:
            raise TimeoutError(self.seen[-2000:])
        try:
            data = os.read(self.master, 65536)
        except OSError:
            data = b""
        if not data:
            raise EOFError(self.seen)
        return data.decode(errors="replace")

    def types(self, text: str) -> None:
        os.write(self.master, text.encode())


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background has it ignored, and passes that on


@pytest.fixture
def person() -> Iterator[Callable[..., Person]]:
    made: list[Person] = []

    def begin(*words: object) -> Person:
        made.append(Person(*words))
        return made[-1]

    yield begin
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            one.process.send_signal(signal.SIGKILL)
        one.process.wait()
        os.close(one.master)


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_program(endless: Path, person: Callable[..., Person]) -> None:
    one = person("chat", endless)
    one.until(">>> ")
    one.types("hello\n")
    one.until("!!!")
    one.types("\x03")
    told = one.until("left; stopped]")
    assert "tokens/s" in told
    one.until(">>> ")
    one.types("/system\n")
    one.until("no system message")
    one.until(">>> ")
    one.types("\x03")
    # CPython's input() misses a signal that comes between the prompt it shows and its select(): it waits for a key
    assert "Traceback" not in one.rest(again="\x03")
    assert one.process.wait() == 130


def test_the_end_of_the_file_ends_the_program(checkpoint: Path, person: Callable[..., Person]) -> None:
    one = person("chat", checkpoint, "-n", 2)
    begun = one.until(">>> ")
    assert "64 tokens of context; /help lists commands" in begun
    one.types('/nonsense\n"""a\nb"""\n')
    one.until("unknown command")
    one.until("left]")
    one.until(">>> ")
    one.types("\x04")
    assert "Traceback" not in one.rest()
    assert one.process.wait() == 0
