"""The paligemma family: SigLIP's tower, one map, and a gemma text that reads its prompt, images included, both ways.

Beyer et al. 2024 (arXiv 2407.07726); PaliGemma 2 has a gemma2 text (arXiv 2412.03555). What continues the prompt is
causal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import gemma, gemma2
from asbuilt.families.gemma3 import NoHead
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, Only, Size, Values, defaults, tied
from asbuilt.families.shared.multimodal import SAME_TIE, TextOf, multimodal_table, placeholder
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


def _prefixed(family: Family) -> Family:
    """Returns a text's family whose config may say that it is bidirectional, as the prefix is."""
    causal = [key for key in family.keys if not (isinstance(key, Only) and key.key == "use_bidirectional_attention")]
    return replace(
        family,
        keys=(
            *causal,
            Irrelevant("the prefix is bidirectional whatever it says", "use_bidirectional_attention"),
            Irrelevant("follows from the tower's size", "num_image_tokens"),
        ),
    )


TEXTS = _prefixed(gemma.FAMILY), _prefixed(gemma2.FAMILY)


def build(text: LanguageModel, images: dict[str, Any], *, placeholder: int) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it, its prompts bidirectional."""
    made = tower(**images, patch_bias=True, class_token="none")
    projector = MLPProjector(widths=(made.d_model, text.d_model), activation="gelu", bias=True)
    vision = Vision(tower=made, projector=projector, placeholder=placeholder, both_ways=True, prefix=True)
    return VisionLanguageModel.of(text, vision)


class _Text(TextOf):
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
        reading = TEXTS[0].read(self.usual, values.pop("name"), f"{self.key}.")
        reader.carried[self.key] = reading.carried
        values["text"] = reading.spec


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    held, text = ("weight", "bias"), TEXTS[whole.blocks[0].branches[0].post_norm is not None]
    projector = [entry(f"vision.projector.layers_0.{name}", f"multi_modal_projector.linear.{name}") for name in held]
    return multimodal_table(whole, text.table(whole.text), projector, family)


FAMILY = Family(
    name="paligemma",
    heads=("PaliGemmaForConditionalGeneration",),
    keys=(  # defaults as in transformers' PaliGemmaConfig
        tied(True),
        _Text(*TEXTS, told=lambda parts: "gemma" if parts.first.post_norm is None else "gemma2"),
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
        Irrelevant("the text's own says it", "vocab_size", "_vocab_size", "hidden_size"),
        Irrelevant("training only", "ignore_index"),
    ),
    build=build,
    names=_names,
)
