"""What the families share whose text has images in it: a text's family nested in the config, a tower, a projector.

Names on disk are those of the first releases, as newer ones still write them; files with other beginnings are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from asbuilt.families.shared.common import config_of, require_same
from asbuilt.families.shared.fused import expect
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Entry, Table, respelled
from asbuilt.families.shared.towers import POSITION_IDS, tower_entries
from asbuilt.spec import Model, Vision

PLACEHOLDER = ("image_token_index", "image_token_id")
TEXT = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
_INNER, _OUTER = ("vision_tower.", "vision_tower.vision_model."), ("vision_tower.", "model.vision_tower.")
_NEWER = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
SPELLINGS = (
    (_INNER,),
    (*_NEWER, _OUTER),
    (*_NEWER, ("vision_tower.", "model.vision_tower.vision_model.")),
)


def read_text(reader: ConfigReader, family: ModuleType) -> Reading:
    """Returns what `text_config` says to the text's family, the class defaults where it is missing.

    Raises InputError for another `model_type`, and as the family's `read`.
    """
    inner = reader.nested("text_config")
    if inner is not None:
        inner.only("model_type", family.FAMILY, reason=f"only a {family.FAMILY} text is read here")
    reading = family.read({} if inner is None else inner.config, reader.where, "text_config.")
    reader.defaults.update(reading.defaults)
    reader.notes.update(reading.notes)
    return reading


def read_around(reader: ConfigReader) -> None:
    """Reads the tokens that a processor puts around an image."""
    for key in ("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"):
        reader.irrelevant(key, "tokens that the processor puts around an image")


def read_placeholder(reader: ConfigReader, default: int, text: Model, *, beyond: bool = False) -> int:
    """Returns the token in whose places images are put, one of the text's own; or any, in families that allow it.

    Where it is `beyond` the vocabulary nothing is looked up for it.
    """
    token = reader.size(*PLACEHOLDER, default=default, least=0)
    if beyond:
        return token
    key = next((key for key in PLACEHOLDER if key in reader.config), PLACEHOLDER[0])
    reader.require(key, token < text.n_vocab, f"a token below vocab_size = {text.n_vocab}")
    return token


def vision_of(spec: Model, family: str) -> Vision:
    """Returns what becomes of images; raises InputError where the spec knows of none."""
    return expect(spec.vision, Vision, "vision", family)


def write_multimodal(
    spec: Model,
    text: ModuleType,
    written: dict[str, Any],
    carried: dict[str, Any],
    dtype: str | None,
    family: str,
    read: Callable[[dict[str, Any], str], Reading],
) -> dict[str, Any]:
    """Returns the family's config: `written`, the text's own and what was carried; it reads back as `spec`."""
    inner = text.write(replace(spec, vision=None), carried.get("text_config", {}), None)
    del inner["architectures"]
    seen = carried.get("vision_config", {}) | written["vision_config"]
    both = {"model_type": family, "image_token_index": vision_of(spec, family).placeholder, "text_config": inner}
    config = config_of(written | both | {"vision_config": seen}, carried, dtype)
    require_same(spec, read(config, spec.name).spec, family)
    return config


def multimodal_table(spec: Model, text: Table, projector: list[Entry], family: str) -> Table:
    """Returns the table of a text's table, a tower and a projector."""
    tower = vision_of(spec, family).tower
    entries = (
        *respelled(text.entries, TEXT),
        *tower_entries(tower, "vision.tower.", "vision_tower.", family),
        *projector,
    )
    again = {"language_model.lm_head.weight", "lm_head.weight"} if text.duplicates else set()
    return Table(
        entries=entries,
        ignored=text.ignored | POSITION_IDS,
        duplicates=dict.fromkeys(sorted(again), "embedding.weight"),
        spellings=SPELLINGS,
    )
