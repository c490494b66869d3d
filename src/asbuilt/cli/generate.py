"""`asbuilt generate`: text from a checkpoint, streamed as it is generated."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, warn, write
from asbuilt.cli.running import Place, context_option, echoed, kv_option, place_options, sampling_options, starting
from asbuilt.cli.types import Tokens
from asbuilt.errors import InputError
from asbuilt.files import read_text
from asbuilt.shown import number

if TYPE_CHECKING:
    from asbuilt.generate.compute import Compute
    from asbuilt.generate.draft import Drafter
    from asbuilt.generate.text import Completion

LONGEST_PROMPT = 1 << 26  # bytes; the longest published context is 10 million tokens


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Apply the model's chat template to PROMPT, as the user's message.")
@click.option("--system", help="System message; needs --chat.")
@click.option("-p", "--prompt", "given", metavar="PROMPT", help="The prompt, as the argument PROMPT.")
@click.option("-f", "--file", "file", metavar="FILE", help="Read the prompt from this file.")
@click.option(
    "-n",
    "--max-new-tokens",
    "max_new_tokens",
    type=Tokens(),
    default=256,
    show_default=True,
    help="Generate at most this many tokens.",
)
@context_option
@sampling_options
@kv_option
@click.option(
    "--prefill-chunk", type=Tokens(), help="Process the prompt in chunks of this many tokens, to save memory."
)
@place_options
@click.option(
    "--image", "images", multiple=True, metavar="FILE", help="Image that the model sees before PROMPT; may be repeated."
)
@click.option(
    "--audio", metavar="FILE", help="Sound for a model that hears, such as Whisper; PROMPT then begins its text."
)
@click.option(
    "--timestamps/--no-timestamps",
    default=None,
    help="Print a line for each segment of a transcription, with its times; by default as the folder's settings say.",
)
@click.option(
    "--draft",
    metavar="own|prompt|MODEL",
    help="Draft several tokens and verify them in one pass: by MODEL's own predictors (own), by what followed "
    "the same words before (prompt), or by a smaller MODEL of the same vocabulary or an EAGLE-3 folder. Greedy text "
    "stays the same.",
)
@click.option("--draft-tokens", type=Tokens(), help="Draft this many tokens per pass; needs --draft.")
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Decode by steps that torch.compile has compiled, instead of native kernels.",
)
@click.option("--cuda-graphs", "graphs", is_flag=True, help="Decode by steps that are captured as CUDA graphs.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end instead of the text.")
def generate(
    model: str,
    prompt: str | None,
    chat: bool,
    system: str | None,
    given: str | None,
    file: str | None,
    max_new_tokens: int,
    context: int | None,
    sampled: dict[str, Any],
    stop: tuple[str, ...],
    kv_dtype: str | None,
    prefill_chunk: int | None,
    place: Place,
    images: tuple[str, ...],
    audio: str | None,
    timestamps: bool | None,
    draft: str | None,
    draft_tokens: int | None,
    compiled: bool,
    graphs: bool,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Continue PROMPT (or stdin) with MODEL, a checkpoint folder or a .gguf file.

    An encoder-decoder model reads PROMPT with its encoder and generates from it: a translation, a summary.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if draft_tokens is not None and draft is None:
        raise click.UsageError("--draft-tokens needs --draft")
    prompt = _one_prompt(prompt, given, file)
    said = "" if audio is not None and prompt is None else _prompt(prompt)
    with starting():
        from asbuilt.generate.sampling import Sampling
        from asbuilt.generate.text import StopFilter

        StopFilter(stop)  # refuses what it must before the weights are read
        sampling = Sampling(**sampled)
        source = opened(model, allow_unread, weights=True)
        options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop, "prefill_chunk": prefill_chunk}
        options |= {} if audio is None else {"audio": audio}
        options |= {"images": images} if images else {}
        options |= {"kv_dtype": kv_dtype} if kv_dtype else {}
        from asbuilt.api.draft import asked as drafting
        from asbuilt.api.generate import begin
        from asbuilt.checkpoint.room import memory_errors

        # `_finish` prints what is logged about a request; without a handler the library would print it on stderr too.
        logging.getLogger("asbuilt").addHandler(logging.NullHandler())
        asked = _messages(said, system, len(images)) if chat else said
        how, count = place.taken()
        if compiled or graphs:
            from asbuilt.generate.replay import Replay

            how = replace(how, replay=Replay(compiled=compiled, graphs=graphs))
        drafts = drafting(draft, draft_tokens)
        more = {"context": context, "timestamps": timestamps}
        completion, compute = begin(source, asked, how, options, draft=drafts, **more)
    if compute.warning:
        warn(f"warning: {compute.warning}")
    elif compute.choice and not as_json:
        warn(f"[{compute.choice}]")
    more = {"max_new_tokens": max_new_tokens, "context": context}
    told = ({"kv_dtype": kv_dtype} if kv_dtype else {}) | ({"compile": True} if compiled else {})
    told |= {"cuda_graphs": True} if graphs else {}
    with memory_errors(compute.needed, source.name, "to be run"):
        _finish(completion, compute, echoed(sampling, place, count, **more) | told if as_json else None)


def _one_prompt(prompt: str | None, given: str | None, file: str | None) -> str | None:
    """Returns the prompt that was given, in one of three ways."""
    if sum(one is not None for one in (prompt, given, file)) > 1:
        raise click.UsageError("give PROMPT, --prompt or --file, not several")
    return read_text(Path(file), LONGEST_PROMPT) if file is not None else prompt if given is None else given


def _prompt(prompt: str | None) -> str:
    """Returns the prompt as given, or read from stdin."""
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None:
        raise click.ClickException("stdin is closed: give a PROMPT")
    stdin = sys.stdin.buffer
    if prompt is None and stdin.isatty():
        raise click.UsageError("give a PROMPT, or pipe one to stdin")
    try:
        data = stdin.read(LONGEST_PROMPT + 1)
    except OSError as error:
        raise click.ClickException(f"stdin cannot be read: {error.strerror}") from error
    if len(data) > LONGEST_PROMPT:
        raise InputError("too long", field="prompt", allowed=f"at most {LONGEST_PROMPT:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}", field="prompt on stdin") from error


def _messages(prompt: str, system: str | None, images: int) -> list[dict[str, Any]]:
    seen = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
    said: list[dict[str, Any]] = [{"role": "user", "content": seen if images else prompt}]
    return said if system is None else [{"role": "system", "content": system}, *said]


def _finish(completion: Completion, compute: Compute, settings: dict[str, Any] | None) -> None:
    """Prints the text as it comes, or, with `settings`, one JSON document."""
    if completion.note:
        warn(f"warning: {completion.note}")
    began = time.perf_counter()
    for piece in completion:
        if settings is None:
            write(piece)
    seconds = time.perf_counter() - began
    speed = len(completion.tokens) / seconds
    if settings is not None:
        print_json(_document(completion, seconds, speed) | _computed(compute) | settings | _drafted(completion.draft))
        return
    write("\n")
    warn(
        f"[{len(completion.prompt)} prompt tokens, {len(completion.tokens)} generated in {seconds:.2f} s: "
        f"{number(speed)} tokens/s; finish reason: {completion.finish_reason}]"
    )
    if completion.draft is not None:
        said = _drafted(completion.draft)["draft"]
        share = "" if said["acceptance"] is None else f" ({said['acceptance']:.0%})"
        warn(
            f"[accepted {said['accepted']} of {said['proposed']} drafted tokens{share}, "
            f"in {said['passes']} passes of the model]"
        )


def _segments(completion: Completion) -> dict[str, Any]:
    """The segments of a text with times; the end of the last one may be null."""
    if completion.segments is None:
        return {}
    return {"segments": [{"start": a, "end": b, "text": said} for a, b, said in completion.segments.found]}


def _drafted(draft: Drafter | None) -> dict[str, Any]:
    """Counts of drafts; `acceptance` is the share of drafted tokens that were accepted, null without any."""
    if draft is None:
        return {}
    share = draft.accepted / draft.proposed if draft.proposed else None
    counts = {"passes": draft.passes, "proposed": draft.proposed, "accepted": draft.accepted}
    return {"draft": counts | {"acceptance": share}}


def _computed(compute: Compute) -> dict[str, str]:
    return {"dtype": str(compute.dtype).removeprefix("torch."), "dtype_reason": compute.why}


def _document(completion: Completion, seconds: float, speed: float) -> dict[str, Any]:
    """`tokens` are ids, `prompt_tokens` is a count; the seconds cover prefill and decode, not loading."""
    return {
        "prompt_tokens": len(completion.prompt),
        "text": completion.text,
        **_segments(completion),
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "seconds": seconds,
        "tokens_per_second": speed,
    }
