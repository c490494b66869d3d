"""The llava family: CLIP's tower, read below its last layer, or Pixtral's; two matrices; a llama or a mistral text.

Liu et al. 2023 (arXiv 2304.08485, 2310.03744); Agrawal et al. 2024, Pixtral 12B (arXiv 2410.07073), as transformers
publishes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import llama, mistral, pixtral
from asbuilt.families.clip import IMAGES
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Values, activation, defaults
from asbuilt.families.shared.multimodal import TextOf, multimodal_table, placeholder, vision_of
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.families.shared.towers import CLIP, TOWER_IRRELEVANT, Nested, NestedOf, tower
from asbuilt.spec import (
    Activation,
    GridVision,
    ImageEncoder,
    LanguageModel,
    MLPProjector,
    Model,
    TiedHead,
    Vision,
    VisionLanguageModel,
)

# CLIP's large tower, where the config describes none.
LARGE = defaults(CLIP, d_ff=4096, d_model=1024, patch_size=14, image_size=336, n_layers=24, n_heads=16)
DEFAULT, FULL = "default", "full"


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with RoPE of Pixtral's tower in its newer spelling."""
    images = config.get("vision_config")
    if not isinstance(images, dict) or images.get("model_type") != pixtral.FAMILY.name:
        return config
    return config | {"vision_config": pixtral.axial(images)}


def build(
    text: LanguageModel,
    images: dict[str, Any] | None = None,
    *,
    placeholder: int,
    layers: int,
    rows: dict[str, Any] | None = None,
    keep_class: bool = False,
    activation: Activation = "gelu",
    bias: bool = True,
) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it whose first `layers` blocks run.

    With `rows` the tower is Pixtral's of these sizes, of which all blocks run.
    """
    if rows is not None:
        seen = pixtral.tower({**rows, "merge": 1})
        projector = _projector(seen, text, activation, bias)
        return VisionLanguageModel.of(text, GridVision(tower=seen, projector=projector, placeholder=placeholder))
    assert images is not None
    seen = tower(**images, embedding_norm=True)
    vision = Vision(
        tower=seen,
        projector=_projector(seen, text, activation, bias),
        placeholder=placeholder,
        layers=layers,
        keep_class=keep_class,
    )
    return VisionLanguageModel.of(text, vision)


def _projector(seen: ImageEncoder, text: LanguageModel, activation: Activation, bias: bool) -> MLPProjector:
    return MLPProjector(widths=(seen.d_model, text.d_model, text.d_model), activation=activation, bias=bias)


def _any_size(parts: Parts) -> bool:
    return isinstance(vision_of(parts), GridVision)


class _Depth:
    """After how many blocks the stream is taken, counted from 0 or from the end (-1 is after all blocks); carried.

    Of Pixtral's tower it is taken after all.
    """

    key = "vision_feature_layer"

    def read(self, reader: ConfigReader, values: Values) -> None:
        said, rows = reader.config.get(self.key, -2), "rows" in values
        n = values["rows" if rows else "images"]["n_layers"]
        reader.require(self.key, is_whole(said) and -n - 1 <= said <= n, f"one whole number, {-n - 1} to {n}")
        if rows and said not in (-1, n):
            raise reader.error(self.key, "of this tower only the output is projected", value=said, allowed=f"-1 or {n}")
        reader.irrelevant(self.key, "carried, since it may be counted from either end")
        values["layers"] = said % (n + 1)

    def write(self, parts: Parts) -> dict[str, Any]:
        vision = vision_of(parts)
        n = vision.tower.n_layers + 1
        layers = n - 1 if vision.layers is None else vision.layers
        said = parts.carried.get(self.key, layers - n)
        return {self.key: said if said % n == layers else layers - n}


class _Selected:
    """Whether the first vector, a class token, is projected too; Pixtral's tower has none, and all vectors are."""

    key = "vision_feature_select_strategy"

    def read(self, reader: ConfigReader, values: Values) -> None:
        whole = reader.choice(self.key, choices={DEFAULT: False, FULL: True}, default=DEFAULT)
        rows = "rows" in values
        reader.require(self.key, whole or not rows, f'"{FULL}": the first vector of this tower is a patch')
        values["keep_class"] = whole and not rows

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: FULL if _any_size(parts) or vision_of(parts).keep_class else DEFAULT}


class Tied(Flag):
    """Whether the text's head is tied, which the text's own config may say too."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the flag, and ties the head."""
        super().read(reader, values)
        if values.pop(self.into):
            text = values["text"]
            values["text"] = replace(text, head=TiedHead(d_model=text.d_model, n_vocab=text.n_vocab))


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    held = whole.vision.projector.local_weights()
    stored = {"layers_0": "linear_1", "layers_1": "linear_2"}
    projector = []
    for name in held:
        stem, _, kind = name.partition(".")
        projector.append(entry(f"vision.projector.{name}", f"multi_modal_projector.{stored.get(stem, stem)}.{kind}"))
    rows = isinstance(whole.vision, GridVision)
    seen = pixtral.entries(whole.vision.tower, family, "vision.tower.", "vision_tower.") if rows else None
    return multimodal_table(whole, llama.FAMILY.table(whole.text), projector, family, seen)


FAMILY = Family(
    name="llava",
    heads=("LlavaForConditionalGeneration",),
    prepare=prepared,
    keys=(  # defaults as in transformers' LlavaConfig
        TextOf(
            llama.FAMILY,
            mistral.FAMILY,
            told=lambda parts: llama.FAMILY.name if parts.window is None else mistral.FAMILY.name,
        ),
        Tied("tie_word_embeddings", "tied", default=False),
        NestedOf(
            Nested(
                key="vision_config",
                into="images",
                kind=IMAGES,
                at="vision.tower",
                keys=(*TOWER_IRRELEVANT, *CLIP),
                otherwise=(*TOWER_IRRELEVANT, *LARGE),
            ),
            Nested(
                key="vision_config",
                into="rows",
                kind=pixtral.FAMILY.name,
                at="vision.tower",
                keys=pixtral.WITHIN,
            ),
            told=lambda parts: pixtral.FAMILY.name if _any_size(parts) else IMAGES,
        ),
        _Selected(),
        replace(activation("projector_hidden_act", "gelu"), at="vision.projector.activation"),
        placeholder(32000),
        _Depth(),
        Flag("multimodal_projector_bias", "bias", default=True, at="vision.projector.bias"),
        Irrelevant("training only", "ignore_index"),
        Irrelevant("follows from the tower's size, and only the processor uses it", "image_seq_length"),
        Irrelevant("the text's own says it", "vocab_size"),
    ),
    build=build,
    names=_names,
)
