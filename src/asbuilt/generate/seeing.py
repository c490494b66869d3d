"""Placeholders of images or sounds in a prompt: as many tokens as the vectors of each replace."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.audio import Sounds
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.tiles import Tiles
from asbuilt.spec import AudioLanguageModel, GridVision, Model, VisionLanguageModel


def tokens_per_image(spec: Model, images: Tensor | Patches | Tiles) -> list[int]:
    """Returns how many tokens each image takes in a text; raises InputError for images of another kind.

    Of a model that hears alone they are those of its sounds.
    """
    if isinstance(spec, AudioLanguageModel) and isinstance(images, Tensor):
        return tokens_per_sound(spec, images)
    if not isinstance(spec, VisionLanguageModel):
        raise InputError("the model reads no images beside a text", field="images")
    vision = spec.vision
    grids = isinstance(vision, GridVision)
    if grids != isinstance(images, Patches) or (isinstance(images, Tiles) and not vision.crosses):
        wanted = "patches and grids" if grids else "pixels (N, C, H, W)"
        given = type(images).__name__
        raise InputError("prepared for another kind of model", field="images", value=given, allowed=wanted)
    if isinstance(images, Tiles):
        return [vision.n_tokens] * len(images)
    if not isinstance(images, Patches):
        return [vision.n_tokens] * len(images.flatten(0, -4))
    merge = vision.projector.merge if isinstance(vision, GridVision) else 1
    return [frames * rows * columns // merge**2 for frames, rows, columns in images.grids]


def tokens_per_sound(spec: Model, audio: Tensor | Sounds) -> list[int]:
    """Returns how many tokens each sound takes in a text; raises InputError for a model that hears none in texts."""
    if spec.heard is None:
        raise InputError("the model hears no sounds in a text", field="audio")
    frames = [audio.shape[-1]] * len(audio) if isinstance(audio, Tensor) else [mel.shape[-1] for mel in audio.mels]
    return [spec.heard.tokens_of(n) for n in frames]


def with_placeholders(
    spec: Model,
    ids: Sequence[int],
    images: Tensor | Patches | Tiles | Sounds,
    *,
    after: int = 0,
    around: tuple[list[int], list[int]],
    sounds: bool = False,
) -> list[int]:
    """Returns the prompt with one placeholder for each token of each image, or sound if `sounds` are given.

    A prompt with one placeholder per image has each repeated, one with all of them is unchanged, and one without any
    has them put in after its first `after` tokens, each image between the tokens `around`. Raises InputError for
    another number. A model that hears alone is given sounds in any case.
    """
    if isinstance(images, Sounds) or sounds or isinstance(spec, AudioLanguageModel):
        assert isinstance(images, Tensor | Sounds)
        counts, what = tokens_per_sound(spec, images), "sound"
        assert spec.heard is not None
        place = spec.heard.placeholder
    else:
        counts, what = tokens_per_image(spec, images), "image"
        assert isinstance(spec, VisionLanguageModel)
        place = spec.vision.placeholder
    held = sum(token == place for token in ids)
    if held == 0:
        put = [token for n in counts for token in (*around[0], *[place] * n, *around[1])]
        return [*ids[:after], *put, *ids[after:]]
    if held == len(counts):
        each = iter(counts)
        return [one for token in ids for one in ([place] * next(each) if token == place else [token])]
    if held != sum(counts):
        allowed = f"one per {what}, {len(counts)}"
        raise InputError(f"wrong number of {what} placeholders", field="prompt", value=held, allowed=allowed)
    return [*ids]
