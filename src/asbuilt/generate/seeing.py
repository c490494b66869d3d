"""Placeholders of images or sounds in a prompt: as many tokens as the vectors of each replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.audio import Sounds
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.pieces import Pieces
from asbuilt.nn.tiles import Tiles
from asbuilt.spec import AudioLanguageModel, GridVision, Model, VisionLanguageModel

Encode = Callable[[str], list[int]]  # of a word that stands before an image, to tokens


def tokens_per_image(spec: Model, images: Tensor | Patches | Pieces | Tiles) -> list[int]:
    """Returns how many tokens each image takes in a text; raises InputError for images of another kind.

    Of a model that hears alone they are those of its sounds.
    """
    if isinstance(spec, AudioLanguageModel) and isinstance(images, Tensor):
        return tokens_per_sound(spec, images)
    if not isinstance(spec, VisionLanguageModel):
        raise InputError("the model reads no images beside a text", field="images")
    vision = spec.vision
    grids = isinstance(vision, GridVision)
    fits = isinstance(images, Patches | Tensor) if grids else not isinstance(images, Patches)
    if not fits or (isinstance(images, Tiles) and not vision.crosses):
        wanted = "patches and grids, or pixels (N, C, H, W)" if grids else "pixels (N, C, H, W)"
        given = type(images).__name__
        raise InputError("prepared for another kind of model", field="images", value=given, allowed=wanted)
    if isinstance(images, Tiles | Pieces):
        return [vision.n_tokens] * len(images)
    if not isinstance(vision, GridVision):
        assert isinstance(images, Tensor)
        return [vision.n_tokens] * len(images.flatten(0, -4))
    left, patch = vision.projector.left, vision.tower.embedding.patch_size
    if isinstance(images, Tensor):
        rows, columns = (left(side // patch) for side in images.shape[-2:])
        return [rows * columns] * len(images.flatten(0, -4))
    return [frames * left(rows) * left(columns) for frames, rows, columns in images.grids]


def tokens_per_sound(spec: Model, audio: Tensor | Sounds) -> list[int]:
    """Returns how many tokens each sound takes in a text; raises InputError for a model that hears none in texts."""
    if spec.heard is None:
        raise InputError("the model hears no sounds in a text", field="audio")
    frames = [audio.shape[-1]] * len(audio) if isinstance(audio, Tensor) else [mel.shape[-1] for mel in audio.mels]
    return [spec.heard.tokens_of(n) for n in frames]


def stands_for(
    spec: Model,
    images: Tensor | Patches | Pieces | Tiles | Sounds,
    encode: Encode | None = None,
    *,
    sounds: bool = False,
) -> list[list[int]]:
    """Returns what stands for each image, or sound if `sounds` are given, in a text: placeholders, and words' tokens.

    A model that hears alone is given sounds in any case. Raises InputError for what the model does not read.
    """
    if isinstance(images, Sounds) or sounds or isinstance(spec, AudioLanguageModel):
        assert isinstance(images, Tensor | Sounds)
        counts = tokens_per_sound(spec, images)
        assert spec.heard is not None
        return [[spec.heard.placeholder] * n for n in counts]
    counts = tokens_per_image(spec, images)
    assert isinstance(spec, VisionLanguageModel)
    place, texts = [spec.vision.placeholder], images.texts if isinstance(images, Patches | Pieces) else ()
    said = sum(one for text in texts for one in text if isinstance(one, int))
    if texts and said != sum(counts):
        allowed = f"{sum(counts)} for {len(counts)} images, as many as the model makes of them"
        raise InputError("the processor counts other tokens", field="images", value=said, allowed=allowed)
    if not texts:
        return [place * n for n in counts]
    assert encode is not None
    return [
        [token for one in said for token in (place * one if isinstance(one, int) else encode(one))] for said in texts
    ]


def marked(images: Tensor | Patches | Pieces | Tiles | Sounds, encode: Encode) -> int | None:
    """Returns the token of a prompt in whose place an image is put, where that is no placeholder."""
    word = images.mark if isinstance(images, Pieces) else None
    tokens = [] if word is None else encode(word)
    return tokens[0] if len(tokens) == 1 else None


def with_placeholders(
    spec: Model,
    ids: Sequence[int],
    images: Tensor | Patches | Pieces | Tiles | Sounds,
    *,
    after: int = 0,
    around: tuple[list[int], list[int]],
    sounds: bool = False,
    encode: Encode | None = None,
) -> list[int]:
    """Returns the prompt with what stands for each image, or sound if `sounds` are given.

    In a prompt with one placeholder per image it replaces that, one with all of them is unchanged, and one without any
    has it put in after its first `after` tokens, each image between the tokens `around`, unless words are part of what
    stands for it. What a prompt has for an image may be another word than a placeholder, too. `encode` makes tokens of
    the words that stand between tiles. Raises InputError for another number. A model that hears alone is given sounds
    in any case.
    """
    stands = stands_for(spec, images, encode, sounds=sounds)
    heard = isinstance(images, Sounds) or sounds or isinstance(spec, AudioLanguageModel)
    what, reads = ("sound", spec.heard) if heard else ("image", getattr(spec, "vision", None))
    assert reads is not None
    place: int = reads.placeholder
    held = ids.count(place)
    if held == 0 and encode is not None and (mark := marked(images, encode)) is not None and mark in ids:
        place, held = mark, ids.count(mark)
    if held == 0:
        worded = any(token != place for one in stands for token in one)
        around = ([], []) if worded else around
        put = [token for one in stands for token in (*around[0], *one, *around[1])]
        return [*ids[:after], *put, *ids[after:]]
    if held == len(stands):
        each = iter(stands)
        return [one for token in ids for one in (next(each) if token == place else [token])]
    if held != sum(one.count(place) for one in stands):
        allowed = f"one per {what}, {len(stands)}"
        raise InputError(f"wrong number of {what} placeholders", field="prompt", value=held, allowed=allowed)
    return [*ids]
