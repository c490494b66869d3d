"""The kind of whole model that the fields of a `Model` describe, as older specs and the short form give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from asbuilt.errors import InputError, near
from asbuilt.spec.adaptive import AdaptiveHead
from asbuilt.spec.audio import MelEmbedding, MelSubsampling
from asbuilt.spec.audio_encoder import AudioEncoder
from asbuilt.spec.audio_language_model import AudioLanguageModel
from asbuilt.spec.dual_encoder import DualEncoder
from asbuilt.spec.encoder_decoder import EncoderDecoder
from asbuilt.spec.head import Head, TiedHead
from asbuilt.spec.image_encoder import ImageEncoder
from asbuilt.spec.language_model import LanguageModel
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.model import Model
from asbuilt.spec.part import Part, walk
from asbuilt.spec.text_encoder import TextEncoder
from asbuilt.spec.vision import Contrast, PatchEmbedding
from asbuilt.spec.vision_language_model import VisionLanguageModel

WHOLES: tuple[type[Model], ...] = (
    LanguageModel,
    TextEncoder,
    EncoderDecoder,
    ImageEncoder,
    AudioEncoder,
    VisionLanguageModel,
    AudioLanguageModel,
    DualEncoder,
)
# The fields of all kinds of whole models, each with whether it is required in each kind.
FIELDS = {field.name: field for kind in reversed(WHOLES) for field in fields(kind)}
ALWAYS = ("embedding", "blocks", "max_positions")


def whole(given: Mapping[str, object]) -> tuple[type[Model], dict[str, object]]:
    """Returns the kind of model that the fields describe, and those of them that it has; None counts as not given.

    Raises InputError naming the first field that the kind described by the others does not have.
    """
    said = {name: value for name, value in given.items() if value is not None and value != ()}
    for name in given:
        if name not in FIELDS:
            raise InputError("unknown field of Model", field=f"Model.{name}", fix=near(name, FIELDS))
    kind = _kind(said)
    own = {field.name for field in fields(kind)}
    for name, value in said.items():
        if name not in own:
            wholes = " or ".join(one.__name__ for one in WHOLES if name in {field.name for field in fields(one)})
            problem = f"the other fields describe {kind.__name__}, which has no {name}"
            raise InputError(problem, field=f"Model.{name}", value=value, fix=f"it is a field of {wholes}")
    return kind, {name: value for name, value in given.items() if name in own}


def _kind(said: Mapping[str, object]) -> type[Model]:
    if isinstance(said.get("embedding"), PatchEmbedding):
        return ImageEncoder
    if isinstance(said.get("embedding"), MelEmbedding | MelSubsampling):
        return AudioEncoder
    if isinstance(said.get("vision"), Contrast):
        return DualEncoder
    if "encoder" in said:
        return EncoderDecoder
    if "vision" in said:
        return VisionLanguageModel
    if "hearing" in said:
        return AudioLanguageModel
    if said.keys() & {"types", "embedding_projection", "pooler"}:
        return TextEncoder
    writes = isinstance(said.get("head"), Head | TiedHead | AdaptiveHead) and _causal(said.get("blocks"))
    return LanguageModel if writes or "predictors" in said else TextEncoder


def _causal(blocks: object) -> bool:
    """Returns whether all mixers are causal; anything but a block is refused later."""
    unlike = {id(block): block for block in blocks if isinstance(block, Part)} if isinstance(blocks, tuple) else {}
    return all(part.decodes for one in unlike.values() for _, part in walk(one) if isinstance(part, Mixer))
