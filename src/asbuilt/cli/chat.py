"""`asbuilt chat`: a conversation with a model, typed at prompts or piped line by line."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli import console
from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, say, warn, write
from asbuilt.cli.running import Place, context_option, echoed, kv_option, place_options, sampling_options, starting
from asbuilt.cli.types import Tokens
from asbuilt.errors import InputError, near
from asbuilt.shown import number

if TYPE_CHECKING:
    from asbuilt.generate.chat import Answer, Chat
    from asbuilt.generate.compute import Compute

COMMANDS = {
    "/system": ("[TEXT]", "change the system message, or show it; - removes it"),
    "/image": ("FILE", "show this image with the next message, to a model that sees"),
    "/audio": ("FILE", "play this sound with the next message, to a model that hears"),
    "/save": ("FILE", "save the chat"),
    "/load": ("FILE", "continue a saved chat"),
    "/reset": ("", "forget what was said, but for the system message"),
    "/help": ("", "this list"),
    "/exit": ("", "leave, as Ctrl-D does"),
}
LEAVING = ("/exit", "/quit", "/bye")
EXAMPLES = """\b
Examples:
  asbuilt chat SmolLM2-135M-Instruct.Q4_1.gguf
  asbuilt chat qwen3-4b/ --system "Be brief." --temp 0.7 --top-p 0.9 -s 1
  asbuilt chat llama-3.1-8b/ -c 32768 -t 8 -n 512
  asbuilt chat gemma-3-4b/ --image photo.png
  printf 'My name is Ada.\\nWhat is my name?\\n' | asbuilt chat MODEL
"""
KEYS = (
    '""" begins and ends a message of several lines; // begins one with a slash. '
    "Ctrl-C ends an answer, and at the prompt the chat."
)


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--system", help="System message.")
@click.option(
    "-n",
    "--max-new-tokens",
    "max_new_tokens",
    type=Tokens(),
    help="Generate at most this many tokens per answer; by default as many as the context holds.",
)
@context_option
@sampling_options
@kv_option
@place_options
@click.option("--image", "images", multiple=True, metavar="FILE", help="Image shown with the first message.")
@click.option("--audio", "sounds", multiple=True, metavar="FILE", help="Sound played with the first message.")
@allow_unread_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document at the end; questions are read from stdin."
)
def chat(
    model: str,
    system: str | None,
    max_new_tokens: int | None,
    context: int | None,
    sampled: dict[str, Any],
    stop: tuple[str, ...],
    kv_dtype: str | None,
    place: Place,
    images: tuple[str, ...],
    sounds: tuple[str, ...],
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Talk with MODEL, a checkpoint folder or a .gguf file that has a chat template.

    What was said stays in the cache: of each message only the new tokens are read. The context is the model's, up to
    8,192 tokens unless -c says otherwise. /help lists what else can be typed. Where stdin is no terminal, each line
    is a message, and the answers are printed without anything beside them.
    """
    with starting():
        from asbuilt.generate.sampling import Sampling

        sampling = Sampling(**sampled)
        source = opened(model, allow_unread, weights=True)
        from asbuilt.api.chat import open_chat
        from asbuilt.checkpoint.room import memory_errors

        logging.getLogger("asbuilt").addHandler(logging.NullHandler())
        how, count = place.taken()
        options: dict[str, Any] = {
            "system": system,
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "stop": stop,
        }
        talk, compute = open_chat(source, how, context=context, **options)
    if compute.warning:
        warn(f"warning: {compute.warning}")
    elif compute.choice and console.interactive() and not as_json:
        warn(f"[{compute.choice}]")
    session = Session(talk, source.name, typed=console.interactive() and not as_json, quiet=as_json)
    session.attach("images", images)
    session.attach("audio", sounds)
    with memory_errors(compute.needed, source.name, "to be run"):
        session.run()
    if as_json:
        more = {"max_new_tokens": max_new_tokens, "context": talk.context, "kv_dtype": kv_dtype}
        print_json(session.document() | _computed(compute) | echoed(sampling, place, count, **more))


def _computed(compute: Compute) -> dict[str, str]:
    return {"dtype": str(compute.dtype).removeprefix("torch."), "dtype_reason": compute.why}


class Session:
    """The loop of a chat: a line is a command or a message, and problems are told without ending what is typed."""

    def __init__(self, talk: Chat, name: str, *, typed: bool, quiet: bool) -> None:
        self.chat, self.name, self.typed, self.quiet = talk, name, typed, quiet
        self.beside: dict[str, list[str]] = {"images": [], "audio": []}
        self.answers: list[dict[str, Any]] = []

    def run(self) -> None:
        """Reads lines until their end, or /exit."""
        if self.typed:
            console.aside(f"[{self.name}, {self.chat.context:,} tokens of context; /help lists commands]")
        for text in console.typed(tuple(COMMANDS)) if self.typed else console.lines():
            if text.split()[:1] and text.split()[0] in LEAVING:
                return
            try:
                self.take(text)
            except InputError as error:
                if not self.typed:
                    raise
                warn(f"{error}{self._advice(error)}")

    def take(self, text: str) -> None:
        """Does what one line says."""
        if not text.strip():
            return
        word, _, rest = text.strip().partition(" ")
        if text.startswith("//"):
            self.answer(text[1:])
        elif text.startswith("/") and "\n" not in text:
            self.obey(word, rest.strip())
        else:
            self.answer(text)

    def obey(self, word: str, rest: str) -> None:
        """Runs a command."""
        if word not in COMMANDS:
            known = near(word, COMMANDS, cutoff=0.6)
            raise InputError("unknown command", field=word, fix=known or "/help lists them; // begins a message with /")
        given, _ = COMMANDS[word]
        if bool(rest) != bool(given) and given != "[TEXT]":
            raise InputError(field=word, value=rest, allowed=f"{word} {given}".strip())
        getattr(self, f"_{word[1:]}")(rest)

    def answer(self, text: str) -> None:
        """Sends a message and prints the answer as it comes."""
        with console.interrupting(self.chat.stop) if self.typed else nullcontext():
            answer = self.chat.send(text, **{name: list(files) for name, files in self.beside.items()})
            for files in self.beside.values():
                files.clear()
            for piece in answer:
                if not self.quiet:
                    write(piece)
        if not self.quiet:
            write("\n")
        self.answers.append(_document(answer))
        if self.typed:
            self._tell(answer)
        elif answer.finish_reason == "context":
            warn(f"warning: {self._full()}")

    def attach(self, name: str, files: tuple[str, ...]) -> None:
        """Puts files beside the next message."""
        for file in files:
            self.chat.check(**{name: [file]})
            self.beside[name].append(file)

    def document(self) -> dict[str, Any]:
        """Returns the chat as plain data."""
        return {
            "model": self.name,
            "messages": [message.document() for message in self.chat.history],
            "answers": self.answers,
            "context_used": self.chat.used,
            "context_left": self.chat.left,
        }

    def _tell(self, answer: Answer) -> None:
        speed = "" if answer.speed is None else f" at {number(answer.speed)} tokens/s"
        told = f"{len(answer.tokens):,} tokens{speed}; {self.chat.left:,} of {self.chat.context:,} tokens left"
        console.aside(f"[{told}{'; stopped' if answer.finish_reason == 'stopped' else ''}]")
        if answer.finish_reason == "context":
            console.aside(f"[{self._full()}]")

    def _full(self) -> str:
        larger = self.chat.context < self.chat.model.spec.max_positions
        more = f", or begin with a larger -c, up to {self.chat.model.spec.max_positions:,}" if larger else ""
        return f"the context is full: /reset forgets what was said{more}; /save FILE keeps it"

    def _advice(self, error: InputError) -> str:
        from asbuilt.generate.chat import ContextFull

        return f". {self._full()}" if isinstance(error, ContextFull) else ""

    def _system(self, text: str) -> None:
        if not text:
            say("no system message" if self.chat.system is None else self.chat.system)
            return
        self.chat.system = None if text == "-" else text
        self._done("the system message is changed" if text != "-" else "the system message is removed")

    def _image(self, file: str) -> None:
        self.attach("images", (str(Path(file).expanduser()),))

    def _audio(self, file: str) -> None:
        self.attach("audio", (str(Path(file).expanduser()),))

    def _save(self, file: str) -> None:
        from asbuilt.api.chat import save_chat

        save_chat(self.chat, self.name, Path(file).expanduser())
        self._done(f"saved as {file}")

    def _load(self, file: str) -> None:
        from asbuilt.api.chat import read_chat

        self.chat.restore(read_chat(Path(file).expanduser()))
        self._done(f"{len(self.chat.history)} messages of {file}")

    def _reset(self, _: str) -> None:
        self.chat.reset()
        self._done("forgotten")

    def _help(self, _: str) -> None:
        for word, (given, does) in COMMANDS.items():
            say(f"{f'{word} {given}':15} {does}")
        say(KEYS)

    def _done(self, text: str) -> None:
        if self.typed:
            console.aside(f"[{text}]")


def _document(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "prompt_tokens_kept": answer.kept,
        "prompt_tokens_read": answer.read,
        "prefill_seconds": answer.prefill_seconds,
        "seconds": answer.seconds,
        "tokens_per_second": answer.speed,
    }
