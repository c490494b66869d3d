"""What image-text families share: a text model's family nested in the config, a tower, a projector.

Names on disk are those of the first releases, as newer ones still write them; files with other beginnings are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, Size, Values
from asbuilt.families.shared.parts import P, Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Entry, TensorTable, respelled
from asbuilt.families.shared.towers import NAMES, POSITION_IDS
from asbuilt.spec import AudioLanguageModel, TiedHead, Vision, VisionLanguageModel

TEXT = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
_INNER, _OUTER = ("vision_tower.", "vision_tower.vision_model."), ("vision_tower.", "model.vision_tower.")
_NEWER = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
SPELLINGS = ((_INNER,), (*_NEWER, _OUTER), (*_NEWER, ("vision_tower.", "model.vision_tower.vision_model.")))


# The tokens that a processor puts around an image.
IMAGE_DELIMITERS = Irrelevant(
    "tokens that the processor puts around an image",
    *(f"{which}_token_{end}" for which in ("boi", "eoi") for end in ("index", "id")),
)


@dataclass(frozen=True, eq=False, repr=False)
class Text:
    """`text_config`, as the text's family reads it; the class defaults where it is missing. It is `within` a whole."""

    family: Family
    within: type[VisionLanguageModel | AudioLanguageModel] = VisionLanguageModel
    key = "text_config"
    into = "text"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the text; raises InputError for another `model_type`, and as the family does."""
        inner = reader.nested(self.key)
        if inner is not None:
            inner.only("model_type", self.family.name, reason=f"only a {self.family.name} text is read here")
        config = {} if inner is None else inner.config
        reading = self.family.read(config, values.pop("name"), f"{self.key}.")
        reader.defaults.update(reading.defaults)
        reader.notes.update(reading.notes)
        reader.carried[self.key] = reading.carried
        values["text"] = reading.spec

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the text's own config."""
        inner = self.family.write(parts.whole(self.within).text, parts.carried.get(self.key, {}), None)
        del inner["architectures"]
        return {self.key: inner}


class TextOf:
    """`text_config`, as the family of its `model_type` reads it, the first of these where it names none.

    A spec that no config was read for is written as the family that `told` names from its parts.
    """

    key, into = "text_config", "text"

    def __init__(self, *families: Family, told: Callable[[Parts], str]) -> None:
        self.texts = {family.name: Text(family) for family in families}
        self.told = told

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the text; raises InputError for another `model_type`, and as the family does."""
        inner, usual = reader.nested(self.key), next(iter(self.texts))
        kind = usual if inner is None else inner.config.get("model_type", usual)
        if not isinstance(kind, str) or kind not in self.texts:
            assert inner is not None
            raise inner.error("model_type", value=kind, allowed=" or ".join(self.texts))
        self.texts[kind].read(reader, values)
        reader.carried[self.key] = {**reader.carried[self.key], "model_type": kind}

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the text's own config."""
        kind = parts.carried.get(self.key, {}).get("model_type", self.told(parts))
        return self.texts[kind].write(parts)


# The text's own config says too whether the head is tied.
SAME_TIE = Check(
    "tie_word_embeddings",
    (lambda values: isinstance(values["text"].head, TiedHead) == values.pop("tied"), "the same as in text_config"),
)


def placeholder(default: int, *, beyond: bool = False) -> Size:
    """Returns the key of the token in whose places images are put, one of the text's own; or any, where allowed.

    Where it is `beyond` the vocabulary nothing is looked up for it.
    """
    own = (
        lambda values: values["placeholder"] < values["text"].n_vocab,
        lambda values: f"a token below vocab_size = {values['text'].n_vocab}",
    )
    return Size(
        "image_token_index",
        "placeholder",
        default=default,
        also=("image_token_id",),
        least=0,
        must=None if beyond else own,
        at="vision.placeholder",
    )


def vision_of(parts: Parts) -> Vision:
    """Returns what becomes of images; raises InputError where the spec knows of none."""
    return parts.whole(VisionLanguageModel).vision


def projector_of(parts: Parts, kind: type[P]) -> P:
    """Returns the projector; raises InputError where it is of another kind."""
    return parts.expect(vision_of(parts).projector, kind, "vision.projector")


def multimodal_table(
    spec: VisionLanguageModel,
    text: TensorTable,
    projector: list[Entry],
    family: str,
    tower: list[Entry] | None = None,
) -> TensorTable:
    """Returns the table of a text's table, a tower and a projector; CLIP's names unless the `tower` has others."""
    if tower is None:
        tower = NAMES.entries(spec.vision.tower, family, "vision.tower.", "vision_tower.")
    entries = (*respelled(text.entries, TEXT), *tower, *projector)
    again = {"language_model.lm_head.weight", "lm_head.weight"} if text.duplicates else set()
    return TensorTable(
        entries=entries,
        ignored=text.ignored | POSITION_IDS,
        duplicates=dict.fromkeys(sorted(again), "embedding.weight"),
        spellings=SPELLINGS,
    )
