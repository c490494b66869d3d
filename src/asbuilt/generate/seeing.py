"""Placeholders of images or sounds in a prompt: as many tokens as the vectors of each replace."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.tiles import Tiles
from asbuilt.spec import AudioLanguageModel, GridVision, Model, VisionLanguageModel


def tokens_per_image(spec: Model, images: Tensor | Patches | Tiles) -> list[int]:
    """Returns how many tokens each image or sound takes in a text; raises InputError for images of another kind."""
    if isinstance(spec, AudioLanguageModel):
        return [spec.hearing.n_tokens] * len(images)
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


def with_placeholders(
    spec: Model,
    ids: Sequence[int],
    images: Tensor | Patches | Tiles,
    *,
    after: int = 0,
    around: tuple[list[int], list[int]],
) -> list[int]:
    """Returns the prompt with one placeholder for each token of each image or sound.

    A prompt with one placeholder per image has each repeated, one with all of them is unchanged, and one without any
    has them put in after its first `after` tokens, each image between the tokens `around`. Raises InputError for
    another number.
    """
    counts = tokens_per_image(spec, images)
    hears = isinstance(spec, AudioLanguageModel)
    assert isinstance(spec, VisionLanguageModel) or hears
    place = spec.hearing.placeholder if hears else spec.vision.placeholder
    held = sum(token == place for token in ids)
    if held == 0:
        put = [token for n in counts for token in (*around[0], *[place] * n, *around[1])]
        return [*ids[:after], *put, *ids[after:]]
    if held == sum(counts):
        return [*ids]
    if held != len(counts):
        allowed = f"one per image, {len(counts)}"
        what = "sound" if hears else "image"
        raise InputError(f"wrong number of {what} placeholders", field="prompt", value=held, allowed=allowed)
    each = iter(counts)
    return [one for token in ids for one in ([place] * next(each) if token == place else [token])]
