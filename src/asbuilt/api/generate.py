"""`asbuilt.generate(model, prompt)`: returns text for a text prompt, token ids for token ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from asbuilt.api.draft import Asked, asked
from asbuilt.api.running import Request, Running, contents_of, ready
from asbuilt.checkpoint.given import source_of
from asbuilt.checkpoint.load import dtype_of, headers, load
from asbuilt.checkpoint.room import memory_errors
from asbuilt.dtypes import short_name
from asbuilt.errors import InputError
from asbuilt.generate import compute as computing
from asbuilt.generate import decode, text
from asbuilt.generate.compute import Compute
from asbuilt.generate.replay import Replay
from asbuilt.generate.sampling import Sampling, Times
from asbuilt.generate.seeing import with_placeholders
from asbuilt.nn.audio import Sounds
from asbuilt.nn.cache import require_cache
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.model import Model
from asbuilt.nn.pieces import Pieces
from asbuilt.nn.tiles import Tiles
from asbuilt.text import chat
from asbuilt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.generate.draft import Drafter
    from asbuilt.generate.text import Completion
    from asbuilt.spec import Model as Spec

log = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
Sound = str | Path | Tensor | Sounds  # an audio file, or log-mel spectrograms (n, F, N), or of several lengths
Picture = Any  # an image file, or Pillow's Image
# Tokens that a processor puts around an image, by the keys of configs.
AROUND = (
    ("vision_start_token_id", "boi_token_index", "boi_token_id"),
    ("vision_end_token_id", "eoi_token_index", "eoi_token_id"),
)
AROUND_SOUNDS = ("boa_token_id", "boa_token_index"), ("eoa_token_id", "eoa_token_index")
NO_DRAFT = Asked()
MOST = 256  # default of max_new_tokens


@overload
def generate(
    model: Given,
    prompt: str | Messages,
    *,
    max_new_tokens: int = MOST,
    sampling: Sampling = ...,
    stop: Sequence[str] = (),
    audio: Sound | None = None,
    images: Sequence[Picture] | Tensor | Patches | Pieces | Tiles | None = None,
    dtype: object = None,
    tokenizer: Tokenizer | Source | str | None = None,
    allow_unread: Sequence[str] = (),
    draft: Given | Drafter | None = None,
    draft_tokens: int | None = None,
    timestamps: bool | None = None,
    kv_dtype: object = None,
    replay: Replay | None = None,
) -> str: ...


@overload
def generate(
    model: Given,
    prompt: list[int],
    *,
    max_new_tokens: int = MOST,
    sampling: Sampling = ...,
    stop: Sequence[str] = (),
    audio: Sound | None = None,
    images: Sequence[Picture] | Tensor | Patches | Pieces | Tiles | None = None,
    dtype: object = None,
    tokenizer: Tokenizer | Source | str | None = None,
    allow_unread: Sequence[str] = (),
    draft: Given | Drafter | None = None,
    draft_tokens: int | None = None,
    timestamps: bool | None = None,
    kv_dtype: object = None,
    replay: Replay | None = None,
) -> list[int]: ...


def generate(
    model: Given,
    prompt: str | list[int] | Messages,
    *,
    max_new_tokens: int = MOST,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    stop: Sequence[str] = (),
    audio: Sound | None = None,
    images: Sequence[Picture] | Tensor | Patches | Pieces | Tiles | None = None,
    dtype: object = None,
    tokenizer: Tokenizer | Source | str | None = None,
    allow_unread: Sequence[str] = (),
    draft: Given | Drafter | None = None,
    draft_tokens: int | None = None,
    timestamps: bool | None = None,
    kv_dtype: object = None,
    replay: Replay | None = None,
) -> str | list[int]:
    """Returns a model's completion of a text or chat messages as text, or of token ids as token ids.

    `model` is a name, a path or a source, whose weights are loaded for this one call, or a built model, for which
    `tokenizer` is a tokenizer or a model that has one. `dtype` is the compute dtype; None means as stored, or float32
    if that is much faster on this machine. Greedy unless `sampling` is given; ends at the model's end tokens, before a
    `stop` text, or after `max_new_tokens`; tokens that the folder's generation settings suppress are not chosen, unless
    `sampling` says which. A model that sees is given `images`, files, Pillow's images, or pixels or patches as it reads
    them: each replaces one placeholder of the prompt, and a text without any begins with them. A model that hears is
    given `audio`, a file or a spectrogram, and writes on from the prompt, a text prompt after its start tokens, and
    with `timestamps` a line for each segment. With `draft`, `draft_tokens` tokens at a time are drafted and verified in
    one pass: by the model's own predictors ("own"), by looking up the text itself ("prompt"), or by a smaller model of
    the same vocabulary or an EAGLE-3 folder. `kv_dtype` is the format of the cache, None for that of computing: a float
    such as bf16 or fp8, or int8:head, fp8:head, int4:head with scales for each token and head. `replay` has decode
    steps compiled, or captured as CUDA graphs. `asbuilt.complete` streams the text. Raises InputError before anything
    runs.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "prefill_chunk": None}
    options |= {} if audio is None else {"audio": audio}
    options |= {} if images is None else {"images": images}
    options |= {} if kv_dtype is None else {"kv_dtype": short_name(kv_dtype)}
    options |= {} if replay is None else {"replay": replay}
    drafts = asked(draft, draft_tokens)
    ids = isinstance(prompt, list) and not text.is_chat(prompt)
    if isinstance(model, nn.Module):
        options |= {"draft": drafts.loaded(model)} if drafts.given and isinstance(model, Model) else {}
        return _by_built(model, prompt, _tokenizer_of(tokenizer), options | {"stop": stop}, ids=ids)
    source = source_of(model, weights=True, allow_unread=allow_unread)
    if ids and source.tokenizer() is None:
        model = load(source, None if dtype is None else dtype_of(dtype))
        options |= {"draft": drafts.loaded(model), "sampling": sampled(source, sampling)}
        return _ids(model, prompt, source.eos_ids, **options | _heard(source, audio) | _seen(source, images))
    options |= {"stop": stop}
    how = Running(dtype=None if dtype is None else dtype_of(dtype), replay=replay)
    own = _tokenizer_of(tokenizer)
    completion, compute = begin(source, prompt, how, options, tokenizer=own, draft=drafts, timestamps=timestamps)
    if compute.warning:
        log.warning(compute.warning)
    with memory_errors(compute.needed, source.name, "to be run"):
        said = "".join(completion)
    return completion.tokens if ids else said


def _by_built(
    model: nn.Module,
    prompt: Any,  # noqa: ANN401
    tokenizer: Tokenizer | None,
    options: dict[str, Any],
    *,
    ids: bool,
) -> str | list[int]:
    if not isinstance(model, Model):
        raise InputError(field="model", value=type(model).__name__, allowed="a model that `build` or `load` returned")
    if tokenizer is None:
        if not ids:
            raise InputError(
                "a built model has no tokenizer", field="tokenizer", fix="pass one, or give a checkpoint that has one"
            )
        return _ids(model, prompt, (), **{key: value for key, value in options.items() if key != "stop"})
    completion = text.complete(model, tokenizer, prompt, **options)
    said = "".join(completion)
    return completion.tokens if ids else said


def _ids(model: Model, prompt: Any, eos_ids: Sequence[int], **options: Any) -> list[int]:  # noqa: ANN401
    steps = decode.generate(model, [prompt], eos_ids=eos_ids, **options)
    return [token for (token,) in steps if token is not None]


def _tokenizer_of(given: Tokenizer | Source | str | None) -> Tokenizer | None:
    if given is None or isinstance(given, Tokenizer):
        return given
    return required_tokenizer(source_of(given))


def required_tokenizer(source: Source) -> Tokenizer:
    """Returns the source's tokenizer; raises InputError if it has none."""
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError(
            "has no tokenizer", field="MODEL", value=source.name, fix="add its tokenizer.json to the folder"
        )
    return tokenizer


def sampled(source: Source, sampling: Sampling) -> Sampling:
    """Returns the settings with the tokens that the folder suppresses, unless the request says which."""
    if sampling.suppress or sampling.suppress_first:
        return sampling
    suppress, first = source.suppressed
    return replace(sampling, suppress=suppress, suppress_first=first)


def _timed(source: Source, sampling: Sampling, wanted: bool | None) -> Sampling:
    """Returns the settings of a text with times, if they are `wanted`, by default as the folder's settings say."""
    if not (source.timed if wanted is None else wanted):
        return sampling
    begin, latest = source.times
    ends = [token for token in source.eos_ids if token < begin]
    if not ends:
        raise InputError(
            "no end token before those of times", field=f"{source.name}: eos_token_id", value=source.eos_ids
        )
    return replace(sampling, times=Times(begin=begin, end=ends[0], latest=latest))


def _heard(source: Source, audio: Sound | None) -> dict[str, Tensor | Sounds]:
    """Returns the option `audio` as a spectrogram, computed as the folder says if it is a file; none without one."""
    if audio is None or isinstance(audio, Tensor | Sounds):
        return {} if audio is None else {"audio": audio}
    if "audio" not in source.spec.reads:
        raise InputError("the model hears no sound", field="audio", value=str(audio))
    if source.path is None:
        raise InputError("audio files need a checkpoint folder", field="MODEL", value=source.name)
    from asbuilt.media.sound import read_sound, spectrogram_of

    mels = spectrogram_of(source.path)
    return {"audio": mels.of(read_sound(audio, rate=mels.rate, seconds=mels.seconds))}


def _seen(
    source: Source, images: Sequence[Picture] | Tensor | Patches | Pieces | Tiles | None
) -> dict[str, Tensor | Patches | Pieces | Tiles]:
    """Returns the option `images` as the model reads them, prepared as the folder says if they are files."""
    if images is None or isinstance(images, Tensor | Patches | Pieces | Tiles):
        return {} if images is None else {"images": images}
    if "images" not in source.spec.reads:
        raise InputError("the model reads no images", field="images", value=len(images))
    if not len(images):
        return {}
    if source.path is None:
        raise InputError("image files need a checkpoint folder", field="MODEL", value=source.name)
    from asbuilt.media.image import Preparation

    return {"images": Preparation.read(source.path).of(images)}


def _placed(
    source: Source,
    tokenizer: Tokenizer,
    ids: list[int],
    prompt: object,
    images: Tensor | Patches | Pieces | Tiles | Sounds,
    *,
    sounds: bool = False,
) -> list[int]:
    """Returns the prompt with placeholders of images or sounds; a text without any begins with them."""
    carried, n_vocab = source.reading.carried, source.spec.n_vocab
    names = AROUND_SOUNDS if sounds else AROUND
    found = [next((carried[key] for key in keys if type(carried.get(key)) is int), None) for keys in names]
    around = tuple([one] if one is not None and 0 <= one < n_vocab else [] for one in found)
    bare = tokenizer.encode("", wrap=True) if isinstance(prompt, str) else []
    after = next((i for i, token in enumerate(bare) if i >= len(ids) or ids[i] != token), len(bare))
    return with_placeholders(
        source.spec,
        ids,
        images,
        after=after,
        around=(around[0], around[1]),
        sounds=sounds,
        encode=lambda word: tokenizer.encode(word, special=True),
    )


def begin(
    source: Source,
    prompt: str | list[int] | Messages,
    how: Running,
    options: dict[str, Any],
    *,
    tokenizer: Tokenizer | None = None,
    draft: Asked = NO_DRAFT,
    context: int | None = None,
    timestamps: bool | None = None,
) -> tuple[Completion, Compute]:
    """Checks the request and the memory, loads the model, and starts generating.

    `options` are those of `text.complete`; `context` bounds the tokens of the prompt and the text, by default by the
    model's own. A speech model first hears which language it is, where no setting says it; `timestamps` are as the
    folder's settings say by default.
    """
    draft.check(source.spec)
    if how.replay is not None:
        how.replay.check(source.spec, torch.device(how.device), drafts=bool(draft.given))
        options = options | {"replay": how.replay}
    headers(source)  # raises if there are no weights
    options = options | _heard(source, options.get("audio"))
    options = {name: value for name, value in options.items() if name != "images"} | _seen(
        source, options.get("images")
    )
    options["sampling"] = sampled(source, options.get("sampling", Sampling()))
    tokenizer, reads = tokenizer or required_tokenizer(source), "source" in source.spec.reads
    start = source.decoder_start if reads else ()
    decode.check_start(source.spec, start)
    decode.check_audio(source.spec, options.get("audio"), 1)
    ids, heard = _prompt_ids(source, tokenizer, prompt, options, timestamps)
    decode.check_prompt(source.spec, ids)
    draft.check_words(tokenizer, ids)
    eos_ids = (*source.eos_ids, *(chat.turn_ends(tokenizer) if text.is_chat(prompt) else ()))
    begun, chunk = start if reads else ids, options["prefill_chunk"]
    options["max_new_tokens"] = _within(source.spec, len(begun), options["max_new_tokens"], context)
    new = max(0, decode.room(source.spec, len(begun), options["max_new_tokens"]))
    kv = options.get("kv_dtype")
    if kv is not None:
        require_cache(source.spec, kv, how.dtype or torch.float32)
    contents = contents_of(source, how, (len(ids), new))

    def needs(spec: Spec, dtype: torch.dtype) -> int:
        return computing.request_bytes(spec, len(begun), new, dtype, chunk, len(ids) if reads else None, kv)

    def beside(spec: Spec, dtype: torch.dtype) -> int:
        return draft.needs(spec, (len(begun), new), dtype, chunk)

    request = Request(prompt_tokens=len(ids), new_tokens=new, needs=needs, beside=beside)
    model, compute = ready(source, how, contents, request)
    if heard:
        ids[1] = decode.detect_language(model, ids[0], heard, options["audio"])
    options |= {"draft": draft.loaded(model)}
    return text.complete(model, tokenizer, ids, start=start, eos_ids=eos_ids, **options), compute


def _prompt_ids(
    source: Source,
    tokenizer: Tokenizer,
    prompt: str | list[int] | Messages,
    options: dict[str, Any],
    timestamps: bool | None,
) -> tuple[list[int], tuple[int, ...]]:
    """Returns the prompt's tokens, with placeholders for images and sounds, and the languages that may be heard."""
    heard: tuple[int, ...] = ()
    speech = prompt if "audio" in source.spec.reads and source.spec.heard is None else None
    if timestamps and not isinstance(speech, str):
        raise InputError("only a speech model's transcription has times", field="timestamps", value=source.name)
    if source.spec.heard is not None:
        ids = text.prompt_ids(tokenizer, prompt)
        placed = options.get("audio")
        ids = ids if placed is None else _placed(source, tokenizer, ids, prompt, placed, sounds=True)
    elif isinstance(speech, str):
        options["sampling"] = timing = _timed(source, options["sampling"], timestamps)
        heard = source.languages
        first = source.begun(heard[0] if heard else None, timing.times is not None)
        ids = [*first, *tokenizer.encode(speech)]
    else:
        ids = text.prompt_ids(tokenizer, prompt)
    ids = _placed(source, tokenizer, ids, prompt, options["images"]) if "images" in options else ids
    return ids, heard


def _within(spec: Spec, begun: int, new: int, context: int | None) -> int:
    """Returns how many new tokens a smaller context leaves; raises InputError for one that is none, or too small."""
    if context is None:
        return new
    if not 1 <= context <= spec.max_positions:
        allowed = f"from 1 to {spec.max_positions}, the context of {spec.name}"
        raise InputError(field="context", value=context, allowed=allowed)
    if begun >= context:
        raise InputError("no room after the prompt", field="context", value=context, allowed=f"more than {begun}")
    return min(new, context - begun)
