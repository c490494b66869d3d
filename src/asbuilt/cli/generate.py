"""`asbuilt generate`: text from a checkpoint, written as it comes."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, warn, write
from asbuilt.cli.types import Tokens
from asbuilt.errors import InputError

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source
    from asbuilt.generate.text import Completion
    from asbuilt.text.tokenizer import Tokenizer

LONGEST_PROMPT = 1 << 26  # bytes; the longest published context is 10 million tokens


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Put PROMPT into the model's chat template, as the user's message.")
@click.option("--system", help="The system message; with --chat.")
@click.option("--max-new-tokens", type=Tokens(), default=256, show_default=True, help="At most so many tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, help="Draw from the k likeliest tokens.")
@click.option("--top-p", type=float, help="Draw from the fewest tokens whose probabilities reach p.")
@click.option("--min-p", type=float, help="Draw from tokens at least p times as likely as the likeliest.")
@click.option(
    "--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1, said tokens get rarer."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--dtype", help="To compute in: fp32, bf16, fp16. As stored unless given; fp32 for quantised weights.")
@click.option("--prefill-chunk", type=Tokens(), help="Read the prompt in pieces of so many tokens: less memory.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document at the end instead of the text.")
def generate(
    model: str, prompt: str | None, chat: bool, system: str | None, max_new_tokens: int, temperature: float,
    top_k: int | None, top_p: float | None, min_p: float | None, repetition_penalty: float, seed: int,
    stop: tuple[str, ...], dtype: str | None, prefill_chunk: int | None, allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Continues PROMPT (or what comes on stdin) with MODEL, a checkpoint folder or a .gguf file.

    A model with an encoder reads PROMPT and answers it: a translation, a summary.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    said = _prompt(prompt)
    from asbuilt.generate.sampling import Sampling
    from asbuilt.generate.text import StopFilter

    StopFilter(stop)  # everything that can be refused is, before the weights are read
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    source = opened(model, allow_unread, weights=True)
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop, "prefill_chunk": prefill_chunk}
    completion = _start(source, _messages(said, system) if chat else said, dtype, options)
    _finish(completion, as_json)


def _prompt(prompt: str | None) -> str:
    """Returns the prompt as given, or what is piped in."""
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None:
        raise click.ClickException("stdin is closed: give a PROMPT")
    stdin = sys.stdin.buffer
    if prompt is None and stdin.isatty():
        raise click.UsageError("give a PROMPT, or pipe one in")
    data = stdin.read(LONGEST_PROMPT + 1)
    if len(data) > LONGEST_PROMPT:
        raise InputError("too long", field="prompt", allowed=f"{LONGEST_PROMPT} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}", field="prompt on stdin") from error


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    said = [{"role": "user", "content": prompt}]
    return said if system is None else [{"role": "system", "content": system}, *said]


def _start(
    source: Source, prompt: str | list[dict[str, str]], dtype: str | None, options: dict[str, Any]
) -> Completion:
    """Loads the model, having checked what needs no weights, and starts."""
    from asbuilt.checkpoint.load import headers, load
    from asbuilt.cli.dtypes import torch_name
    from asbuilt.generate.decode import check_prompt, check_start
    from asbuilt.generate.text import complete, is_chat, prompt_ids
    from asbuilt.text.chat import turn_ends

    compute = torch_name(dtype)
    headers(source)  # says so where there are no weights
    tokenizer, reads = _tokenizer(source), source.spec.encoder is not None
    start = source.decoder_start if reads else ()
    check_start(source.spec, start)
    ids = prompt_ids(tokenizer, prompt)
    check_prompt(source.spec, ids)
    eos_ids = (*source.eos_ids, *(turn_ends(tokenizer) if is_chat(prompt) else ()))
    return complete(load(source, compute), tokenizer, ids, start=start, eos_ids=eos_ids, **options)


def _tokenizer(source: Source) -> Tokenizer:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer", field="MODEL", value=source.name, fix="put its tokenizer.json beside it")
    return tokenizer


def _finish(completion: Completion, as_json: bool) -> None:
    # What is logged of a clipped request is said here, once.
    logging.getLogger("asbuilt").addHandler(logging.NullHandler())
    if completion.note:
        warn(f"warning: {completion.note}")
    began = time.perf_counter()
    for piece in completion:
        if not as_json:
            write(piece)
    seconds = time.perf_counter() - began
    speed = len(completion.tokens) / seconds
    if as_json:
        print_json(_document(completion, seconds, speed))
        return
    write("\n")
    warn(f"[{len(completion.prompt)} tokens read, {len(completion.tokens)} written in {seconds:.2f} s: "
         f"{speed:.1f} tokens/s; ended by {completion.finish_reason}]")  # fmt: skip


def _document(completion: Completion, seconds: float, speed: float) -> dict[str, Any]:
    """`tokens` are ids, `prompt_tokens` is a number; the seconds are those of prefill and decode, not of loading."""
    return {
        "prompt_tokens": len(completion.prompt),
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "seconds": seconds,
        "tokens_per_second": speed,
    }
