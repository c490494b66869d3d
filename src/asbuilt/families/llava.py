"""The llava family: CLIP's or SigLIP's tower, read below its last layer, or Pixtral's; two matrices; a plain text.

Liu et al. 2023 (arXiv 2304.08485, 2310.03744); Li et al. 2024, LLaVA-NeXT-Interleave (arXiv 2407.07895), with SigLIP
and a qwen2; Agrawal et al. 2024, Pixtral 12B (arXiv 2410.07073), with a mistral, as transformers publishes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import llama, mistral, pixtral, qwen2
from asbuilt.families.clip import IMAGES
from asbuilt.families.gemma3 import NoHead
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Values, activation, defaults
from asbuilt.families.shared.multimodal import TextOf, multimodal_table, placeholder, vision_of
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.families.shared.towers import CLIP, SIGLIP, TOWER_IRRELEVANT, Nested, NestedOf, tower
from asbuilt.families.siglip import IMAGES as PLAIN
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
    plain: dict[str, Any] | None = None,
    rows: dict[str, Any] | None = None,
    keep_class: bool = False,
    activation: Activation = "gelu",
    bias: bool = True,
) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it whose first `layers` blocks run.

    With `plain` it is SigLIP's of these sizes, without a class token, with `rows` Pixtral's, of which all blocks run.
    """
    if rows is not None:
        seen = pixtral.tower({**rows, "merge": 1})
        projector = _projector(seen, text, activation, bias)
        return VisionLanguageModel.of(text, GridVision(tower=seen, projector=projector, placeholder=placeholder))
    if plain is not None:
        seen = tower(**plain, patch_bias=True, class_token="none")
    else:
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


def _kind(parts: Parts) -> str:
    """Returns the kind of a spec's tower."""
    vision = vision_of(parts)
    if isinstance(vision, GridVision):
        return pixtral.FAMILY.name
    return PLAIN if vision.tower.embedding.class_token == "none" else IMAGES


def _text(parts: Parts) -> str:
    """Returns the family of a spec's text: llama's, if it can be."""
    if parts.attention.bias and not parts.attention.output_bias:
        return qwen2.FAMILY.name
    return llama.FAMILY.name if parts.window is None else mistral.FAMILY.name


class _Depth:
    """After how many blocks the stream is taken, counted from 0 or from the end (-1 is after all blocks); carried.

    Of Pixtral's tower it is taken after all.
    """

    key = "vision_feature_layer"

    def read(self, reader: ConfigReader, values: Values) -> None:
        said, rows = reader.config.get(self.key, -2), "rows" in values
        n = next(values[name] for name in ("images", "plain", "rows") if name in values)["n_layers"]
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
    """Whether the first vector, a class token, is projected too; other towers than CLIP's have none, and all are."""

    key = "vision_feature_select_strategy"

    def read(self, reader: ConfigReader, values: Values) -> None:
        whole = reader.choice(self.key, choices={DEFAULT: False, FULL: True}, default=DEFAULT)
        has = "images" in values
        reader.require(self.key, whole or has, f'"{FULL}": the first vector of this tower is a patch')
        values["keep_class"] = whole and has

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: FULL if _kind(parts) != IMAGES or vision_of(parts).keep_class else DEFAULT}


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
            qwen2.FAMILY,
            told=_text,
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
                into="plain",
                kind=PLAIN,
                at="vision.tower",
                keys=(*TOWER_IRRELEVANT, NoHead(), *SIGLIP),
            ),
            Nested(
                key="vision_config",
                into="rows",
                kind=pixtral.FAMILY.name,
                at="vision.tower",
                keys=pixtral.WITHIN,
            ),
            told=_kind,
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
