"""The llava family: CLIP's tower, read below its last layer, two matrices, and a llama text.

Liu et al. 2023 (arXiv 2304.08485, 2310.03744).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.clip import IMAGES
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Choice, Flag, Irrelevant, Values, activation, defaults
from asbuilt.families.shared.multimodal import Text, multimodal_table, placeholder, vision_of
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.families.shared.towers import CLIP, TOWER_IRRELEVANT, Nested, tower
from asbuilt.spec import Activation, LanguageModel, MLPProjector, Model, TiedHead, Vision, VisionLanguageModel

# CLIP's large tower, where the config describes none.
LARGE = defaults(CLIP, d_ff=4096, d_model=1024, patch_size=14, image_size=336, n_layers=24, n_heads=16)


def build(
    text: LanguageModel,
    images: dict[str, Any],
    *,
    placeholder: int,
    layers: int,
    keep_class: bool = False,
    activation: Activation = "gelu",
    bias: bool = True,
) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it whose first `layers` blocks run."""
    widths = (images["d_model"], text.d_model, text.d_model)
    vision = Vision(
        tower=tower(**images, embedding_norm=True),
        projector=MLPProjector(widths=widths, activation=activation, bias=bias),
        placeholder=placeholder,
        layers=layers,
        keep_class=keep_class,
    )
    return VisionLanguageModel.of(text, vision)


class _Depth:
    """After how many blocks the stream is taken, counted from 0 or from the end (-1 is after all blocks); carried."""

    key = "vision_feature_layer"

    def read(self, reader: ConfigReader, values: Values) -> None:
        said, n = reader.config.get(self.key, -2), values["images"]["n_layers"]
        reader.require(self.key, is_whole(said) and -n - 1 <= said <= n, f"one whole number, {-n - 1} to {n}")
        reader.irrelevant(self.key, "carried, since it may be counted from either end")
        values["layers"] = said % (n + 1)

    def write(self, parts: Parts) -> dict[str, Any]:
        vision = vision_of(parts)
        n = vision.tower.n_layers + 1
        layers = n - 1 if vision.layers is None else vision.layers
        said = parts.carried.get(self.key, layers - n)
        return {self.key: said if said % n == layers else layers - n}


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
    return multimodal_table(whole, llama.FAMILY.table(whole.text), projector, family)


FAMILY = Family(
    name="llava",
    heads=("LlavaForConditionalGeneration",),
    keys=(  # defaults as in transformers' LlavaConfig
        Text(llama.FAMILY),
        Tied("tie_word_embeddings", "tied", default=False),
        Nested(
            key="vision_config",
            into="images",
            kind=IMAGES,
            at="vision.tower",
            keys=(*TOWER_IRRELEVANT, *CLIP),
            otherwise=(*TOWER_IRRELEVANT, *LARGE),
        ),
        Choice(
            "vision_feature_select_strategy",
            "keep_class",
            default="default",
            choices={"default": False, "full": True},
            at="vision.keep_class",
        ),
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
