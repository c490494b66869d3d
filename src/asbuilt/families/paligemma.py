"""The paligemma family: SigLIP's tower, one map, and a gemma text that reads its prompt, images included, both ways.

Beyer et al. 2024 (arXiv 2407.07726). What continues the prompt is causal. Only a gemma text is read here, not gemma2's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import gemma
from asbuilt.families.gemma3 import NoHead
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, Only, Size, Values, defaults, tied
from asbuilt.families.shared.multimodal import SAME_TIE, Text, multimodal_table, placeholder
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.families.shared.towers import SIGLIP, TOWER_IRRELEVANT, Nested, tower
from asbuilt.spec import LanguageModel, MLPProjector, Model, Vision, VisionLanguageModel

IRRELEVANT = (
    *TOWER_IRRELEVANT,
    Irrelevant("follows from the tower's size", "num_image_tokens"),
    Irrelevant("the projector is one map", "projector_hidden_act"),
)
# The tower where the config describes none, as in transformers' PaliGemmaConfig.
USUAL = defaults(SIGLIP, d_model=1152, d_ff=4096, n_layers=27, n_heads=16, patch_size=14, image_size=224)
TEXT = replace(
    gemma.FAMILY,
    keys=(
        *(key for key in gemma.FAMILY.keys if not (isinstance(key, Only) and key.key == "use_bidirectional_attention")),
        Irrelevant("the prefix is bidirectional whatever it says", "use_bidirectional_attention"),
        Irrelevant("follows from the tower's size", "num_image_tokens"),
    ),
)


def build(text: LanguageModel, images: dict[str, Any], *, placeholder: int) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it, its prompts bidirectional."""
    made = tower(**images, patch_bias=True, class_token="none")
    projector = MLPProjector(widths=(made.d_model, text.d_model), activation="gelu", bias=True)
    vision = Vision(tower=made, projector=projector, placeholder=placeholder, both_ways=True, prefix=True)
    return VisionLanguageModel.of(text, vision)


class _Text(Text):
    """The text, which has sizes of its own where the config describes none."""

    usual: dict[str, Any] = {  # noqa: RUF012  # read alone
        "vocab_size": 257152,
        "hidden_size": 2048,
        "num_hidden_layers": 18,
        "intermediate_size": 16384,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    }

    def read(self, reader: ConfigReader, values: Values) -> None:
        if reader.nested(self.key) is not None:
            super().read(reader, values)
            return
        reading = self.family.read(self.usual, values.pop("name"), f"{self.key}.")
        reader.carried[self.key] = reading.carried
        values["text"] = reading.spec


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    held = ("weight", "bias")
    projector = [entry(f"vision.projector.layers_0.{name}", f"multi_modal_projector.linear.{name}") for name in held]
    return multimodal_table(whole, TEXT.table(whole.text), projector, family)


FAMILY = Family(
    name="paligemma",
    heads=("PaliGemmaForConditionalGeneration",),
    keys=(  # defaults as in transformers' PaliGemmaConfig
        tied(True),
        _Text(TEXT),
        SAME_TIE,
        Nested(
            key="vision_config",
            into="images",
            kind="siglip_vision_model",
            at="vision.tower",
            keys=(*IRRELEVANT, NoHead(), *SIGLIP),
            otherwise=(*IRRELEVANT, *USUAL),
        ),
        Size("projection_dim", "d_projected", default=2048, at="d_model"),
        Check(
            "projection_dim",
            (lambda values: values.pop("d_projected") == values["text"].d_model, "text_config's hidden_size"),
        ),
        placeholder(256000, beyond=True),
        Irrelevant("the text's own says it", "vocab_size", "hidden_size"),
        Irrelevant("training only", "ignore_index"),
    ),
    build=build,
    names=_names,
)
