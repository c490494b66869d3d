"""`asbuilt generate`: text from a checkpoint, streamed as it is generated."""

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
@click.option(
    "--max-new-tokens", type=Tokens(), default=256, show_default=True, help="Generate at most this many tokens."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option("--top-k", type=int, help="Sample from the k most likely tokens.")
@click.option("--top-p", type=float, help="Sample from the fewest tokens whose probabilities sum to p.")
@click.option("--min-p", type=float, help="Sample from tokens at least p times as likely as the most likely.")
@click.option(
    "--repetition-penalty",
    type=float,
    default=1.0,
    show_default=True,
    help="Above 1, makes repeated tokens less likely.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given several times.")
@click.option(
    "--dtype",
    help="Compute in fp32, bf16 or fp16. By default as stored, or fp32 where that is much faster "
    "on this machine and fits; fp32 for quantised weights.",
)
@click.option(
    "--kv-dtype",
    help="Format of the cache, by default that of computing: bf16, fp16, fp8 ..., or with scales for each token and "
    "head int8:head, fp8:head, int4:head.",
)
@click.option(
    "--prefill-chunk", type=Tokens(), help="Process the prompt in chunks of this many tokens, to save memory."
)
@click.option(
    "--packed/--expanded",
    default=None,
    help="Keep the weights of a GGUF file or MXFP4 checkpoint packed, or expand them to the compute dtype. By default "
    "those of a GGUF file stay packed where the native kernels multiply them; without these that is slower.",
)
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
@click.option("--adapter", metavar="FOLDER", help="Apply the LoRA adapters in this folder, in PEFT's layout, to MODEL.")
@click.option(
    "--draft",
    metavar="own|prompt|MODEL",
    help="Draft several tokens and verify them in one pass: by MODEL's own predictors (own), by what followed "
    "the same words before (prompt), or by a smaller MODEL of the same vocabulary or an EAGLE-3 folder. Greedy text "
    "stays the same.",
)
@click.option("--draft-tokens", type=Tokens(), help="Draft this many tokens per pass; needs --draft.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end instead of the text.")
def generate(
    model: str,
    prompt: str | None,
    chat: bool,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
    seed: int,
    stop: tuple[str, ...],
    dtype: str | None,
    kv_dtype: str | None,
    prefill_chunk: int | None,
    packed: bool | None,
    images: tuple[str, ...],
    audio: str | None,
    timestamps: bool | None,
    adapter: str | None,
    draft: str | None,
    draft_tokens: int | None,
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
    said = "" if audio is not None and prompt is None else _prompt(prompt)
    from asbuilt.generate.sampling import Sampling
    from asbuilt.generate.text import StopFilter

    StopFilter(stop)  # refuses what it must before the weights are read
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
    options |= {} if audio is None else {"audio": audio}
    options |= {"images": images} if images else {}
    options |= {"kv_dtype": kv_dtype} if kv_dtype else {}
    from asbuilt.api.draft import asked as drafting
    from asbuilt.api.generate import begin
    from asbuilt.checkpoint.room import memory_errors

    # `_finish` prints what is logged about a request; without a handler the library would print it on stderr too.
    logging.getLogger("asbuilt").addHandler(logging.NullHandler())
    asked = _messages(said, system, len(images)) if chat else said
    how: dict[str, Any] = {"field": "--dtype", "packed": packed, "adapter": adapter, "timestamps": timestamps}
    completion, compute = begin(source, asked, dtype or None, options, draft=drafting(draft, draft_tokens), **how)
    if compute.warning:
        warn(f"warning: {compute.warning}")
    with memory_errors(compute.needed, source.name, "to be run"):
        _finish(completion, compute, {"kv_dtype": kv_dtype} if kv_dtype else {}, as_json)


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


def _finish(completion: Completion, compute: Compute, asked: dict[str, Any], as_json: bool) -> None:
    if completion.note:
        warn(f"warning: {completion.note}")
    began = time.perf_counter()
    for piece in completion:
        if not as_json:
            write(piece)
    seconds = time.perf_counter() - began
    speed = len(completion.tokens) / seconds
    if as_json:
        print_json(_document(completion, seconds, speed) | _computed(compute) | asked | _drafted(completion.draft))
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
